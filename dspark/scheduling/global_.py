"""The scheduler ``global``: the retrospective optimum. Exact with ``coupled`` and greedy alone (METHOD section 4)."""

from __future__ import annotations

from dataclasses import dataclass

from dspark._sched import CostTable, Global
from dspark.capabilities import SchedulerCapabilities
from dspark.protocols import BuildContext
from dspark.scheduling._common import empty_lens, without_cost
from dspark.types import ScheduleInput, VerifyPlan

CAPABILITIES = SchedulerCapabilities(anticipates=True, needs_cost=True)


@dataclass(frozen=True, slots=True)
class GlobalConfig:
    """``global`` has no settings."""


class GlobalScheduler:
    """argmax of Theta over all prefixes of Algorithm 1's order.

    It reads c_{k+1} before it decides on k, and c_{k+1} depends on x_k: with ``rejection`` the output would be biased
    (Appendix A: .85 instead of .7).
    """

    capabilities: SchedulerCapabilities = CAPABILITIES

    def __init__(self) -> None:
        self._core = Global()

    def plan(self, batch: ScheduleInput, cost: CostTable | None) -> VerifyPlan:
        """The best prefix, the shortest of equals; without a cost table, every draft in full."""
        if cost is None:
            return without_cost(batch)
        lens = empty_lens(batch)
        planned = self._core.plan(batch.survival, batch.max_lens, lens, cost, batch.base_tokens, batch.context)
        return VerifyPlan(lens, *planned)

    def release(self, slot: int, generation: int) -> None:
        """Nothing is kept by request."""


def build(config: GlobalConfig, context: BuildContext) -> GlobalScheduler:
    """Factory of ``global``."""
    return GlobalScheduler()
