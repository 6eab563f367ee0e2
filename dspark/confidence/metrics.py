"""How good survival estimates are: ECE, ROC-AUC and Brier score per position, as the authors' code computes them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dspark.errors import ConfigError
from dspark.types import FloatArray, IntArray

ECE_BINS = 20
AUC_BINS = 1000


@dataclass(frozen=True, slots=True)
class SurvivalMetrics:
    """Per position k = 1..gamma, all [gamma]: predicted prod_{i<=k} c_i against "prefix k was accepted".

    Attributes:
        ece: expected calibration error, 20 equal-width bins.
        auc: area under the ROC curve from a histogram of 1,000 bins, ties counted half; NaN with one class alone.
        brier: mean squared error.
        predicted, observed: means of both.
        count: rounds that were offered so far.
    """

    ece: FloatArray
    auc: FloatArray
    brier: FloatArray
    predicted: FloatArray
    observed: FloatArray
    count: FloatArray


def survival_metrics(probs: FloatArray, prefix: IntArray, weight: FloatArray | None = None) -> SurvivalMetrics:
    """Metrics of per-position probabilities c [N, gamma] against 0/1 labels ``prefix`` [N, gamma].

    Args:
        probs: c_k, conditional on the prefix before; their cumulative product is what is judged.
        prefix: 1 where the first k drafts were all accepted.
        weight: of each entry, such as 0 where a position was not offered; None for ones.

    Raises:
        ConfigError: shapes that differ, or probabilities outside [0, 1].
    """
    if probs.shape != prefix.shape or probs.ndim != 2:
        raise ConfigError(f"survival_metrics: probs {probs.shape} and labels {prefix.shape} must be [N, gamma] alike")
    if not ((probs >= 0) & (probs <= 1)).all():
        raise ConfigError("survival_metrics: probabilities must lie in [0, 1]")
    survival = np.asarray(np.cumprod(probs, axis=1), dtype=np.float64)
    labels = prefix.astype(np.float64)
    weights: FloatArray = np.ones(survival.shape) if weight is None else weight.astype(np.float64)
    total = weights.sum(0)
    safe = np.maximum(total, 1e-12)
    columns = range(survival.shape[1])
    return SurvivalMetrics(
        ece=np.array([_ece(survival[:, k], labels[:, k], weights[:, k]) for k in columns]),
        auc=np.array([_auc(survival[:, k], labels[:, k], weights[:, k]) for k in columns]),
        brier=(weights * (survival - labels) ** 2).sum(0) / safe,
        predicted=(weights * survival).sum(0) / safe,
        observed=(weights * labels).sum(0) / safe,
        count=total,
    )


def _bins(values: FloatArray, bins: int) -> IntArray:
    out: IntArray = np.clip(np.floor(values * bins), 0, bins - 1).astype(np.int64)
    return out


def _ece(probs: FloatArray, labels: FloatArray, weights: FloatArray) -> float:
    """Sum over bins of |sum of predictions - sum of labels|, over the total weight."""
    gap = np.bincount(_bins(probs, ECE_BINS), weights=weights * (probs - labels), minlength=ECE_BINS)
    return float(np.abs(gap).sum() / max(weights.sum(), 1e-12))


def _auc(probs: FloatArray, labels: FloatArray, weights: FloatArray) -> float:
    """P(a positive scores above a negative) + half of P(they share a bin)."""
    at = _bins(probs, AUC_BINS)
    positive = np.bincount(at, weights=weights * labels, minlength=AUC_BINS)
    negative = np.bincount(at, weights=weights * (1 - labels), minlength=AUC_BINS)
    pairs = positive.sum() * negative.sum()
    if pairs == 0:
        return float("nan")
    below = np.cumsum(negative) - negative
    return float((positive * (below + 0.5 * negative)).sum() / pairs)


def reliability(probs: FloatArray, prefix: IntArray, weight: FloatArray | None = None) -> FloatArray:
    """What a reliability diagram shows: mean survival, share that survived, and rounds, by bin; [gamma, 3, 20].

    Arguments as :func:`survival_metrics`. Means of empty bins are NaN.
    """
    survival = np.asarray(np.cumprod(probs, axis=1), dtype=np.float64)
    weights: FloatArray = np.ones(survival.shape) if weight is None else weight.astype(np.float64)
    out = np.empty((survival.shape[1], 3, ECE_BINS))
    for k, row in enumerate(out):
        at, w = _bins(survival[:, k], ECE_BINS), weights[:, k]
        values = (w * survival[:, k], w * prefix[:, k], w)
        predicted, observed, count = (np.bincount(at, weights=v, minlength=ECE_BINS) for v in values)
        safe = np.where(count > 0, count, np.nan)
        row[:] = predicted / safe, observed / safe, count
    return out


def resampled_ece(
    probs: FloatArray, weight: FloatArray | None = None, *, draws: int = 100, seed: int = 0
) -> FloatArray:
    """ECE by position [draws, gamma] of outcomes drawn from ``probs`` themselves: what noise alone shows.

    Args:
        probs: c [N, gamma], taken to be true.
        weight: as :func:`survival_metrics`.
        draws: how often outcomes are drawn.
        seed: of the draws.
    """
    rng = np.random.default_rng(seed)
    survival = np.asarray(np.cumprod(probs, axis=1), dtype=np.float64)
    weights: FloatArray = np.ones(survival.shape) if weight is None else weight.astype(np.float64)
    total = np.maximum(weights.sum(0), 1e-12)
    rows, gamma = survival.shape
    at = _bins(survival, ECE_BINS) + ECE_BINS * np.arange(gamma)
    out = np.empty((draws, gamma))
    for i in range(draws):
        outcome = np.logical_and.accumulate(rng.random((rows, gamma)) < probs, axis=1)
        gaps = np.bincount(at.ravel(), weights=(weights * (survival - outcome)).ravel(), minlength=gamma * ECE_BINS)
        out[i] = np.abs(gaps.reshape(gamma, ECE_BINS)).sum(1) / total
    return out
