"""Fitting Sequential Temperature Scaling on collected rounds, and how well it holds on rounds that it did not see.

METHOD section 3. Held-out figures are cross-fitted: prompts are dealt into folds, the rounds of each fold are judged
under temperatures fitted on the other folds, and the judged rounds are pooled. The temperatures that are kept are
fitted on all rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dspark._sched import fit_sts, scale
from dspark.confidence.calibration import CalibrationEntry
from dspark.confidence.drift import DriftMonitor, DriftReport
from dspark.confidence.metrics import SurvivalMetrics, reliability, resampled_ece, survival_metrics
from dspark.errors import EvaluationError
from dspark.evaluation.rounds import Rounds
from dspark.types import FloatArray, IntArray

FOLDS = 5
ENOUGH_ROUNDS = 15_000
"""Below this, sampling noise alone shows more than about 1 % ECE."""
CHECK_STEP = 32
"""Rounds that the drift monitor takes in at once, as a batch would give them."""
GRID_ENDS = (0.1, 10.0)
"""First and last temperature that are tried."""


@dataclass(frozen=True, slots=True)
class Judged:
    """Confidences against outcomes.

    Attributes:
        metrics: by position.
        noise: ECE that sampling noise alone would show, by position: mean, and 95th percentile.
        bins: of the reliability diagrams, [gamma, 3, 20].
    """

    metrics: SurvivalMetrics
    noise: tuple[FloatArray, FloatArray]
    bins: FloatArray

    def as_dict(self) -> dict[str, Any]:
        """For JSON; what is not defined is None."""
        m = self.metrics
        values = {name: _plain(getattr(m, name)) for name in ("ece", "auc", "brier", "predicted", "observed", "count")}
        noise = {"noise_ece": _plain(self.noise[0]), "noise_ece_95": _plain(self.noise[1])}
        bins = [
            {n: _plain(row) for n, row in zip(("predicted", "observed", "count"), k, strict=True)} for k in self.bins
        ]
        return {**values, "mean_ece": float(np.mean(m.ece)), **noise, "bins": bins}


def judge(rounds: Rounds) -> Judged:
    """Survivals of the drafted rounds as they are.

    Raises:
        EvaluationError: no draft was verified.
    """
    rounds = rounds.drafted()
    if not len(rounds):
        raise EvaluationError("no draft was verified: there is nothing to judge confidences by")
    weight = rounds.weight.astype(np.float64)
    noise = resampled_ece(rounds.probs, weight)
    return Judged(
        survival_metrics(rounds.probs, rounds.prefix, weight),
        (noise.mean(0), np.percentile(noise, 95, axis=0)),
        reliability(rounds.probs, rounds.prefix, weight),
    )


@dataclass(frozen=True, slots=True)
class Fit:
    """Temperatures and what they do.

    Attributes:
        temperatures: T_1..T_gamma, fitted on all rounds, [gamma].
        before: raw confidences.
        after: calibrated ones, held out by cross-fitting.
        fitted: calibrated ones on the rounds that they were fitted on.
        rounds, prompts: how many there were.
    """

    temperatures: FloatArray
    before: Judged
    after: Judged
    fitted: Judged
    rounds: int
    prompts: int

    @property
    def at_the_end(self) -> IntArray:
        """Positions, from 1, whose temperature is the first or last of the grid: the best may lie beyond."""
        ends = np.isclose(self.temperatures[:, None], GRID_ENDS, rtol=1e-6).any(1)
        return np.flatnonzero(ends) + 1

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "temperatures": self.temperatures.tolist(),
            "rounds": self.rounds,
            "prompts": self.prompts,
            "before": self.before.as_dict(),
            "after": self.after.as_dict(),
            "fitted": self.fitted.as_dict(),
        }

    def entry(
        self, *, target: str, name: str, verifier: str, mode: str, bucket: tuple[float, float], about: dict[str, Any]
    ) -> CalibrationEntry:
        """The entry of a calibration file, with what it was fitted on and how well."""
        figures = {
            "rounds": self.rounds,
            "prompts": self.prompts,
            "ece_before": _plain(self.before.metrics.ece),
            "ece_held_out": _plain(self.after.metrics.ece),
            "auc_held_out": _plain(self.after.metrics.auc),
        }
        temperatures = tuple(float(t) for t in self.temperatures)
        return CalibrationEntry(
            target, verifier, mode, len(temperatures), *bucket, temperatures, name, {**figures, **about}
        )


def fit(parts: Sequence[Rounds], *, folds: int = FOLDS) -> Fit:
    """Fit temperatures on raw rounds, one part a prompt; full-length rounds, since scheduled ones are censored.

    Raises:
        EvaluationError: fewer than two prompts, or a position that was never offered.
    """
    parts = [kept for part in parts if len(kept := part.drafted())]
    if len(parts) < 2:
        raise EvaluationError(f"{len(parts)} prompts with drafts are too few to hold some out")
    folds = min(folds, len(parts))
    gamma = parts[0].gamma
    together = Rounds.concat(parts, gamma)
    temperatures = temperatures_of(together)
    fold = np.repeat(deal(len(parts), folds), [len(part) for part in parts])
    held_out = together.probs.copy()
    for i in range(folds):
        held_out[fold == i] = scaled(together.probs[fold == i], temperatures_of(together.take(fold != i)))

    def with_probs(probs: FloatArray) -> Rounds:
        return Rounds(probs, together.offered, together.accepted, together.committed)

    return Fit(
        temperatures,
        judge(together),
        judge(with_probs(held_out)),
        judge(with_probs(scaled(together.probs, temperatures))),
        len(together),
        len(parts),
    )


@dataclass(frozen=True, slots=True)
class Check:
    """An entry against new rounds.

    Attributes:
        raw, calibrated: confidences without and with its temperatures.
        drift: the running ECE after the last round.
    """

    raw: Judged
    calibrated: Judged
    drift: DriftReport

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        running = {"running_ece": _plain(self.drift.ece), "positions": self.drift.drifted.tolist()}
        return {"before": self.raw.as_dict(), "after": self.calibrated.as_dict(), "drift": running}


def check(rounds: Rounds, entry: CalibrationEntry) -> Check:
    """Take raw rounds through the drift monitor as a running engine would, which warns where they drift.

    Raises:
        EvaluationError: no draft was verified, or rounds of another gamma.
    """
    rounds = rounds.drafted()
    if rounds.gamma != entry.gamma:
        raise EvaluationError(f"rounds of gamma {rounds.gamma} can't be judged by temperatures for {entry.gamma}")
    probs = scaled(rounds.probs, np.array(entry.temperatures))
    calibrated = judge(Rounds(probs, rounds.offered, rounds.accepted, rounds.committed))
    monitor = DriftMonitor(name=f"the confidences calibrated for mode {entry.mode!r}, gamma {entry.gamma}")
    survival = np.asarray(np.cumprod(probs, axis=1), dtype=np.float64)
    for start in range(0, len(rounds), CHECK_STEP):
        part = slice(start, start + CHECK_STEP)
        monitor.update(survival[part], rounds.offered[part], rounds.accepted[part])
    return Check(judge(rounds), calibrated, monitor.report())


def deal(count: int, folds: int) -> IntArray:
    """Fold of each of ``count`` prompts, shuffled so that every data set is in every fold; the same in every run."""
    return np.asarray(np.random.default_rng(0).permutation(count) % folds)


def temperatures_of(rounds: Rounds) -> FloatArray:
    """T [gamma] of raw rounds.

    Raises:
        EvaluationError: a position that was never offered.
    """
    temperatures, ece = np.empty(rounds.gamma), np.empty(rounds.gamma)
    logits = np.ascontiguousarray(np.where(rounds.weight, rounds.logits, 0.0))
    try:
        fit_sts(logits, rounds.offered, rounds.accepted, temperatures, ece)
    except ValueError as err:
        raise EvaluationError(f"temperatures can't be fitted: {err}") from err
    return temperatures


def scaled(probs: FloatArray, temperatures: FloatArray) -> FloatArray:
    """sigmoid(logit(c) / T), [N, gamma]."""
    out = np.empty_like(probs)
    scale(np.ascontiguousarray(probs), temperatures, out)
    return out


def _plain(values: FloatArray) -> list[float | None]:
    return [None if math.isnan(v) else float(v) for v in values.tolist()]
