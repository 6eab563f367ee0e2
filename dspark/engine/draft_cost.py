"""What drafting costs: the drafter itself is timed, on requests that nobody submitted."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.config import EngineConfig, SamplingParams
from dspark.engine.parts import Parts
from dspark.sampling.draft import RoundSampler
from dspark.scheduling.cache import keep
from dspark.scheduling.cost import CostProfile, DraftPoints
from dspark.tokens import TokenView
from dspark.types import BatchView, Committed, Mode, RequestView, VerifyLayout

logger = logging.getLogger(__name__)

ACCEPTED = 2
"""Tokens that a timed request has got since it drafted last: their features are projected with the draft."""
PERIOD = 13
"""The made-up text repeats itself, so that a drafter which copies finds something."""
QUICK_SECONDS = 1.0


def drafter_fingerprint(parts: Parts, config: EngineConfig) -> dict[str, str]:
    """What drafting times depend on beside the target: the drafter, its version, checkpoint and settings."""
    checkpoint = getattr(parts.drafter, "checkpoint", None)
    settings = json.dumps(_plain(config.drafter_config), sort_keys=True)
    return {
        "drafter": parts.name("drafter"),
        "drafter version": parts.versions.get("drafter", ""),
        "checkpoint": str(getattr(checkpoint, "source", "") or ""),
        "drafter settings": hashlib.sha256(settings.encode()).hexdigest()[:12],
    }


def with_draft(
    profile: CostProfile, parts: Parts, drafter: Mapping[str, str], *, slots: int, kept: bool
) -> CostProfile:
    """The profile with drafting times, measured in about a second; as it is where the drafter can't be timed so."""
    rows = sorted({1, min(4, slots), min(16, slots)})
    gammas = sorted({1, min(3, parts.gamma), parts.gamma})
    try:
        points = measure_draft(parts, rows, gammas, budget_seconds=QUICK_SECONDS)
    except Exception as fault:  # what a drafter can't do here it will be asked again, in a round that attributes it
        logger.info("drafting was not timed: %s: %s", type(fault).__name__, fault)
        return profile  # real rounds will show, see dspark.engine.live_cost
    found = dataclasses.replace(profile, draft=points, drafter=drafter)
    if kept and points:
        keep(found)
    return found


def measure_draft(
    parts: Parts,
    requests: Sequence[int],
    gammas: Sequence[int],
    *,
    context: int = 64,
    repeats: int = 5,
    budget_seconds: float = 20.0,
    clock: Callable[[], float] = time.perf_counter,
    tell: Callable[[], None] | None = None,
) -> DraftPoints:
    """Medians of the seconds of ``propose`` by requests and gamma, greedy; no request may be live.

    Args:
        parts: of an engine whose target has its memory; what slots 0.. hold is overwritten.
        requests: batch sizes, at most as many as there are slots.
        gammas: block sizes.
        context: tokens before each anchor; cut to half a slot.
        repeats: passes over all points.
        budget_seconds: no pass begins after it; the first is always finished.
        clock: seconds now.
        tell: called after each timing.

    What the drafter raises passes.
    """
    places = [(r, g) for g in sorted(set(gammas)) if g > 0 for r in sorted(set(requests)) if r > 0]
    if not places:
        return ()
    crowd = _Crowd(parts, max(requests), min(context, parts.target.max_len // 2))
    times: dict[tuple[int, int], list[float]] = {}
    began = clock()
    try:
        for turn in range(repeats):
            if turn and clock() - began > budget_seconds:
                break
            for place in places:
                if not crowd.has_room(place[1]):
                    break
                if turn == 0:
                    crowd.draft(*place, clock)  # first of its shape: allocations, kernels, backlog
                times.setdefault(place, []).append(crowd.draft(*place, clock))
                if tell is not None:
                    tell()
    finally:
        crowd.leave()
    return tuple((r, g, statistics.median(times[r, g])) for r, g in places if (r, g) in times)


class _Crowd:
    """Requests of made-up text, as the drafter sees them."""

    def __init__(self, parts: Parts, rows: int, context: int) -> None:
        self._parts = parts
        self._texts = [[(i + r) % PERIOD % parts.target.vocab_size for i in range(context + 1)] for r in range(rows)]
        self._read = [0] * rows
        self._taps = self._features(rows, context)
        for r in range(rows):
            self._learn(r, context, ())

    def _features(self, rows: int, context: int) -> Tensor | None:
        """Features of one text, [context, m * d_t]; every row is given the same."""
        target = self._parts.target
        layers = self._parts.drafter.tap_layers
        if not layers:
            return None
        layout = VerifyLayout(
            token_ids=torch.tensor(self._texts[0][:context], device=target.device),
            positions=torch.arange(context, device=target.device),
            slots=np.zeros(1, dtype=np.int64),
            starts=np.zeros(1, dtype=np.int64),
            cu_query_lens=np.array([0, context], dtype=np.int64),
            logit_rows=np.array([context - 1], dtype=np.int64),
        )
        return target.forward(layout, layers).taps

    def _view(self, row: int) -> RequestView:
        ids = self._texts[row]
        return RequestView(
            request_id=f"timed-{row}",
            slot=row,
            generation=0,
            ids=TokenView(ids, len(ids)),
            prompt_len=1,
            num_cached=self._read[row],
            max_draft=self._parts.target.max_len - len(ids),
            params=SamplingParams(max_tokens=1),
            mode=Mode.GREEDY,
            key=0,
        )

    def _learn(self, row: int, count: int, new: Sequence[int]) -> None:
        """Tell the drafter that ``count`` more positions were read and ``new`` committed."""
        view = self._view(row)
        self._read[row] += count
        taps = None if self._taps is None else self._taps[torch.arange(count) % len(self._taps)]
        done = Committed(view, -1, tuple(new), 0, 0, self._read[row], taps)
        self._parts.drafter.commit([done])
        self._texts[row] += new

    def has_room(self, gamma: int) -> bool:
        """False where the texts have filled their slots."""
        return max(map(len, self._texts)) + ACCEPTED + gamma < self._parts.target.max_len

    def draft(self, rows: int, gamma: int, clock: Callable[[], float]) -> float:
        """Seconds of one draft; each row then has a few more tokens."""
        parts = self._parts
        batch = BatchView(tuple(self._view(r) for r in range(rows)), gamma)
        sampler = RoundSampler(
            batch, parts.draws, parts.target.vocab_size, parts.target.device, parts.kernel("bias_sample")
        )
        began = clock()
        block = parts.drafter.propose(batch, sampler)
        block.token_ids.cpu()  # an accelerator runs ahead of the host
        seconds = max(clock() - began, 1e-9)
        for row in range(rows):
            start = len(self._texts[row])
            self._learn(row, ACCEPTED, [(start + i + row) % PERIOD % parts.target.vocab_size for i in range(ACCEPTED)])
        return seconds

    def leave(self) -> None:
        """The drafter forgets them."""
        for row in range(len(self._texts)):
            self._parts.drafter.release(row, 0)


def spread(most: int) -> Iterator[int]:
    """1, 2, 4, .. up to and with ``most``."""
    step = 1
    while step < most:
        yield step
        step *= 2
    yield most


def _plain(value: Any) -> Any:
    """Settings as JSON can hold them: keys as text, and of what is no JSON the type's name."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__
