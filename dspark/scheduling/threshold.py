"""The scheduler ``threshold``: each draft up to its first doubtful token."""

from __future__ import annotations

from dataclasses import dataclass

from dspark._sched import CostTable, plan_threshold
from dspark.capabilities import SchedulerCapabilities
from dspark.protocols import BuildContext
from dspark.scheduling._common import check_share, empty_lens
from dspark.types import ScheduleInput, VerifyPlan

CAPABILITIES = SchedulerCapabilities()


@dataclass(frozen=True, slots=True)
class ThresholdConfig:
    """Settings of ``threshold``.

    Attributes:
        threshold: verification stops before the first c_k below it; from 0 (all) to 1.
    """

    threshold: float = 0.5

    def __post_init__(self) -> None:
        check_share("ThresholdConfig.threshold", self.threshold)


class ThresholdScheduler:
    """l_r = number of leading c_k >= threshold: c_k sees x_{<k} alone, so position k decides itself by its past."""

    capabilities: SchedulerCapabilities = CAPABILITIES

    def __init__(self, config: ThresholdConfig) -> None:
        self.config = config

    def plan(self, batch: ScheduleInput, cost: CostTable | None) -> VerifyPlan:
        """Each row by itself."""
        lens = empty_lens(batch)
        planned = plan_threshold(
            batch.probs,
            batch.survival,
            batch.max_lens,
            lens,
            self.config.threshold,
            batch.base_tokens,
            cost,
            batch.context,
        )
        return VerifyPlan(lens, *planned)

    def release(self, slot: int, generation: int) -> None:
        """Nothing is kept by request."""


def build(config: ThresholdConfig, context: BuildContext) -> ThresholdScheduler:
    """Factory of ``threshold``."""
    return ThresholdScheduler(config)
