"""Keys and values of the context, kept across rounds per slot. Rollback is a shorter length, not a copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dspark.types import IntArray

FIRST_CAPACITY = 128


class ContextCache:
    """Keys and values [slots, kv_heads, capacity, D] of every draft layer; grown on demand.

    What lies at or beyond a slot's length is stale: the block of a finished round, or a rejected branch. It is
    overwritten before it is read. ``clear`` zeroes a slot: one request's non-finite values can't reach the next.

    Args:
        shapes: (kv_heads, head_dim) of each layer.
        slots: slots to begin with.

    Attributes:
        used: one past the last position ever written to each slot since it was cleared, [slots].
    """

    def __init__(
        self, shapes: Sequence[tuple[int, int]], device: torch.device, dtype: torch.dtype, slots: int = 1
    ) -> None:
        self._shapes = tuple(shapes)
        self._device, self._dtype = device, dtype
        self.slots, self.capacity = max(slots, 1), 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.used = np.zeros(self.slots, dtype=np.int64)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(t.nbytes for t in (*self.keys, *self.values))

    def reserve(self, slots: int, length: int) -> None:
        """Room for ``slots`` slots of ``length`` positions."""
        if slots <= self.slots and length <= self.capacity:
            return
        slots = max(slots, self.slots)
        capacity = self.capacity
        if length > capacity:
            capacity = max(length, 2 * capacity, FIRST_CAPACITY)
        self.keys = [self._grown(i, self.keys, slots, capacity) for i in range(len(self._shapes))]
        self.values = [self._grown(i, self.values, slots, capacity) for i in range(len(self._shapes))]
        self.used = np.concatenate([self.used, np.zeros(slots - self.slots, dtype=np.int64)])
        self.slots, self.capacity = slots, capacity

    def _grown(self, layer: int, old: list[Tensor], slots: int, capacity: int) -> Tensor:
        heads, dim = self._shapes[layer]
        with torch.inference_mode(False):  # else the cache could be written in inference mode alone
            new = torch.zeros(slots, heads, capacity, dim, device=self._device, dtype=self._dtype)
        if old:
            new[: self.slots, :, : self.capacity] = old[layer]
        return new

    def write(self, layer: int, slots: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [n, kv_heads, D] at (slot, position) pairs [n]."""
        self.keys[layer][slots, :, positions] = keys
        self.values[layer][slots, :, positions] = values

    def read(self, layer: int, slots: IntArray, low: int, high: int) -> tuple[Tensor, Tensor]:
        """Keys and values [R, kv_heads, high - low, D] of ``slots``: a view where they are consecutive, else a copy."""
        keys, values = self.keys[layer], self.values[layer]
        first, count = int(slots[0]), len(slots)
        if count == 1 or (np.diff(slots) == 1).all():
            return keys[first : first + count, :, low:high], values[first : first + count, :, low:high]
        index = torch.from_numpy(np.ascontiguousarray(slots)).to(self._device)
        return keys[:, :, low:high].index_select(0, index), values[:, :, low:high].index_select(0, index)

    def clear(self, slot: int, start: int = 0) -> None:
        """Zero what was ever written to a slot at or beyond position ``start``."""
        if slot < self.slots and self.used[slot] > start:
            for tensor in (*self.keys, *self.values):
                tensor[slot, :, start : int(self.used[slot])] = 0
            self.used[slot] = start

    def copy(self, source: int, slot: int, length: int) -> None:
        """Make the first ``length`` positions of ``slot`` those of ``source``, or leave them, and zero the rest."""
        if source != slot and source < self.slots:
            self.reserve(slot + 1, 0)
            for tensor in (*self.keys, *self.values):
                tensor[slot, :, :length] = tensor[source, :, :length]
            self.used[slot] = max(self.used[slot], min(length, self.used[source]))
        self.clear(slot, length)
