"""The scheduler ``lagged``: the paper's production variant, for jagged cost curves (section 5.2; METHOD section 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dspark._sched import CostTable, Lagged
from dspark.capabilities import SchedulerCapabilities
from dspark.protocols import BuildContext
from dspark.scheduling._common import check_share, empty_lens, without_cost
from dspark.types import ScheduleInput, VerifyPlan

CAPABILITIES = SchedulerCapabilities(needs_cost=True)


@dataclass(frozen=True, slots=True)
class LaggedConfig:
    """Settings of ``lagged``.

    Attributes:
        prior: conditional survival of a position before any draft reached it.
    """

    prior: float = 0.8

    def __post_init__(self) -> None:
        check_share("LaggedConfig.prior", self.prior)


class LaggedScheduler:
    """K = argmax of Theta over the survivals of two rounds ago; the K best current candidates are verified.

    K is history, and a request's later position never outranks its earlier one, so nothing anticipates. History is kept
    by (slot, generation) and counted in rounds that the request drafted in; a request without it uses running averages.
    """

    capabilities: SchedulerCapabilities = CAPABILITIES

    def __init__(self, config: LaggedConfig) -> None:
        self._core = Lagged(config.prior)

    def plan(self, batch: ScheduleInput, cost: CostTable | None) -> VerifyPlan:
        """The K best candidates; without a cost table, every draft in full. History learns this round after it."""
        if cost is None:
            self._core.observe(batch.survival, batch.max_lens, batch.slots, batch.generations, batch.groups)
            return without_cost(batch)
        lens = empty_lens(batch)
        planned = self._core.plan(
            batch.survival,
            batch.max_lens,
            batch.slots,
            batch.generations,
            lens,
            cost,
            batch.base_tokens,
            batch.context,
            batch.groups,
        )
        return VerifyPlan(lens, *planned)

    def averages(self, gamma: int, group: int = 0) -> list[float]:
        """Conditional survival of positions 1..gamma: sum a_j / sum a_{j-1}."""
        return self._core.averages(gamma, group)

    def seed_averages(self, rates: Sequence[float], group: int = 0, weight: float = 1.0) -> None:
        """Begin from these averages (gamma is their number), as if seen in ``weight`` drafts."""
        self._core.seed_averages(np.asarray(rates, dtype=np.float64), group, weight)

    def seed_history(self, slot: int, generation: int, survival: Sequence[float]) -> None:
        """Begin as if the request had had these survivals, [gamma], in its last two rounds."""
        self._core.seed_history(slot, generation, np.asarray(survival, dtype=np.float64))

    def __len__(self) -> int:
        """Requests with history."""
        return len(self._core)

    def release(self, slot: int, generation: int) -> None:
        """Forget a request; another one that has its slot by now is kept."""
        self._core.release(slot, generation)


def build(config: LaggedConfig, context: BuildContext) -> LaggedScheduler:
    """Factory of ``lagged``."""
    return LaggedScheduler(config)
