"""A thorough profile: points where the curve bends, several contexts, and batches of several shapes.

Points are placed by bisection: an interval is halved while its middle lies off the straight line between its ends.
Linear stretches take one look each, and a step is followed to the two neighbouring token counts that it lies between.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from dspark.errors import CostTableError
from dspark.protocols import Target
from dspark.scheduling.cost import BatchPoints, ContextBucket, CostProfile, Points, smooth
from dspark.scheduling.measure import LEAST_NOISE, MOST_NOISE, build_layout, even_layout, spread, wait
from dspark.types import VerifyLayout

MOST_POINTS = 40
"""Token counts of a context."""
QUERIES = (1, 4, 8)
"""Tokens of each sequence in the part that varies the batch."""
TRIES = 3
"""Timings of a point while points are placed; the final passes add to them."""
BATCH_SHARE = 0.2

Ask = Callable[[int], tuple[int, float] | None]
"""Seconds of a forward that is asked for so many tokens, and what it executed; None once there is no time."""


def place(ask: Ask, most: int, *, tolerance: float, points: int = MOST_POINTS) -> dict[int, tuple[int, float]]:
    """Choose where to measure a curve from 1 to ``most`` tokens.

    Args:
        ask: times one count.
        most: largest count.
        tolerance: relative distance from the straight line that is taken for one.
        points: most counts.

    Returns:
        tokens asked for -> (executed, seconds).
    """
    found: dict[int, tuple[int, float]] = {}
    for tokens in [*itertools.takewhile(lambda n: n < most, (1 << i for i in range(63))), most]:
        answer = ask(tokens)
        if answer is None:
            return found
        found[tokens] = answer
    queue: list[tuple[float, int, int]] = []

    def consider(low: int, high: int, score: float | None = None) -> None:
        if high - low > 1:
            rise = abs(found[high][1] - found[low][1]) / found[low][1]
            heapq.heappush(queue, (-(rise if score is None else score), low, high))

    for low, high in itertools.pairwise(sorted(found)):
        consider(low, high)
    while queue and len(found) < points:
        score, low, high = heapq.heappop(queue)
        if -score <= tolerance:
            break
        middle = (low + high) // 2
        answer = ask(middle)
        if answer is None:
            break
        found[middle] = answer
        straight = _off(found[low], answer, found[high]) <= tolerance
        for a, b in ((low, middle), (middle, high)):
            consider(a, b, tolerance / 2 if straight else None)
    return found


def _off(low: tuple[int, float], middle: tuple[int, float], high: tuple[int, float]) -> float:
    """Relative distance of the middle point from the line through the ends."""
    width = high[0] - low[0]
    share = (middle[0] - low[0]) / width if width else 1.0
    line = low[1] + share * (high[1] - low[1])
    return abs(middle[1] - line) / line


@dataclass
class _Stopwatch:
    """Times forwards of one target, each after a first one that pays for allocations."""

    target: Target
    taps: Sequence[int]
    clock: Callable[[], float]
    tell: Callable[[], None] | None
    warm: set[tuple[int, ...]] = field(default_factory=set)

    def __call__(self, layout: VerifyLayout) -> float:
        shape = (*layout.query_lens.tolist(), -1, *layout.starts.tolist())
        if shape not in self.warm:
            wait(self.target, self.target.forward(layout, self.taps))
            self.warm.add(shape)
        began = self.clock()
        wait(self.target, self.target.forward(layout, self.taps))
        seconds = max(self.clock() - began, 1e-9)
        if self.tell is not None:
            self.tell()
        return seconds


def profile(
    target: Target,
    *,
    slots: int = 1,
    most_tokens: int = 256,
    contexts: Sequence[int] = (64, 512),
    repeats: int = 7,
    budget_seconds: float = 60.0,
    taps: Sequence[int] = (),
    glue_seconds: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
    tell: Callable[[], None] | None = None,
) -> CostProfile:
    """Time forwards of a target that has its memory, and that no request uses meanwhile.

    Args:
        target: after ``allocate``; what slots 0.. hold is overwritten.
        slots: how many of its slots may be used.
        most_tokens: largest forward, at most what fits the slots.
        contexts: tokens before each sequence, one bucket each; cut to half a slot.
        repeats: passes over all points; medians are taken.
        budget_seconds: time that is aimed at. What is finished in any case: powers of two up to ``most_tokens``, each
            timed once, and a pass that has begun.
        taps: layers whose outputs the forwards return, as they will in rounds.
        glue_seconds: seconds of a step outside forwards.
        clock: seconds now.
        tell: called after each timing.

    Raises:
        CostTableError: where nothing can be timed.
    """
    places = sorted({min(int(c), target.max_len // 2) for c in contexts})
    if not places or places[0] < 0 or slots < 1 or most_tokens < 1 or repeats < 1:
        raise CostTableError("profile: needs contexts of at least 0, a slot, a token and a repeat")
    watch = _Stopwatch(target, taps, clock, tell)
    share = (1.0 - BATCH_SHARE) * budget_seconds / len(places)
    buckets, spreads, padded = [], list[float](), False
    for context in places:
        curve = _Curve(watch, slots, context)
        padded |= curve.measure(most_tokens, repeats, share)
        spreads += curve.spreads()
        buckets.append(ContextBucket(curve.points(), None if context == places[-1] else context))
    noise = min(max(2 * statistics.median(spreads), LEAST_NOISE), MOST_NOISE) if spreads else LEAST_NOISE
    return CostProfile(
        buckets=tuple(dataclasses.replace(b, points=smooth(b.points, noise)) for b in buckets),
        fingerprint=target.fingerprint(),
        mode="staircase" if padded else "interpolated",
        batches=_batches(watch, slots, places[0], most_tokens, repeats, BATCH_SHARE * budget_seconds),
        glue_seconds=glue_seconds,
        noise=noise,
    )


class _Curve:
    """Seconds by executed tokens, at one context."""

    def __init__(self, watch: _Stopwatch, slots: int, context: int) -> None:
        self._watch, self._slots, self._context = watch, slots, context
        self._times: dict[int, list[float]] = {}

    def _layout(self, tokens: int) -> VerifyLayout:
        return build_layout(self._watch.target, tokens, slots=self._slots, context=self._context)

    def measure(self, most_tokens: int, repeats: int, budget: float) -> bool:
        """Place points in half of the time, then pass over all of them; True where the target pads."""
        watch, target = self._watch, self._watch.target
        most = min(most_tokens, self._slots * (target.max_len - self._context))
        began = watch.clock()

        def ask(tokens: int) -> tuple[int, float] | None:
            late = watch.clock() - began > budget / 2
            if late and len(self._times) >= most.bit_length() + 1:
                return None
            layout = self._layout(tokens)
            executed = int(target.executed_tokens(layout))
            times = self._times.setdefault(executed, [])
            times += [watch(layout) for _ in range(1 if late else TRIES)]
            return executed, statistics.median(times)

        found = place(ask, most, tolerance=2 * LEAST_NOISE)
        # of the counts that execute the same, one is enough; passes go over all, so that drift reaches each of them
        chosen = {executed: tokens for tokens, (executed, _) in found.items()}
        for _ in range(repeats):
            if watch.clock() - began > budget:
                break
            for executed, tokens in chosen.items():
                self._times[executed].append(watch(self._layout(tokens)))
        return any(executed != tokens for tokens, (executed, _) in found.items())

    def points(self) -> Points:
        return tuple((n, statistics.median(times)) for n, times in sorted(self._times.items()))

    def spreads(self) -> Iterator[float]:
        return (spread(times) for times in self._times.values() if len(times) > 2)


def _batches(watch: _Stopwatch, slots: int, context: int, most_tokens: int, repeats: int, budget: float) -> BatchPoints:
    """The same number of tokens over other numbers of sequences."""
    target = watch.target
    rows = sorted({min(1 << i, slots) for i in range(slots.bit_length() + 1)})
    shapes = [(r, q) for q in QUERIES for r in rows if r * q <= most_tokens and context + q <= target.max_len]
    layouts = {(r, q): even_layout(target, r, q, context) for r, q in shapes}
    times: dict[tuple[int, int], list[float]] = {}
    began = watch.clock()
    for turn in range(repeats):
        if turn and watch.clock() - began > budget:
            break
        for shape, layout in layouts.items():
            times.setdefault(shape, []).append(watch(layout))
    return tuple(
        (context, r, int(target.executed_tokens(layouts[r, q])), float(np.median(times[r, q]))) for r, q in shapes
    )
