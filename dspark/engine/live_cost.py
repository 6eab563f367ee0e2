"""A measured cost table that follows the machine: corrected by the times of real steps, between rounds.

What a profile measured holds for an idle machine at some contexts. Real steps say what a forward of so many tokens
takes here and now, what drafting takes, and what the rest of a step takes. A correction is a median of recent ratios,
shared by all points until one has seen enough of its own; the table is exchanged only where some point has moved by
more than noise, so that noise alone never turns a decision over.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from typing import Any

from dspark._sched import CostTable
from dspark.scheduling.cost import ContextBucket, CostProfile, smooth
from dspark.types import RoundRecord

WINDOW = 31
"""Recent steps that a correction is the median of, by point."""
SHARED_WINDOW = 64
LEAST = 8
"""Steps from which a point has a correction of its own; it weighs as much as the shared one then."""
PERIOD = 16
"""Steps between two looks at the table."""
WARM_UP = 3
"""First steps, which pay for allocations and caches, are left out."""
LEAST_MOVE = 0.05
"""Relative change of a point under which the table stays as it is; the profile's noise where that is more."""
MOST = math.log(8.0)

Ratios = deque[float]


class LiveCost:
    """Corrections of a profile.

    Args:
        profile: what was measured; its fingerprint was checked.

    Attributes:
        profile: the profile that the present table was made from.
        updates: how often the table was exchanged.
    """

    def __init__(self, profile: CostProfile) -> None:
        self._measured = profile
        self._table = profile.table()
        self.profile = profile
        self.updates = 0
        self._steps = 0
        self._points: dict[tuple[int, int], Ratios] = {}
        self._shared: Ratios = deque(maxlen=SHARED_WINDOW)
        self._draft: dict[tuple[int, int], Ratios] = {}
        self._glue: Ratios = deque(maxlen=SHARED_WINDOW)

    def observe(self, record: RoundRecord, context: int) -> CostTable | None:
        """Take in a step that read no prompt; a new table where the old one is off by more than noise."""
        self._steps += 1
        target = record.seconds.get("target", 0.0)
        if self._steps <= WARM_UP or target <= 0.0 or record.executed_tokens < 1:
            return None
        ratio = math.log(target / self._table.verify_seconds(record.executed_tokens, context))
        ratio = min(max(ratio, -MOST), MOST)
        self._shared.append(ratio)
        self._of(self._points, self._nearest(record.executed_tokens, context)).append(ratio)
        draft = record.seconds.get("draft", 0.0)
        if record.batch is not None and record.draft is not None and draft > 0.0:
            self._of(self._draft, (len(record.batch), record.batch.gamma)).append(draft)
        self._glue.append(sum(record.seconds.values()) - target - draft)
        return self._exchanged() if self._steps % PERIOD == 0 else None

    def _of(self, where: dict[tuple[int, int], Ratios], key: tuple[int, int]) -> Ratios:
        return where.setdefault(key, deque(maxlen=WINDOW))

    def _nearest(self, tokens: int, context: int) -> tuple[int, int]:
        """The bucket, and the point in it, that a forward belongs to."""
        buckets = self._measured.buckets
        last = len(buckets) - 1
        which = next((i for i, b in enumerate(buckets) if b.max_context is None or context <= b.max_context), last)
        points = buckets[which].points
        if self._measured.mode == "staircase":
            return which, next((i for i, (n, _) in enumerate(points) if n >= tokens), len(points) - 1)
        return which, min(range(len(points)), key=lambda i: abs(math.log(points[i][0] / tokens)))

    def _exchanged(self) -> CostTable | None:
        candidate = self._candidate()
        least = max(LEAST_MOVE, 2.0 * self._measured.noise)
        if not _moved(self.profile, candidate, least):
            return None
        self.profile = candidate
        self.updates += 1
        return candidate.table()

    def _candidate(self) -> CostProfile:
        shared = statistics.median(self._shared) if len(self._shared) >= LEAST else 0.0
        buckets = tuple(
            ContextBucket(
                smooth(
                    tuple((n, t * math.exp(self._shift(b, i, shared))) for i, (n, t) in enumerate(bucket.points)),
                    max(LEAST_MOVE, self._measured.noise),
                ),
                bucket.max_context,
            )
            for b, bucket in enumerate(self._measured.buckets)
        )
        glue = statistics.median(self._glue) if len(self._glue) >= LEAST else self._measured.glue_seconds
        return dataclasses.replace(self._measured, buckets=buckets, draft=self._drafts(), glue_seconds=max(glue, 0.0))

    def _shift(self, bucket: int, point: int, shared: float) -> float:
        own = self._points.get((bucket, point), ())
        if len(own) < LEAST:
            return shared
        weight = len(own) / (len(own) + LEAST)
        return weight * statistics.median(own) + (1.0 - weight) * shared

    def _drafts(self) -> tuple[tuple[int, int, float], ...]:
        """Measured drafting times, scaled by what real ones were; the real ones where none was measured."""
        seen = {key: statistics.median(times) for key, times in self._draft.items() if len(times) >= LEAST // 2}
        if not self._measured.draft:
            return tuple((rows, gamma, seconds) for (rows, gamma), seconds in sorted(seen.items()))
        expected = {key: self._table.draft_seconds(*key) for key in seen}
        ratios = [math.log(t / expected[key]) for key, t in seen.items() if expected[key] > 0.0]
        scale = math.exp(min(max(statistics.median(ratios), -MOST), MOST)) if ratios else 1.0
        return tuple((rows, gamma, seconds * scale) for rows, gamma, seconds in self._measured.draft)

    def describe(self) -> dict[str, Any]:
        """What it did, for people."""
        shared = math.exp(statistics.median(self._shared)) if self._shared else 1.0
        return {
            "updates": self.updates,
            "steps": self._steps,
            "forward": shared,
            "glue_seconds": self.profile.glue_seconds,
        }


def _moved(old: CostProfile, new: CostProfile, least: float) -> bool:
    """True where a point, or drafting beside a forward, differs by more than ``least``."""
    for a, b in zip(old.buckets, new.buckets, strict=True):
        if any(abs(t / s - 1.0) > least for (_, s), (_, t) in zip(a.points, b.points, strict=True)):
            return True
    forward = min(t for bucket in old.buckets for _, t in bucket.points)
    if abs(new.glue_seconds - old.glue_seconds) > least * forward:
        return True
    before, after = old.table(), new.table()
    places = {(r, g) for r, g, _ in (*old.draft, *new.draft)}
    return any(abs(after.draft_seconds(*p) - before.draft_seconds(*p)) > least * forward for p in places)
