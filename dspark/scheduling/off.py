"""The scheduler ``off``: l = 0, nothing drafted is verified."""

from __future__ import annotations

from dataclasses import dataclass

from dspark._sched import CostTable, plan_off
from dspark.capabilities import SchedulerCapabilities
from dspark.protocols import BuildContext
from dspark.scheduling._common import empty_lens
from dspark.types import ScheduleInput, VerifyPlan

CAPABILITIES = SchedulerCapabilities()


@dataclass(frozen=True, slots=True)
class OffConfig:
    """``off`` has no settings."""


class OffScheduler:
    """Every round is a plain one."""

    capabilities: SchedulerCapabilities = CAPABILITIES

    def plan(self, batch: ScheduleInput, cost: CostTable | None) -> VerifyPlan:
        """l = 0 for all."""
        lens = empty_lens(batch)
        planned = plan_off(batch.survival, batch.max_lens, lens, batch.base_tokens, cost, batch.context)
        return VerifyPlan(lens, *planned)

    def release(self, slot: int, generation: int) -> None:
        """Nothing is kept by request."""


def build(config: OffConfig, context: BuildContext) -> OffScheduler:
    """Factory of ``off``."""
    return OffScheduler()
