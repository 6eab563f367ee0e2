"""The estimator ``constant``: c_k from a table by position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dspark.capabilities import EstimatorCapabilities
from dspark.errors import ConfigError
from dspark.protocols import BuildContext
from dspark.types import BatchView, DraftBlock, FloatArray, RoundRecord

CAPABILITIES = EstimatorCapabilities()


@dataclass(frozen=True, slots=True)
class ConstantConfig:
    """Settings of ``constant``.

    Attributes:
        probs: c_1, c_2, .., each in [0, 1], or one number; positions beyond the last repeat it.
    """

    probs: Sequence[float] | float = (0.8,)

    def __post_init__(self) -> None:
        given = (self.probs,) if isinstance(self.probs, (int, float)) else self.probs
        ok = isinstance(given, Sequence) and not isinstance(given, str) and len(given) > 0
        if not ok or not all(_is_probability(p) for p in given):
            raise ConfigError(f"ConstantConfig.probs: expected probabilities in [0, 1], got {self.probs!r}")
        object.__setattr__(self, "probs", tuple(float(p) for p in given))


def _is_probability(value: object) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value) and 0.0 <= value <= 1.0  # type: ignore[arg-type,operator]


class ConstantEstimator:
    """The same c_k for every request, draft and round: schedules depend on position and batch size alone."""

    capabilities: EstimatorCapabilities = CAPABILITIES

    def __init__(self, config: ConstantConfig) -> None:
        self.config = config
        self._probs = np.asarray(config.probs, dtype=np.float64)

    def estimate(self, batch: BatchView, draft: DraftBlock) -> FloatArray:
        """c, [R, gamma]."""
        positions = np.minimum(np.arange(draft.token_ids.shape[1]), len(self._probs) - 1)
        return np.tile(self._probs[positions], (len(batch), 1))

    def observe(self, record: RoundRecord) -> None:
        """Nothing is learned."""

    def release(self, slot: int, generation: int) -> None:
        """Nothing is kept by request."""


def build(config: ConstantConfig, context: BuildContext) -> ConstantEstimator:
    """Factory of ``constant``."""
    return ConstantEstimator(config)
