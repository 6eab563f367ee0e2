"""What the schedulers share: calls into ``dspark._sched`` and the plan without a cost table."""

from __future__ import annotations

import math

import numpy as np

from dspark._sched import plan_fixed
from dspark.errors import ConfigError
from dspark.types import IntArray, ScheduleInput, VerifyPlan

NO_COST_TABLE = "no-cost-table"


def empty_lens(batch: ScheduleInput) -> IntArray:
    """Room for the verify lengths, [R]."""
    return np.empty(len(batch.max_lens), dtype=np.int64)


def without_cost(batch: ScheduleInput) -> VerifyPlan:
    """Every draft in full, in the named state ``no-cost-table``: there is nothing to weigh it against."""
    lens = empty_lens(batch)
    expected, theta, _ = plan_fixed(batch.survival, batch.max_lens, lens, batch.base_tokens)
    return VerifyPlan(lens, expected, theta, NO_COST_TABLE)


def check_share(name: str, value: object) -> None:
    """Raise ConfigError unless ``value`` is a number from 0 to 1."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not 0.0 <= value <= 1.0:  # type: ignore[arg-type,operator]
        raise ConfigError(f"{name}: expected a number from 0 to 1, got {value!r}")
