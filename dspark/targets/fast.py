"""Faster modules for decoding on a CPU, in the target's own copy of the module tree.

Decoder layers of the Llama type run in fewer operators (``dspark.targets.layers``). Linear layers in bfloat16 run in
oneDNN's own layout, for a second copy of their weights: it spares a reorder on every product, which pays most for a few
rows. Llama-type RMS norms run as one operator instead of seven. What does not give the plain result is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.ops.packed import linear, pack
from dspark.targets.layers import speed_up_layers

_WIDE = 8192
"""Outputs from which a single row gains as well."""
_SHARE = 0.25
"""Most of the free memory that copies may take."""


def speed_up(model: nn.Module, free_bytes: int | None, layers: Sequence[nn.Module] = ()) -> Callable[[], None]:
    """Replace the forward of decoder layers, linear layers and norms where that is faster and gives the same.

    Args:
        model: its modules are changed, its parameters are not.
        free_bytes: copies of weights may take a quarter of it; None for no limit.
        layers: its decoder layers.

    Returns:
        what undoes it.
    """
    copies = free_bytes is None or _linear_bytes(model) <= _SHARE * free_bytes
    changed = _fuse_norms(model)
    written = speed_up_layers(list(layers), _forward_of, copies=copies)
    inside = {id(part) for layer in written for part in layer.modules()}
    changed += written
    if copies:
        changed += _pack_linears(part for part in model.modules() if id(part) not in inside)

    def undo() -> None:
        for module in changed:
            vars(module).pop("forward", None)

    return undo


def _forward_of(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """What calling it does, without the call's own cost where its forward has been replaced."""
    replaced: Callable[[Tensor], Tensor] | None = vars(module).get("forward")
    return module if replaced is None else replaced


def _linears(modules: Iterable[nn.Module]) -> list[nn.Linear]:
    return [m for m in modules if type(m) is nn.Linear and "forward" not in vars(m)]


def _linear_bytes(model: nn.Module) -> int:
    return sum({m.weight.data_ptr(): m.weight.nbytes for m in _linears(model.modules())}.values())


def _pack_linears(modules: Iterable[nn.Module]) -> list[nn.Module]:
    copies: dict[int, Tensor | None] = {}
    changed: list[nn.Module] = []
    for layer in _linears(modules):
        weight = layer.weight.detach()
        if weight.data_ptr() not in copies:
            copies[weight.data_ptr()] = pack(weight)
        copy = copies[weight.data_ptr()]
        if copy is not None:
            vars(layer)["forward"] = _packed_forward(layer, weight, copy)
            changed.append(layer)
    return changed


def _packed_forward(layer: nn.Linear, weight: Tensor, copy: Tensor) -> Callable[[Tensor], Tensor]:
    bias = None if layer.bias is None else layer.bias.detach()
    single = weight.shape[0] >= _WIDE
    width = weight.shape[1]

    def forward(x: Tensor) -> Tensor:
        if x.numel() == width and not single:
            return F.linear(x, weight, bias)
        return linear(x, weight, bias, copy)

    return forward


def _fuse_norms(model: nn.Module) -> list[nn.Module]:
    changed: list[nn.Module] = []
    for module in model.modules():
        epsilon: Any = getattr(module, "variance_epsilon", None)
        weight: Any = getattr(module, "weight", None)
        if not type(module).__name__.endswith("RMSNorm") or not isinstance(epsilon, float) or "forward" in vars(module):
            continue
        if not isinstance(weight, Tensor) or weight.dim() != 1 or weight.device.type != "cpu":
            continue
        fused = _fused_norm(weight.detach(), epsilon)
        if _agree(module, fused, weight):
            module.forward = fused
            changed.append(module)
    return changed


def _fused_norm(weight: Tensor, epsilon: float) -> Callable[[Tensor], Tensor]:
    shape = (weight.shape[0],)

    def forward(x: Tensor) -> Tensor:
        return F.rms_norm(x, shape, weight, epsilon)

    return forward


@torch.no_grad()
def _agree(module: nn.Module, fused: Callable[[Tensor], Tensor], weight: Tensor) -> bool:
    """Do both give the same, up to the last bits of the dtype?"""
    x = torch.linspace(-3, 2, 4 * weight.shape[0], dtype=torch.float64).reshape(4, -1).to(weight.dtype)
    plain, fast = module(x), fused(x)
    if plain.dtype != fast.dtype or plain.shape != fast.shape:
        return False
    close = 4 * torch.finfo(weight.dtype).eps
    return bool(torch.allclose(plain, fast, rtol=close, atol=close))
