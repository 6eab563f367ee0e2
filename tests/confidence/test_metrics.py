"""Reliability bins, the noise of an ECE, and the binding of the fit."""

from __future__ import annotations

import numpy as np
import pytest

from dspark._sched import fit_sts
from dspark.confidence.metrics import ECE_BINS, reliability, resampled_ece, survival_metrics


def test_reliability_bins_hold_all_rounds_and_their_means() -> None:
    probs = np.array([[0.92, 0.5], [0.94, 0.5], [0.11, 1.0]])
    prefix = np.array([[1, 1], [0, 0], [0, 0]])
    weight = np.array([[1.0, 1.0], [1.0, 1.0], [1.0, 0.0]])
    predicted, observed, count = reliability(probs, prefix, weight)[0]
    assert count.tolist() == [0, 0, 1, *[0] * 15, 2, 0]
    assert (predicted[18], observed[18]) == (pytest.approx(0.93), 0.5)
    assert (predicted[2], observed[2]) == (pytest.approx(0.11), 0.0)
    assert np.isnan(predicted[3])
    second = reliability(probs, prefix, weight)[1]
    assert second[2].sum() == 2, "what was not offered is in no bin"
    assert second[0][9] == pytest.approx((0.46 + 0.47) / 2)
    ece = survival_metrics(probs, prefix, weight).ece
    for k, (p, o, n) in enumerate(reliability(probs, prefix, weight)):
        assert ece[k] == pytest.approx(np.nansum(abs(p - o) * n) / n.sum())


def test_resampled_ece_is_what_true_probabilities_show() -> None:
    """Against the metric itself on outcomes that were drawn one round at a time."""
    rng = np.random.default_rng(3)
    probs = rng.uniform(0.3, 1.0, size=(500, 3))
    weight = (np.arange(3) < rng.integers(1, 4, size=500)[:, None]).astype(float)
    drawn = []
    for _ in range(200):
        outcome = np.logical_and.accumulate(rng.random(probs.shape) < probs, axis=1).astype(np.int64)
        drawn.append(survival_metrics(probs, outcome, weight).ece)
    got = resampled_ece(probs, weight, draws=400)
    assert got.shape == (400, 3)
    np.testing.assert_allclose(got.mean(0), np.mean(drawn, axis=0), rtol=0.08)
    np.testing.assert_allclose(np.percentile(got, 95, axis=0), np.percentile(drawn, 95, axis=0), rtol=0.15)
    assert np.array_equal(got, resampled_ece(probs, weight, draws=400)), "the same draws for the same seed"
    assert not np.array_equal(got, resampled_ece(probs, weight, draws=400, seed=1))
    assert ECE_BINS == 20


def test_fit_binding() -> None:
    """Four rounds at logit 2 that hold three times out of four: sigmoid(2 / T) = 3/4 at T = 2 / ln 3."""
    logits = np.full((4, 1), 2.0)
    offered, accepted = np.ones(4, dtype=np.int64), np.array([1, 1, 1, 0])
    temperatures, ece = np.empty(1), np.empty(1)
    fit_sts(logits, offered, accepted, temperatures, ece)
    assert temperatures[0] == pytest.approx(2 / np.log(3), rel=0.011)
    assert ece[0] < 0.005
    fit_sts(logits, offered, accepted, temperatures, ece, np.array([1.0, 4.0]), 10)
    assert temperatures[0] == 4.0
    for changed, error, words in (
        ({"logits": logits.astype(np.float32)}, TypeError, "float64"),
        ({"accepted": accepted + 1}, ValueError, r"accepted\[0\]"),
        ({"bins": 0}, ValueError, "at least one"),
        ({"bins": 1 << 20}, ValueError, "bins: expected 1 to 65536"),
        ({"grid": np.array([0.0])}, ValueError, "temperatures"),
        ({"temperatures": np.empty(2)}, ValueError, "expected 1 entries, got 2"),
    ):
        arguments = {
            "logits": logits,
            "offered": offered,
            "accepted": accepted,
            "temperatures": temperatures,
            "ece": ece,
        }
        with pytest.raises(error, match=words):
            fit_sts(**arguments | changed)  # type: ignore[arg-type]
