"""Timing of real target forwards, for cost tables.

A table is keyed by what the target *executed*, not by what was asked of it: a target that pads 37 tokens to 64 has a
point at 64, and its curve is a staircase.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from dspark.errors import CostTableError
from dspark.protocols import Target
from dspark.scheduling.cost import ContextBucket, CostProfile, smooth
from dspark.types import IntArray, TargetOutput, VerifyLayout

DEFAULT_TOKENS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
TOKENS_PER_SEQUENCE = 4
"""An anchor and three drafts: how many sequences a timed forward spreads its tokens over."""
LEAST_NOISE, MOST_NOISE = 0.02, 0.25


def measure(
    target: Target,
    *,
    slots: int = 1,
    token_counts: Sequence[int] = DEFAULT_TOKENS,
    contexts: Sequence[int] = (64,),
    repeats: int = 7,
    budget_seconds: float = 5.0,
    taps: Sequence[int] = (),
    glue_seconds: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> CostProfile:
    """Time forwards of a target that has its memory, and that no request uses meanwhile.

    Args:
        target: after ``allocate``; what slots 0.. hold is overwritten.
        slots: how many of its slots may be used.
        token_counts: tokens asked of a forward; those that do not fit are left out.
        contexts: tokens before each sequence, one bucket each; cut to half a slot.
        repeats: passes over all counts; medians are taken.
        budget_seconds: no pass begins after it, and the first leaves out larger counts; two counts are always timed.
        taps: layers whose outputs the forwards return, as they will in rounds.
        glue_seconds: seconds of a step outside forwards.
        clock: seconds now.

    Raises:
        CostTableError: where nothing can be timed.
    """
    counts = sorted({int(n) for n in token_counts})
    places = sorted({min(int(c), target.max_len // 2) for c in contexts})
    if not counts or counts[0] < 1 or not places or places[0] < 0 or slots < 1 or repeats < 1:
        raise CostTableError("measure: needs token counts of at least 1, contexts of at least 0, a slot and a repeat")
    share = budget_seconds / len(places)
    buckets: list[ContextBucket] = []
    spreads: list[float] = []
    padded = False
    for context in places:
        layouts = list(_fitting(target, counts, slots, context))
        if not layouts:
            raise CostTableError(f"measure: {counts[0]} tokens do not fit {slots} slots of {target.max_len}")
        executed = [int(target.executed_tokens(layout)) for layout in layouts]
        padded |= any(n != layout.num_tokens for n, layout in zip(executed, layouts, strict=True))
        times = _times(target, layouts, executed, repeats, share, taps, clock)
        spreads += [spread(seconds) for seconds in times.values() if len(seconds) > 2]
        last = context == places[-1]
        medians = tuple((n, statistics.median(seconds)) for n, seconds in sorted(times.items()))
        buckets.append(ContextBucket(medians, None if last else context))
    noise = min(max(2 * statistics.median(spreads), LEAST_NOISE), MOST_NOISE) if spreads else LEAST_NOISE
    return CostProfile(
        buckets=tuple(ContextBucket(smooth(b.points, noise), b.max_context) for b in buckets),
        fingerprint=target.fingerprint(),
        mode="staircase" if padded else "interpolated",
        glue_seconds=glue_seconds,
        noise=noise,
    )


def build_layout(target: Target, tokens: int, *, slots: int, context: int) -> VerifyLayout:
    """A forward of ``tokens`` query tokens after ``context`` others, spread evenly over slots, all logits wanted."""
    rows = min(slots, max(1, tokens // TOKENS_PER_SEQUENCE))
    lens = np.full(rows, tokens // rows, dtype=np.int64)
    lens[: tokens % rows] += 1
    return _layout(target, lens, context)


def even_layout(target: Target, rows: int, query: int, context: int) -> VerifyLayout:
    """A forward of ``rows`` sequences of ``query`` tokens each."""
    return _layout(target, np.full(rows, query, dtype=np.int64), context)


def _layout(target: Target, lens: IntArray, context: int) -> VerifyLayout:
    import torch

    rows, tokens = len(lens), int(lens.sum())
    cu = np.concatenate(([0], np.cumsum(lens))).astype(np.int64)
    positions = np.concatenate([np.arange(context, context + n, dtype=np.int64) for n in lens])
    ids = np.arange(tokens, dtype=np.int64) * 7 % max(1, target.vocab_size)
    return VerifyLayout(
        token_ids=torch.from_numpy(ids).to(target.device),
        positions=torch.from_numpy(positions).to(target.device),
        slots=np.arange(rows, dtype=np.int64),
        starts=np.full(rows, context, dtype=np.int64),
        cu_query_lens=cu,
        logit_rows=np.arange(tokens, dtype=np.int64),
    )


def _fitting(target: Target, counts: Sequence[int], slots: int, context: int) -> Iterator[VerifyLayout]:
    for tokens in counts:
        rows = min(slots, max(1, tokens // TOKENS_PER_SEQUENCE))
        if context + -(-tokens // rows) <= target.max_len:
            yield build_layout(target, tokens, slots=slots, context=context)


def _times(
    target: Target,
    layouts: Sequence[VerifyLayout],
    executed: Sequence[int],
    repeats: int,
    budget: float,
    taps: Sequence[int],
    clock: Callable[[], float],
) -> dict[int, list[float]]:
    """Seconds by executed tokens. Passes go over all sizes, so that a drift of the machine reaches each of them."""
    began = clock()
    times: dict[int, list[float]] = {}
    for turn in range(repeats):
        if turn > 1 and clock() - began > budget:
            break
        for layout, tokens in zip(layouts, executed, strict=True):
            if turn == 0 and len(times) > 1 and clock() - began > budget:
                break
            if turn and tokens not in times:
                continue
            if turn == 0:
                wait(target, target.forward(layout, taps))  # first of its size: allocations, kernels, caches
            start = clock()
            wait(target, target.forward(layout, taps))
            times.setdefault(tokens, []).append(max(clock() - start, 1e-9))
    return times


def wait(target: Target, output: TargetOutput) -> None:
    """Accelerators run ahead of the host; a time without this is the time of a launch."""
    import torch

    kind = output.logits.device.type
    if kind != "cpu":
        module: Any = getattr(torch, kind, None)
        if module is not None and hasattr(module, "synchronize"):
            module.synchronize()


def spread(seconds: Sequence[float]) -> float:
    """Median distance from the median, relative to it."""
    middle = statistics.median(seconds)
    return statistics.median(abs(s - middle) for s in seconds) / middle
