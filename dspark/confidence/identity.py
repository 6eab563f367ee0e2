"""The calibrator ``identity``: c as the estimator gave it."""

from __future__ import annotations

from dataclasses import dataclass

from dspark.capabilities import CalibratorCapabilities
from dspark.protocols import BuildContext
from dspark.types import BatchView, FloatArray

CAPABILITIES = CalibratorCapabilities()


@dataclass(frozen=True, slots=True)
class IdentityConfig:
    """``identity`` has no settings."""


class IdentityCalibrator:
    """Changes nothing."""

    def calibrate(self, probs: FloatArray, batch: BatchView) -> FloatArray:
        """[R, gamma] -> the same."""
        return probs


def build(config: IdentityConfig, context: BuildContext) -> IdentityCalibrator:
    """Factory of ``identity``."""
    return IdentityCalibrator()
