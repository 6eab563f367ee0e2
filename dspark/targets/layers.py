"""Decoder layers of the Llama type in fewer operators, for packed forwards on a CPU.

At a few rows a forward is bound by calls, not by arithmetic. Here query, key and value are one product, and gate and up
another (16 bits; wider types keep the products of the plain layer), queries and keys are rotated together, and keys and
values are written together. The arithmetic is the layer's own, operation by operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.ops.packed import linear, pack
from dspark.targets.attention import CONTEXT_KEY, SlotContext

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_PARTS = (*_LINEARS, *_MLP, "mlp.act_fn", "input_layernorm", "post_attention_layernorm")

Norms = Callable[[nn.Module], Callable[[Tensor], Tensor]]
Attend = Callable[[Tensor], Tensor]
"""Attention over rotated queries, keys and values [B, heads, D] of all kinds: [B, query heads * D]."""


class Projection:
    """Linear layers of one input as one product, in oneDNN's layout where there is one and a copy is allowed."""

    def __init__(self, layers: list[nn.Linear], copies: bool) -> None:
        self.layers = layers
        self.weight = self.bias = self.packed = None
        if not copies or len({layer.bias is None for layer in layers}) > 1:
            return
        weight = (
            torch.cat([layer.weight.detach() for layer in layers]) if len(layers) > 1 else layers[0].weight.detach()
        )
        self.packed = pack(weight)
        if self.packed is not None:
            # the plain weight is only asked for its device
            self.weight = layers[0].weight.detach()
            self.bias = None if layers[0].bias is None else torch.cat([cast(Tensor, x.bias).detach() for x in layers])

    def __call__(self, x: Tensor) -> Tensor:
        """x [B, k] -> [B, sum of outputs]."""
        if self.packed is not None and self.weight is not None:
            return linear(x, self.weight, self.bias, self.packed)
        parts = [F.linear(x, layer.weight, layer.bias) for layer in self.layers]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


