"""The scheduler ``fixed``: every draft in full, or up to one length."""

from __future__ import annotations

from dataclasses import dataclass

from dspark._sched import CostTable, plan_fixed
from dspark.capabilities import SchedulerCapabilities
from dspark.errors import ConfigError
from dspark.protocols import BuildContext
from dspark.scheduling._common import empty_lens
from dspark.types import ScheduleInput, VerifyPlan

CAPABILITIES = SchedulerCapabilities()


@dataclass(frozen=True, slots=True)
class FixedConfig:
    """Settings of ``fixed``.

    Attributes:
        length: most tokens of a draft that are verified; None for all of them.
    """

    length: int | None = None

    def __post_init__(self) -> None:
        whole = isinstance(self.length, int) and not isinstance(self.length, bool)
        if self.length is not None and (not whole or self.length < 0):
            raise ConfigError(f"FixedConfig.length: expected an integer of at least 0 or None, got {self.length!r}")


class FixedScheduler:
    """l_r = min(length, max_lens[r]): known before drafting, so it can't anticipate."""

    capabilities: SchedulerCapabilities = CAPABILITIES

    def __init__(self, config: FixedConfig) -> None:
        self.config = config

    def plan(self, batch: ScheduleInput, cost: CostTable | None) -> VerifyPlan:
        """The configured length, cut at ``max_lens``."""
        lens = empty_lens(batch)
        planned = plan_fixed(
            batch.survival, batch.max_lens, lens, batch.base_tokens, self.config.length, cost, batch.context
        )
        return VerifyPlan(lens, *planned)

    def release(self, slot: int, generation: int) -> None:
        """Nothing is kept by request."""


def build(config: FixedConfig, context: BuildContext) -> FixedScheduler:
    """Factory of ``fixed``."""
    return FixedScheduler(config)
