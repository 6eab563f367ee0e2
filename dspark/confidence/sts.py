"""The calibrator ``sts``: Sequential Temperature Scaling (METHOD section 3), applied. Fitting is done elsewhere.

c'_k = sigmoid(logit(c_k) / T_k): each factor keeps its order, and entry k depends on c_k alone. 0 and 1 are certainties
and stay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dspark._sched import scale
from dspark.capabilities import CalibratorCapabilities
from dspark.errors import ConfigError, nearest
from dspark.protocols import BuildContext
from dspark.types import BatchView, FloatArray, Mode

CAPABILITIES = CalibratorCapabilities(monotone=True)


@dataclass(frozen=True, slots=True)
class STSConfig:
    """Settings of ``sts``.

    Attributes:
        temperatures: T_1, T_2, .. for drafts of every mode, each above 0; as many as gamma, or more.
        by_mode: other temperatures for a mode (``greedy``, ``coupled``, ``rejection``), as modes accept differently.
    """

    temperatures: Sequence[float] = ()
    by_mode: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        modes = [m.value for m in Mode]
        for name in self.by_mode:
            if name not in modes:
                hint = nearest(str(name), modes)
                raise ConfigError(f"STSConfig.by_mode: unknown mode {name!r}{hint} (known: {', '.join(modes)})")
        object.__setattr__(self, "temperatures", _temperatures("temperatures", self.temperatures))
        by_mode = {str(name): _temperatures(f"by_mode[{name!r}]", row) for name, row in self.by_mode.items()}
        object.__setattr__(self, "by_mode", by_mode)
        if not self.temperatures and len(by_mode) < len(modes):
            raise ConfigError("STSConfig: give temperatures, or by_mode for every mode")


def _temperatures(name: str, values: object) -> tuple[float, ...]:
    ok = isinstance(values, Sequence) and not isinstance(values, str)
    row = list(values) if isinstance(values, Sequence) else []
    numbers = all(isinstance(t, (int, float)) and not isinstance(t, bool) for t in row)
    if not ok or not numbers or not all(math.isfinite(t) and t > 0 for t in row):
        raise ConfigError(f"STSConfig.{name}: expected finite temperatures above 0, got {values!r}")
    return tuple(float(t) for t in row)


class STSCalibrator:
    """Divides the logits of c by a temperature per mode and position.

    Args:
        config: the fitted temperatures.
        gamma: block size that they must cover, 0 where it is not known yet.

    Raises:
        ConfigError: where there are fewer temperatures than gamma.
    """

    def __init__(self, config: STSConfig, gamma: int = 0) -> None:
        self.config = config
        rows = {mode: config.by_mode.get(mode.value, config.temperatures) for mode in Mode}
        self._rows = {mode: np.asarray(row, dtype=np.float64) for mode, row in rows.items()}
        self._require(gamma)

    def _require(self, gamma: int) -> None:
        for mode, row in self._rows.items():
            if len(row) < gamma:
                raise ConfigError(
                    f"sts: {len(row)} temperatures for {mode.value} drafts, but gamma is {gamma}; "
                    "fit them for this gamma, or lower it"
                )

    def calibrate(self, probs: FloatArray, batch: BatchView) -> FloatArray:
        """c [R, gamma] -> c' [R, gamma], a new array.

        Raises:
            ConfigError: where there are fewer temperatures than gamma.
            ValueError: a value that is no number from 0 to 1.
        """
        gamma = probs.shape[1]
        self._require(gamma)
        probs = np.ascontiguousarray(probs, dtype=np.float64)
        scaled = np.empty_like(probs)
        modes = [r.mode for r in batch.requests]
        for mode in dict.fromkeys(modes):
            rows = np.array([m is mode for m in modes])
            part = np.empty((int(rows.sum()), gamma))
            scale(probs[rows], self._rows[mode][:gamma], part)
            scaled[rows] = part
        return scaled


def build(config: STSConfig, context: BuildContext) -> STSCalibrator:
    """Factory of ``sts``."""
    return STSCalibrator(config, context.gamma)
