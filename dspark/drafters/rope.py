"""Rotary position embeddings of the draft layers, in transformers' definitions; tables are computed in float32."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dspark.checkpoints import RopeConfig


def frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies [head_dim / 2] float32, and the factor on cosine and sine."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inverse = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "linear":
        return inverse / rope.factor, 1.0
    if rope.rope_type == "llama3":
        return _llama3(rope, inverse), 1.0
    if rope.rope_type == "yarn":
        return _yarn(rope, inverse, head_dim)
    if rope.rope_type == "proportional":
        # The rotated pairs are the first ones, their frequencies spaced over the whole head; the rest do not turn.
        turned = int(rope.partial * head_dim // 2)
        inverse[turned:] = 0.0
        return inverse / rope.factor, 1.0
    return inverse, 1.0


def _llama3(rope: RopeConfig, inverse: Tensor) -> Tensor:
    """Long waves are slowed by ``factor``, short ones kept, those between are blended."""
    wave = 2 * math.pi / inverse
    low, high = rope.original_max / rope.low_freq, rope.original_max / rope.high_freq
    blend = (rope.original_max / wave - rope.low_freq) / (rope.high_freq - rope.low_freq)
    blended = (1 - blend) * inverse / rope.factor + blend * inverse
    slowed = torch.where(wave > low, inverse / rope.factor, inverse)
    return torch.where((wave <= low) & (wave >= high), blended, slowed)


def _yarn(rope: RopeConfig, inverse: Tensor, head_dim: int) -> tuple[Tensor, float]:
    """Interpolated below, extrapolated above, a ramp between (arXiv 2309.00071)."""

    def pair_of(rotations: float) -> float:
        return head_dim * math.log(rope.original_max / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = 0.001 if low == high else high - low
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    mixed = inverse / rope.factor * ramp + inverse * (1 - ramp)
    return mixed, _yarn_scale(rope)


def _yarn_scale(rope: RopeConfig) -> float:
    def scale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


class RopeTable:
    """Cosines and sines by absolute position, grown as positions are asked for.

    Args:
        rope: parameters.
        head_dim: D.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device, dtype: torch.dtype) -> None:
        self._inverse, self._scale = frequencies(rope, head_dim)
        self._device, self._dtype = device, dtype
        self.cos = self.sin = torch.empty(0, head_dim // 2, device=device, dtype=dtype)

    def reserve(self, length: int) -> None:
        """Hold positions 0..length-1."""
        if length <= len(self.cos):
            return
        positions = torch.arange(max(length, 2 * len(self.cos)), dtype=torch.float32)
        angles = positions[:, None] * self._inverse
        self.cos = (angles.cos() * self._scale).to(device=self._device, dtype=self._dtype)
        self.sin = (angles.sin() * self._scale).to(device=self._device, dtype=self._dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine [n, 1, D / 2] of positions [n]."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D/2) of x [n, heads, D]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
