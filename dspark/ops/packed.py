"""Weights in oneDNN's own layout, for bfloat16 on CPU.

A block is a few rows, so each product reads its weights once and does little else; in the plain layout oneDNN reorders
them on every call, which about doubles the time. Packing keeps a second copy. Where this torch has no such operators,
or they do not give the plain product, nothing is packed.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 8
"""Rows that the packed layout is made for; others run as well."""


@functools.cache
def matrix_tiles(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies ``dtype`` in tiles of its own (Intel's AMX, for bfloat16)."""
    asked: Any = getattr(torch.cpu, "get_capabilities", None)
    return dtype == torch.bfloat16 and asked is not None and bool(asked().get("amx_bf16", False))


def pack(weight: Tensor) -> Tensor | None:
    """``weight`` [n, k] packed, or None where it can't be or need not be."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or weight.requires_grad:
        return None
    ops: Any = torch.ops.mkldnn
    try:
        if not ops._is_mkldnn_bf16_supported():
            return None
        with torch.inference_mode():
            packed: Tensor = ops._reorder_linear_weight(weight.detach().clone(), ROWS)
            probe = torch.linspace(-1, 1, weight.shape[1], dtype=torch.float32).to(weight.dtype).expand(2, -1)
            probe = probe.contiguous()
            plain, fast = F.linear(probe, weight).float(), _multiply(probe, packed, None).float()
    except (AttributeError, RuntimeError):
        return None
    scale = float(plain.abs().max()) or 1.0
    return packed if float((plain - fast).abs().max()) <= 0.02 * scale else None


def _multiply(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, packed: Tensor | None) -> Tensor:
    """x @ weight^T + bias, by the packed copy where there is one and nothing is being trained."""
    if packed is None or weight.requires_grad:
        return F.linear(x, weight, bias)
    return _multiply(x, packed, bias)