class FastLayer:
    """What one decoder layer computes.

    Args:
        layer: a decoder layer for which :func:`is_known` holds.
        norm: module -> its forward, fused or not.
        copies: weights may be copied into a faster layout.
    """

    def __init__(self, layer: Any, norm: Norms, copies: bool) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.attention, self.act = attention, mlp.act_fn
        self.dim = int(attention.head_dim)
        self.query_heads = attention.q_proj.out_features // self.dim
        self.kv_heads = attention.k_proj.out_features // self.dim
        self.qkv = Projection([attention.q_proj, attention.k_proj, attention.v_proj], copies)
        self.out = Projection([attention.o_proj], copies)
        self.gate_up = Projection([mlp.gate_proj, mlp.up_proj], copies)
        self.down = Projection([mlp.down_proj], copies)
        self.width = mlp.gate_proj.out_features
        self.before, self.between = norm(layer.input_layernorm), norm(layer.post_attention_layernorm)
        names = ("q_norm", "k_norm")
        self.head_norms = [norm(getattr(attention, name)) for name in names if hasattr(attention, name)]

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """hidden [B, d] -> [B, d]; cos and signed sin [B, 1, D] as :func:`signed_rope` makes them."""
        heads = self.query_heads + self.kv_heads
        states = self.qkv(self.before(hidden)).view(hidden.shape[0], heads + self.kv_heads, self.dim)
        rotated = states[:, :heads]
        if self.head_norms:
            first, second = self.head_norms
            rotated[:, : self.query_heads] = first(rotated[:, : self.query_heads])
            rotated[:, self.query_heads :] = second(rotated[:, self.query_heads :])
        turned = torch.roll(rotated, self.dim // 2, -1).mul_(sin)
        rotated.mul_(cos).add_(turned)
        hidden = self.out(attend(states)).add_(hidden)
        both = self.gate_up(self.between(hidden))
        return self.down(self.act(both[:, : self.width]).mul_(both[:, self.width :])).add_(hidden)


def signed_rope(position_embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """cos and sin [1, B, D] as [B, 1, D], the first half of sin negated.

    cat(-x2, x1) * sin is roll(x, D / 2) times that.
    """
    cos, sin = (part[0, :, None] for part in position_embeddings)
    half = sin.shape[-1] // 2
    return cos, torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)


def speed_up_layers(layers: list[nn.Module], norm: Norms, *, copies: bool) -> list[nn.Module]:
    """Give decoder layers a second way, taken in packed forwards, if all of them are of a known kind.

    Args:
        layers: of one model on a CPU; their ``forward`` is replaced, their parameters are not.
        norm: module -> its forward.
        copies: weights may be copied into a faster layout.

    Returns:
        the layers that were changed: all or none.
    """
    if not layers or not all(is_known(layer) for layer in layers):
        return []
    made = [FastLayer(layer, norm, copies) for layer in layers]
    if not _agree(layers[0], made[0]):
        return []
    for layer, fast in zip(layers, made, strict=True):
        vars(layer)["forward"] = _either(layer, fast)
    return layers


def is_known(layer: Any) -> bool:
    """Whether a layer is one of those that :class:`FastLayer` writes out, on a CPU."""
    if type(layer).__module__.split(".")[:3] not in [["transformers", "models", family] for family in _FAMILIES]:
        return False
    modules = dict(layer.named_modules())
    if not all(name in modules or hasattr(layer, name) for name in _PARTS):
        return False
    linears = [modules[name] for name in (*_LINEARS, *_MLP)]
    plain = all(type(module) is nn.Linear and module.weight.device.type == "cpu" for module in linears)
    return plain and "forward" not in vars(layer) and not layer.training


def _either(layer: Any, fast: FastLayer) -> Callable[..., Tensor]:
    plain = layer.forward
    index = fast.attention.layer_idx

    def forward(hidden_states: Tensor, *args: Any, position_embeddings: Any = None, **kwargs: Any) -> Tensor:
        context = kwargs.get(CONTEXT_KEY)
        if not isinstance(context, SlotContext) or position_embeddings is None:
            return cast(Tensor, plain(hidden_states, *args, position_embeddings=position_embeddings, **kwargs))
        if context.rope is None:
            context.rope = signed_rope(position_embeddings)
        scale = fast.attention.scaling

        def attend(states: Tensor) -> Tensor:
            return context.attend(index, states, fast.query_heads, scale)

        return fast(hidden_states[0], *context.rope, attend)[None]

    return forward


@torch.no_grad()
def _agree(layer: Any, fast: FastLayer) -> bool:
    """Do both give the same on a few rows of one sequence, up to rounding?"""
    rows, weight = 5, layer.self_attn.q_proj.weight
    x = torch.linspace(-3, 2, rows * weight.shape[1], dtype=torch.float64).sin().reshape(1, rows, -1).to(weight.dtype)
    angles = torch.outer(torch.arange(rows), torch.linspace(1, 0.01, fast.dim // 2)).repeat(1, 2)
    rope = (angles.cos().to(x.dtype)[None], angles.sin().to(x.dtype)[None])
    hidden = torch.full((rows, rows), -math.inf, dtype=x.dtype).triu(1)

    def attend(states: Tensor) -> Tensor:
        query, key, value = (
            t.transpose(0, 1) for t in torch.split(states, [fast.query_heads, *2 * [fast.kv_heads]], dim=1)
        )
        fold = fast.query_heads // fast.kv_heads
        key, value = key.repeat_interleave(fold, 0), value.repeat_interleave(fold, 0)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=hidden, scale=fast.attention.scaling)
        return out.transpose(0, 1).flatten(1)

    try:
        plain = layer(x, attention_mask=hidden[None, None], position_embeddings=rope, use_cache=False)
        plain = plain[0] if isinstance(plain, tuple) else plain
        mine = fast(x[0], *signed_rope(rope), attend)
    except (TypeError, RuntimeError, AttributeError):
        return False
    if plain.shape[1:] != mine.shape or plain.dtype != mine.dtype:
        return False
    close = 8 * torch.finfo(x.dtype).eps * float(plain.abs().max())
    return bool((plain[0] - mine).abs().max() <= close)
