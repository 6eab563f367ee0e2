"""Target features on their way into the draft cache: kept as they come, projected when their slot drafts.

A plain round then costs a drafter nothing; what it buffered is projected in one matrix product on resume.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dspark.drafters.context import ContextCache
from dspark.types import Committed, IntArray

MOST_WAITING = 1024
"""Rows that one slot buffers before they are projected whether it drafts or not."""


@dataclass(slots=True)
class _Slot:
    """One request's context: positions 0..length-1 are known, ``waiting`` of them, in ``parts`` by rising start, not
    projected yet, and some below ``dropped`` never, since they had left the window."""

    generation: int
    length: int = 0
    dropped: int = 0
    parts: list[tuple[int, Tensor]] = field(default_factory=list)
    waiting: int = 0

    def add(self, start: int, rows: Tensor) -> None:
        """Features [n, m * d_t] of the positions from ``start``; what was known of these or later ones is dropped."""
        self.rewind(start)
        self.parts.append((start, rows))
        self.waiting += len(rows)
        self.length = start + len(rows)

    def rewind(self, length: int) -> None:
        """Drop what waits at or beyond ``length``: the last parts, mostly none."""
        self.length = min(self.length, length)
        while self.parts:
            start, rows = self.parts[-1]
            beyond = start + len(rows) - length
            if beyond <= 0:
                return
            self.parts.pop()
            self.waiting -= len(rows)
            if start < length:
                self.parts.append((start, rows[:-beyond]))
                self.waiting += len(rows) - beyond

    def clear(self) -> None:
        """Nothing waits any more."""
        self.parts.clear()
        self.waiting = 0


class Remembers(Protocol):
    """What features are buffered for: a network that keeps keys and values of them by slot."""

    cache: ContextCache
    context_window: int | None

    def remember(self, taps: Tensor, slots: IntArray, positions: IntArray) -> None:
        """Take features [n, m * d_t] of n (slot, absolute position) pairs; positions of one slot rise, in one run."""
        ...


class TapBuffer:
    """Features of committed positions by slot.

    Args:
        backbone: projects them and holds their keys and values.
        last_norm: norm of the last tap, where the checkpoint expects it normed.
        width: d_t.
    """

    def __init__(self, backbone: Remembers, last_norm: Callable[[Tensor], Tensor] | None, width: int) -> None:
        self._backbone = backbone
        self._last_norm = last_norm
        self._width = width
        self._slots: dict[int, _Slot] = {}

    @property
    def waiting(self) -> int:
        """Rows that are buffered."""
        return sum(s.waiting for s in self._slots.values())

    def normed(self, taps: Tensor) -> Tensor:
        """Features [n, m * d_t] as the backbone reads them: the last behind the target's norm where that is asked."""
        if self._last_norm is None:
            return taps
        rest, last = taps[:, : -self._width], taps[:, -self._width :]
        return torch.cat((rest, self._last_norm(last)), dim=1)

    def length(self, slot: int, generation: int) -> int:
        """Context positions known of a request: the features of 0..length-1 have come."""
        state = self._slots.get(slot)
        return state.length if state is not None and state.generation == generation else 0

    def holds(self, slot: int, generation: int) -> bool:
        """True where this request's features are in the slot."""
        state = self._slots.get(slot)
        return state is not None and state.generation == generation

    def add(self, done: Committed) -> None:
        """Take the features of positions request.num_cached..num_cached-1.

        A request that reads less than before (a rollback) shortens its context; one whose features did not come has a
        gap, and its context stays short of it for good.
        """
        request, start = done.request, done.request.num_cached
        state = self._slots.get(request.slot)
        if state is None or state.generation != request.generation:
            if state is not None:
                self._backbone.cache.clear(request.slot)
            state = self._slots[request.slot] = _Slot(request.generation)
        if done.taps is None or start > state.length:
            state.length = min(state.length, start)
            return
        rows = done.num_cached - start
        if rows <= 0 or done.finish_reason is not None:
            state.length = min(state.length, done.num_cached)
            return
        state.add(start, done.taps[:rows])
        if state.waiting > MOST_WAITING:
            self.flush([request.slot], np.array([state.length]))

    def adopt(self, slot: int, generation: int, source: int, source_generation: int, length: int) -> int:
        """Let a request begin with the first positions of another's context, at most ``length``; how many they are.

        What waits to be projected is shared. Where the new request would see what was dropped, its whole window is read
        anew: what lies before that it never sees.
        """
        state, window = self._slots.get(source), self._backbone.context_window
        if state is None or state.generation != source_generation:
            self._backbone.cache.clear(slot)
            self._slots[slot] = _Slot(generation)
            return 0
        length = min(length, state.length)
        if window is not None and state.dropped > max(0, length - window):
            length = max(0, length - window)
        dropped = min(state.dropped, length)
        own = self._slots[slot] = _Slot(generation, state.length, dropped, list(state.parts), state.waiting)
        own.rewind(length)
        self._backbone.cache.copy(source, slot, length)
        return length

    def flush(self, slots: Sequence[int], anchors: IntArray) -> None:
        """Project what waits for ``slots``, in the order it came; ``anchors`` [n] are where their blocks begin.

        What lies beyond the context window can never be seen again and is dropped.
        """
        taps: list[Tensor] = []
        owners: list[IntArray] = []
        places: list[IntArray] = []
        window = self._backbone.context_window
        for slot, anchor in zip(slots, anchors.tolist(), strict=True):
            state = self._slots.get(slot)
            if state is None or not state.parts:
                continue
            for start, rows in state.parts:
                skip = 0 if window is None else max(0, min(len(rows), anchor - window - start))
                state.dropped = max(state.dropped, start + skip if skip else 0)
                if skip < len(rows):
                    taps.append(rows[skip:])
                    places.append(np.arange(start + skip, start + len(rows)))
                    owners.append(np.full(len(rows) - skip, slot, dtype=np.int64))
            state.clear()
        if taps:
            together = taps[0] if len(taps) == 1 else torch.cat(taps)
            self._backbone.remember(self.normed(together), np.concatenate(owners), np.concatenate(places))

    def release(self, slot: int, generation: int) -> None:
        """Forget a request and zero its slot."""
        state = self._slots.get(slot)
        if state is not None and state.generation == generation:
            del self._slots[slot]
            self._backbone.cache.clear(slot)
