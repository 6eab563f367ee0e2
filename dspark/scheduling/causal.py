"""The scheduler ``causal``: Algorithm 1 of the paper, greedy in survival with early stopping (METHOD section 4)."""

from __future__ import annotations

from dataclasses import dataclass

from dspark._sched import Causal, CostTable
from dspark.capabilities import SchedulerCapabilities
from dspark.protocols import BuildContext
from dspark.scheduling._common import empty_lens, without_cost
from dspark.types import ScheduleInput, VerifyPlan

CAPABILITIES = SchedulerCapabilities(needs_cost=True)


@dataclass(frozen=True, slots=True)
class CausalConfig:
    """``causal`` has no settings."""


class CausalScheduler:
    """Admits candidates in descending survival and stops at the first that does not raise Theta.

    Exact with every verifier. On a staircase it stops at the foot of the first step; see ``lookahead``.
    """

    capabilities: SchedulerCapabilities = CAPABILITIES

    def __init__(self) -> None:
        self._core = Causal()

    def plan(self, batch: ScheduleInput, cost: CostTable | None) -> VerifyPlan:
        """Algorithm 1; without a cost table, every draft in full."""
        if cost is None:
            return without_cost(batch)
        lens = empty_lens(batch)
        planned = self._core.plan(batch.survival, batch.max_lens, lens, cost, batch.base_tokens, batch.context)
        return VerifyPlan(lens, *planned)

    def release(self, slot: int, generation: int) -> None:
        """Nothing is kept by request."""


def build(config: CausalConfig, context: BuildContext) -> CausalScheduler:
    """Factory of ``causal``."""
    return CausalScheduler()
