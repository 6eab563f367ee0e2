"""The scheduler ``dcut``: a budget out of a few buckets, chosen by history; spent on the likeliest drafts of the round.

After D-Cut (arXiv 2607.14647), in a form that does not anticipate: the budget K is a function of earlier rounds, of the
cost table and of how many tokens were drafted, and the K candidates of most survival are admitted. a_{r,k} is a
function of x_{r,<k} and falls along a row, so l_r >= k is decided by x_{r,<k} and by other requests' admitted tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dspark.capabilities import SchedulerCapabilities
from dspark.protocols import BuildContext
from dspark.types import ScheduleInput, VerifyPlan
from dspark_scheduler_dcut.history import Ints, Recent, expected_gains


@dataclass(frozen=True, slots=True)
class DCutConfig:
    """Settings of ``dcut``.

    Attributes:
        ratios: budgets to choose from with an interpolated cost table, of all that was drafted; rising, each above 0
            and at most 1. A staircase's buckets are its own steps.
        ratio: the budget without a cost table.
        min_depth: drafts of each request that are verified whatever the budget.
        memory: drafts that the budget is judged by, for each group of rows and gamma.
        prior: survival from one position to the next before any draft was seen.
    """

    ratios: Sequence[float] = (0.25, 0.5, 0.75, 1.0)
    ratio: float = 0.75
    min_depth: int = 1
    memory: int = 256
    prior: float = 0.8

    def __post_init__(self) -> None:
        given = () if isinstance(self.ratios, (str, int, float)) else tuple(self.ratios)
        rising = all(_share(r) and r > 0 for r in given) and list(given) == sorted(set(given))
        if not given or not rising:
            raise ValueError(f"ratios: expected rising numbers above 0 and at most 1, got {self.ratios!r}")
        object.__setattr__(self, "ratios", given)
        for name in ("ratio", "prior"):
            if not _share(getattr(self, name)):
                raise ValueError(f"{name}: expected a number from 0 to 1, got {getattr(self, name)!r}")
        for name, low in (("min_depth", 0), ("memory", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ValueError(f"{name}: expected an integer of at least {low}, got {value!r}")


def _share(value: object) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value) and 0.0 <= value <= 1.0  # type: ignore[arg-type,operator]


class DCutScheduler:
    """See the module. Keeps recent survivals by group of rows and gamma, and nothing by request."""

    capabilities = SchedulerCapabilities(anticipates=False, needs_cost=False)

    def __init__(self, config: DCutConfig) -> None:
        self.config = config
        self._recent: dict[tuple[int, int], Recent] = {}

    def plan(self, batch: ScheduleInput, cost: Any | None) -> VerifyPlan:
        """Verify lengths [R] of the budget's size; history learns this round after it."""
        drafted = int(batch.max_lens.sum())
        if cost is None:
            budget, reason = math.ceil(self.config.ratio * drafted - 1e-9), "dcut-ratio"
        else:
            budget, reason = self._budget(batch, cost, drafted), "dcut-bucket"
        lens = admit(batch, budget, self.config.min_depth)
        inside = np.arange(batch.survival.shape[1])[None, :] < lens[:, None]
        expected = len(lens) + float((batch.survival * inside).sum())
        theta = math.nan
        if cost is not None:
            tokens = batch.base_tokens + int(lens.sum())
            theta = cost.throughput(expected, tokens, len(lens), batch.gamma, batch.context)
        self._learn(batch)
        return VerifyPlan(lens, expected, theta, "all-admitted" if int(lens.sum()) == drafted else reason)

    def release(self, slot: int, generation: int) -> None:
        """Nothing is kept by request."""

    def _budget(self, batch: ScheduleInput, cost: Any, drafted: int) -> int:
        """The bucket of most expected Theta, by history; of equal ones the smallest."""
        gamma = batch.survival.shape[1]
        least = int(np.minimum(batch.max_lens, self.config.min_depth).sum())
        pools = [(self._of(group, gamma), batch.max_lens[rows]) for group, rows in _groups(batch)]
        counts, gains = expected_gains(pools, gamma)
        counts, gains = np.concatenate([[0.0], counts]), np.concatenate([[0.0], gains])
        best, most = least, -math.inf
        for budget in buckets(cost, batch.base_tokens, batch.context, drafted, least, self.config.ratios):
            expected = len(batch.max_lens) + float(np.interp(budget, counts, gains))
            tokens = batch.base_tokens + budget
            theta = cost.throughput(expected, tokens, len(batch.max_lens), batch.gamma, batch.context)
            if theta > most * (1.0 + 1e-12):
                best, most = budget, theta
        return best

    def _learn(self, batch: ScheduleInput) -> None:
        for group, rows in _groups(batch):
            self._of(group, batch.survival.shape[1]).learn(batch.survival[rows], batch.max_lens[rows])

    def _of(self, group: int, gamma: int) -> Recent:
        found = self._recent.get((group, gamma))
        if found is None:
            found = self._recent[group, gamma] = Recent(gamma, self.config.memory, self.config.prior)
        return found


def _groups(batch: ScheduleInput) -> list[tuple[int, Ints]]:
    """(group, its rows)."""
    if batch.groups is None:
        return [(0, np.arange(len(batch.max_lens)))]
    return [(g, np.flatnonzero(batch.groups == g)) for g in np.unique(batch.groups).tolist()]


def buckets(cost: Any, base: int, context: int, drafted: int, least: int, ratios: Sequence[float]) -> list[int]:
    """Budgets to choose from, rising: from ``least`` to all ``drafted`` tokens, beside ``base`` tokens of the forward.

    Of a staircase, the last token of each step; else shares of what was drafted. ``least`` is always one of them.
    """
    if cost.mode == "staircase":
        curves = cost.buckets
        points = next((p for limit, p in curves if limit is None or context <= limit), curves[-1][1])
        sizes = [tokens - base for tokens, _ in points] + [drafted]
    else:
        sizes = [math.ceil(ratio * drafted - 1e-9) for ratio in ratios]
    return sorted({least, *(size for size in sizes if least <= size <= drafted)})


def admit(batch: ScheduleInput, budget: int, min_depth: int) -> Ints:
    """Lengths [R]: min_depth of each request, then descending survival up to ``budget`` in all; ties by position, row.

    What can't survive (a = 0) is not admitted beyond min_depth, so a budget may stay unspent.
    """
    lens = np.minimum(batch.max_lens, min_depth).astype(np.int64)
    steps = np.arange(batch.survival.shape[1])
    open_ = (steps >= lens[:, None]) & (steps < batch.max_lens[:, None]) & (batch.survival > 0.0)
    rows, positions = np.nonzero(open_)
    left = max(budget - int(lens.sum()), 0)
    order = np.lexsort((rows, positions, -batch.survival[rows, positions]))[:left]
    return lens + np.bincount(rows[order], minlength=len(lens)).astype(np.int64)


def build(config: DCutConfig, context: BuildContext) -> DCutScheduler:
    """Factory of ``dcut``."""
    return DCutScheduler(config)
