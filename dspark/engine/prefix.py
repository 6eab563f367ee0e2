"""The prefix cache: what a slot holds of a request that left, or runs, is not read again.

A request that leaves parks what the target has read of it in its slot, until the slot is needed. One that begins goes
on from the longest prefix that some slot holds: in place, or from a copy of its first positions, which costs about a
hundredth of reading them. Requests that come together wait for the first of them to read what they share. The memory
is the slots' own; what was used least recently gives way.

Active requests stay low in the cache, so that attention finds them side by side: what is parked where a new one has to
go moves to the upper end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dspark.config import EngineConfig
from dspark.engine.batcher import Batcher
from dspark.engine.parts import Parts
from dspark.engine.state import RequestState
from dspark.engine.stats import EngineStats
from dspark.protocols import PrefixDrafter, PrefixTarget

logger = logging.getLogger(__name__)

KEPT = ("stop", "length", "abort")
"""Ends after which what was read is beyond doubt."""

Guard = Callable[..., Any]
"""Calls a component's bookkeeping, (kind, phase, call, *arguments): None where it raised and was switched off."""


@dataclass(slots=True)
class Parked:
    """What a free slot holds.

    Attributes:
        ids: tokens of the request that left; keys and values of the first ``length`` are in the slot.
        generation: the slot's, under which the drafter knows the request.
        used: when it was parked or served last, for what gives way.
    """

    ids: Sequence[int]
    length: int
    generation: int
    used: int


@dataclass(frozen=True, slots=True)
class Match:
    """A slot whose first ``length`` positions a request can take over; ``parked`` where nobody runs in it."""

    slot: int
    generation: int
    length: int
    parked: bool


def obstacle(parts: Parts) -> str:
    """Why prefixes can't be kept with these parts; empty where they can."""
    if not isinstance(parts.target, PrefixTarget):
        return f"target {parts.target.name} has no copy_prefix"
    if reads_taps(parts) and not isinstance(parts.drafter, PrefixDrafter):
        return f"drafter {parts.name('drafter')} reads hidden states of the whole prompt, and has no adopt"
    return ""


def prefix_cache(
    parts: Parts, config: EngineConfig, batcher: Batcher, stats: Callable[[], EngineStats], guard: Guard
) -> PrefixCache | None:
    """The prefix cache of an engine; None where it is off or can't be."""
    if not config.prefix_cache:
        return None
    reason = obstacle(parts)
    if reason:
        logger.info("every prompt is read whole: %s", reason)
        return None
    return PrefixCache(parts, batcher, stats, config.prefix_min_tokens, guard)


def reads_taps(parts: Parts) -> bool:
    """True where the drafter lives on what the target's forwards give it."""
    drafter = parts.drafter
    return parts.drafting and bool(drafter.tap_layers or drafter.capabilities.needs_taps)


