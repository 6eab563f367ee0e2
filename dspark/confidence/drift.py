"""Drift of calibrated confidences: a running ECE of survivals against outcomes, by position.

Survival a_k is judged wherever position k was offered. Admission depends on survivals, not on outcomes, so scheduled
rounds show the same calibration error in each bin of a_k as full ones do, though not the same mix of bins.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dspark.confidence.metrics import ECE_BINS
from dspark.errors import DSparkWarning
from dspark.types import Committed, Confidence, FloatArray, IntArray, RoundRecord


@dataclass(frozen=True, slots=True)
class DriftReport:
    """The running state, all [gamma].

    Attributes:
        ece: running expected calibration error.
        expected: mean of what sampling noise alone would show, if every survival were exact.
        limit: beyond this, position k has drifted.
        rounds: effective number of rounds, after forgetting.
    """

    ece: FloatArray
    expected: FloatArray
    limit: FloatArray
    rounds: FloatArray

    @property
    def drifted(self) -> IntArray:
        """Positions, from 1, that have drifted."""
        return np.flatnonzero(self.ece > self.limit) + 1


class DriftMonitor:
    """Watches survivals against outcomes and warns once when they part; can be an engine's observer.

    Each bin keeps a decayed sum of (a_k - outcome) and of its variance a_k (1 - a_k) under exact survivals. The ECE
    that noise alone would show follows from the latter: bin gaps are then close to normal, |gap| has mean
    sqrt(2 v / pi) and variance v (1 - 2 / pi). A position has drifted when its running ECE exceeds that mean by
    ``tolerance`` and by ``sigmas`` standard deviations.

    Args:
        tolerance: calibration error that does not matter.
        sigmas: how unlikely noise must be.
        memory: rounds after which an older one weighs 1/e.
        min_rounds: effective rounds of a position before it is judged.
        name: what warnings speak of.

    Attributes:
        warned: the warning was given.
    """

    def __init__(
        self,
        *,
        tolerance: float = 0.03,
        sigmas: float = 6.0,
        memory: float = 10_000.0,
        min_rounds: int = 500,
        name: str = "the confidences",
    ) -> None:
        self.tolerance, self.sigmas, self.memory, self.min_rounds = tolerance, sigmas, memory, min_rounds
        self.name = name
        self.warned = False
        self._sums: FloatArray = np.zeros((3, 0, ECE_BINS))  # gap, its variance under exact survivals, rounds
        self._checked = 0

    def update(self, survival: FloatArray, offered: IntArray, accepted: IntArray) -> None:
        """Take in rounds: survival [N, gamma]; drafts that were offered and accepted, [N]. Warns where they drift."""
        gamma = survival.shape[1]
        if gamma > self._sums.shape[1]:
            self._sums = np.pad(self._sums, ((0, 0), (0, gamma - self._sums.shape[1]), (0, 0)))
        rows, positions = np.nonzero(np.arange(gamma) < offered[:, None])
        a = survival[rows, positions]
        gap = a - (accepted[rows] > positions)
        bins = np.clip((a * ECE_BINS).astype(np.int64), 0, ECE_BINS - 1)
        keep = math.exp(-len(offered) / self.memory)
        self._sums *= np.array([keep, keep**2, keep])[:, None, None]
        for total, value in zip(self._sums, (gap, a * (1 - a), np.ones_like(a)), strict=True):
            np.add.at(total, (positions, bins), value)
        self._checked += len(offered)
        if self._checked >= self.min_rounds // 4 and not self.warned:
            self._checked = 0
            self._warn()

    def report(self) -> DriftReport:
        """The running ECE by position, and what noise explains of it."""
        gap, variance, count = self._sums
        rounds = count.sum(1)
        safe = np.maximum(rounds, 1e-12)
        expected = np.sqrt(2 * variance / math.pi).sum(1) / safe
        spread = np.sqrt(variance.sum(1) * (1 - 2 / math.pi)) / safe
        limit = expected + np.maximum(self.tolerance, self.sigmas * spread)
        limit = np.where(rounds < self.min_rounds, np.inf, limit)
        return DriftReport(np.abs(gap).sum(1) / safe, expected, limit, rounds)

    def _warn(self) -> None:
        report = self.report()
        drifted = report.drifted
        if not len(drifted):
            return
        self.warned = True
        worst = drifted[np.argmax((report.ece - report.expected)[drifted - 1])] - 1
        warnings.warn(
            f"drift: {self.name} no longer fit what is accepted: at position {worst + 1} survival is off by an ECE of "
            f"{report.ece[worst]:.1%} over about {report.rounds[worst]:.0f} rounds, where noise explains "
            f"{report.expected[worst]:.1%}; fit them again on such prompts with `dspark calibrate`",
            DSparkWarning,
            stacklevel=2,
        )

    def take(self, confidence: Confidence, done: Sequence[Committed]) -> None:
        """Take in some rows of a round."""
        rows = np.array([c.row for c in done], dtype=np.int64)
        offered = np.array([c.offered for c in done], dtype=np.int64)
        accepted = np.array([c.accepted for c in done], dtype=np.int64)
        self.update(confidence.survival[rows], offered, accepted)

    def on_round(self, record: RoundRecord) -> None:
        """Take in a round of an engine; failed rows teach nothing."""
        done = [c for c in record.committed if c.row >= 0 and c.finish_reason != "error"]
        if record.confidence is not None and done:
            self.take(record.confidence, done)

    def on_finish(self, request: Any, reason: str) -> None:
        """Nothing is kept by request."""
