"""Attention of a packed forward by FlexAttention: one call a layer, one mask for all layers of a window."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dspark.ops.flex import block_mask, ragged_attention
from dspark.targets.cache import SlotCache
from dspark.types import IntArray


class FlexMasks:
    """The masks of one forward, made when a layer first asks for its window.

    Args:
        slots, positions: of each query, [B].
        cache: the slots; their length must be a multiple of :data:`dspark.ops.flex.BLOCK`.
    """

    def __init__(self, slots: IntArray, positions: IntArray, cache: SlotCache) -> None:
        self._slots = torch.from_numpy(slots).to(cache.device)
        self._positions = torch.from_numpy(positions).to(cache.device)
        self._cache = cache
        self._masks: dict[int | None, Any] = {}

    def attend(
        self, rows: Tensor, keys: Tensor, values: Tensor, window: int | None, scale: float, softcap: float | None
    ) -> Tensor:
        """Attention [B, query_heads, Dv] of packed queries [B, query_heads, D] over the cache."""
        if window not in self._masks:
            cache = self._cache
            self._masks[window] = block_mask(self._slots, self._positions, cache.slots, cache.max_len, window)
        compiled = self._cache.device.type != "cpu"
        return ragged_attention(rows, keys, values, self._masks[window], scale, softcap, compiled=compiled)