def common(first: Sequence[int], second: Sequence[int], most: int) -> int:
    """How many tokens two texts begin alike with, at most ``most``; by halves, since lists compare fast."""
    low, high = 0, min(len(first), len(second), most)
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class PrefixCache:
    """Admits requests to slots, and knows what every slot holds.

    Args:
        parts: of the engine; its target is a ``PrefixTarget``.
        batcher: whose slots and requests they are.
        stats: returns what hits are counted in.
        minimum: fewest tokens that are worth taking over.
        guard: calls the drafter.
    """

    def __init__(
        self, parts: Parts, batcher: Batcher, stats: Callable[[], EngineStats], minimum: int, guard: Guard
    ) -> None:
        self._parts, self._batcher, self._stats, self._guard = parts, batcher, stats, guard
        self.minimum = minimum
        self.parked: dict[int, Parked] = {}
        self._waiting: list[RequestState] = []
        self._clock = 0
        self._version = -1

    # steps --------------------------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Give free slots to waiting requests, each with the longest prefix that is there."""
        if self._target.cache_version != self._version:  # somebody else wrote the cache
            self.clear()
            for request in self._batcher.active:
                request.doubtful = True
            self.seen()
        if not (self._batcher.waiting or self._waiting):
            return
        began = time.perf_counter()
        self._waiting = [r for r in self._waiting if r in self._batcher.active and self._begin(r)]
        while self._batcher.waiting and len(self._batcher.pool):
            request = next(iter(self._batcher.waiting))
            match = self._best(request)
            slot = self._place(match)
            self._batcher.start(request, slot)
            old = self.parked.pop(slot, None)
            if old is not None:
                self._move(slot, old, match)
            if match is not None:
                self._take_over(request, match)
            if old is not None:
                self._release(slot, old.generation)
            if self._begin(request):
                self._waiting.append(request)
        self.seen()
        self._stats().phase_seconds["prefix"] += time.perf_counter() - began

    def seen(self) -> None:
        """Whatever was written to the target's cache up to now is known: a step's own forward, say."""
        self._version = self._target.cache_version

    def park(self, request: RequestState) -> bool:
        """Keep what a request leaves in its slot, unless it is little or in doubt; True where the drafter's state of it
        is kept as well, and not to be released yet.

        Of a block that was cut at its end more was read than the text has; it is no part of the prefix.
        """
        length = min(request.num_cached, len(request.ids))
        proven = request.finish_reason in KEPT and request.stats.acceptance.rounds > 0 and not request.doubtful
        if not proven or length < self.minimum:
            return False
        self.parked[request.slot] = Parked(request.ids, length, request.generation, self._now())
        return self._keeps_drafts

    @property
    def _keeps_drafts(self) -> bool:
        return self._parts.drafting and isinstance(self._parts.drafter, PrefixDrafter)

    def clear(self) -> None:
        """Forget everything that is parked."""
        for slot in list(self.parked):
            self._drop(slot)

    # what there is ------------------------------------------------------------------------------------------------

    @property
    def _target(self) -> Any:
        return self._parts.target

    def _now(self) -> int:
        self._clock += 1
        return self._clock

    def _most(self, request: RequestState) -> int:
        """Tokens that a request may take over. The anchor is read in any case: its logits are wanted.

        For a drafter that reads taps one more is, so that it drafts from the same round on as without the cache.
        """
        return len(request.ids) - (2 if reads_taps(self._parts) else 1)

    def _best(self, request: RequestState) -> Match | None:
        """The longest prefix in any slot; of equals a parked one, and of those the one with least behind it."""
        most, found = self._most(request), None
        for slot, held in sorted(self.parked.items(), key=lambda item: (item[1].length, item[0])):
            length = common(request.ids, held.ids, min(most, held.length))
            if length > (found.length if found else self.minimum - 1):
                found = Match(slot, held.generation, length, parked=True)
        for other in self._batcher.active:
            if other is not request and not other.doubtful:
                length = common(request.ids, other.ids, min(most, other.num_cached))
                if length > (found.length if found else self.minimum - 1):
                    found = Match(other.slot, other.generation, length, parked=False)
        return found

    def _promised(self, request: RequestState) -> int:
        """The longest prefix that requests before this one are about to read."""
        most, longest = self._most(request), 0
        for other in self._batcher.active:
            if other is request:
                break
            shared = common(request.ids, other.ids, most)
            if shared > other.num_cached and not other.doubtful:
                longest = max(longest, shared)
        return longest

    # moves --------------------------------------------------------------------------------------------------------

    def _place(self, match: Match | None) -> int:
        """The slot for a request: where its prefix is, if that is among the lowest; else the one that loses least."""
        pool, parked = self._batcher.pool, self.parked
        bound = len(self._batcher.active) + len(self._batcher.waiting) - 1  # one of the slots up to here is free
        if match is not None and match.parked and match.slot <= bound:
            return match.slot
        low = [slot for slot in pool.free if slot <= bound]
        return min(low, key=lambda slot: (slot in parked and parked[slot].used, slot))

    def _move(self, slot: int, held: Parked, match: Match | None) -> None:
        """Take what a slot holds elsewhere, unless the new request holds it too or all else was used after it."""
        kept = match.length if match is not None and match.slot == slot else 0
        source = match.slot if match is not None else -1
        others = [s for s in self._batcher.pool.free if s != source]
        if held.length - kept < self.minimum or not others:
            return
        there = max(others, key=lambda s: (-self.parked[s].used if s in self.parked else 0, s))
        if there in self.parked and self.parked[there].used > held.used:
            return
        self._drop(there)
        generation = self._batcher.pool.renew(there)
        length = self._copy((slot, held.generation), (there, generation), held.length)
        if length is not None and length >= self.minimum:
            self.parked[there] = Parked(held.ids, length, generation, held.used)
        else:
            self._release(there, generation)

    def _take_over(self, request: RequestState, match: Match) -> None:
        """Let a request begin with what another slot, or its own, holds."""
        source, own = (match.slot, match.generation), (request.slot, request.generation)
        length = self._copy(source, own, match.length)
        if length is None:
            return
        request.num_cached = length
        held = self.parked.get(match.slot)
        if held is None:
            return
        held.used = self._now()
        if held.length - request.num_cached < self.minimum:  # the request holds all of it
            self._drop(match.slot)

    def _copy(self, source: tuple[int, int], own: tuple[int, int], length: int) -> int | None:
        """Copy target and drafter state between (slot, generation) pairs.

        Returns:
            how many tokens both have of it; None where the target gives nothing of it away, and nothing has changed.
        """
        if not self._target.copy_prefix(source[0], own[0], length):
            return None
        if self._keeps_drafts:
            drafter: Any = self._parts.drafter
            kept = self._guard("drafter", "adopt", drafter.adopt, *own, *source, length)
            if reads_taps(self._parts):  # no more, if it raised
                length = min(length, int(kept))
        return length

    def _begin(self, request: RequestState) -> bool:
        """Take over more where there is more; True while it is worth waiting for what others are about to read."""
        match = self._best(request)
        if match is not None and match.length >= request.num_cached + self.minimum:
            self._take_over(request, match)
        request.held = self._promised(request) >= request.num_cached + self.minimum
        if not request.held and request.num_cached:
            request.stats.cached_tokens = request.num_cached
            stats = self._stats()
            stats.prefix_hits += 1
            stats.cached_tokens += request.num_cached
        return request.held

    def _drop(self, slot: int) -> None:
        held = self.parked.pop(slot, None)
        if held is not None:
            self._release(slot, held.generation)

    def _release(self, slot: int, generation: int) -> None:
        if self._keeps_drafts:
            self._guard("drafter", "release", self._parts.drafter.release, slot, generation)
