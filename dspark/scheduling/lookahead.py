"""The scheduler ``lookahead``: Algorithm 1 that crosses dips of Theta where that pays (METHOD section 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dspark._sched import CostTable, Lookahead
from dspark.capabilities import SchedulerCapabilities
from dspark.protocols import BuildContext
from dspark.scheduling._common import check_share, empty_lens, without_cost
from dspark.types import ScheduleInput, VerifyPlan

CAPABILITIES = SchedulerCapabilities(needs_cost=True)


@dataclass(frozen=True, slots=True)
class LookaheadConfig:
    """Settings of ``lookahead``.

    Attributes:
        prior: conditional survival of a position before any draft reached it.
    """

    prior: float = 0.8

    def __post_init__(self) -> None:
        check_share("LookaheadConfig.prior", self.prior)


class LookaheadScheduler:
    """An irrevocable walk: what is admitted to cross a dip is verified, even where Theta ends lower.

    Beyond each request's next candidate it knows running averages of conditional survival alone, one table a gamma and
    group of rows, learned from all past drafts, verified or not. They are frozen while a round is planned.
    """

    capabilities: SchedulerCapabilities = CAPABILITIES

    def __init__(self, config: LookaheadConfig) -> None:
        self._core = Lookahead(config.prior)

    def plan(self, batch: ScheduleInput, cost: CostTable | None) -> VerifyPlan:
        """Where the walk stopped; without a cost table, every draft in full. Averages learn this round after it."""
        if cost is None:
            self._core.observe(batch.survival, batch.max_lens, batch.groups)
            return without_cost(batch)
        lens = empty_lens(batch)
        planned = self._core.plan(
            batch.survival, batch.max_lens, lens, cost, batch.base_tokens, batch.context, batch.groups
        )
        return VerifyPlan(lens, *planned)

    def averages(self, gamma: int, group: int = 0) -> list[float]:
        """Conditional survival of positions 1..gamma: sum a_j / sum a_{j-1}."""
        return self._core.averages(gamma, group)

    def seed_averages(self, rates: Sequence[float], group: int = 0, weight: float = 1.0) -> None:
        """Begin from these averages (gamma is their number), as if seen in ``weight`` drafts."""
        self._core.seed_averages(np.asarray(rates, dtype=np.float64), group, weight)

    def release(self, slot: int, generation: int) -> None:
        """Nothing is kept by request."""


def build(config: LookaheadConfig, context: BuildContext) -> LookaheadScheduler:
    """Factory of ``lookahead``."""
    return LookaheadScheduler(config)
