"""The running ECE of survivals against outcomes: quiet on noise, loud on drift, said once."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dspark.confidence.calibration import Calibration, CalibrationEntry
from dspark.confidence.drift import DriftMonitor
from dspark.confidence.linear import LinearConfidence
from dspark.confidence.metrics import survival_metrics
from dspark.config import SamplingParams
from dspark.errors import DSparkWarning
from dspark.protocols import RoundObserver
from dspark.tokens import TokenView
from dspark.types import (
    BatchView,
    Committed,
    Confidence,
    DraftBlock,
    FloatArray,
    IntArray,
    Mode,
    RequestView,
    RoundRecord,
)


def feed(monitor: DriftMonitor, count: int, size: int, shift: float = 0.0) -> None:
    """``count`` batches of ``size`` rounds."""
    for seed in range(count):
        monitor.update(*survivals(size, seed=seed, shift=shift))


def survivals(
    count: int, gamma: int = 3, *, seed: int = 0, shift: float = 0.0
) -> tuple[FloatArray, IntArray, IntArray]:
    """(survival, offered, accepted); the truth lies ``shift`` below each c."""
    rng = np.random.default_rng(seed)
    c = rng.uniform(0.4, 1.0, size=(count, gamma))
    accepted = np.logical_and.accumulate(rng.random((count, gamma)) < c - shift, axis=1).sum(1)
    offered = rng.integers(0, gamma + 1, size=count)
    return np.cumprod(c, axis=1), offered, np.minimum(accepted, offered)


@pytest.mark.parametrize("seed", range(4))
def test_noise_alone_is_quiet(seed: int) -> None:
    monitor = DriftMonitor(memory=4000.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for start in range(12_000 // 16):
            monitor.update(*survivals(16, seed=1000 * seed + start))
    report = monitor.report()
    assert not monitor.warned
    assert len(report.drifted) == 0
    assert np.isfinite(report.limit).all()
    assert (abs(report.ece / report.expected - 1) < 0.6).all(), "what noise explains is what shows"


def test_drift_warns_once_and_names_the_position() -> None:
    monitor = DriftMonitor(name="the test's confidences")
    monitor.update(*survivals(3000))
    assert not monitor.warned
    with pytest.warns(DSparkWarning, match="the test's confidences no longer fit") as caught:
        feed(monitor, 100, 50, shift=0.2)
    assert len(caught) == 1
    assert "position 1" in str(caught[0].message)
    assert monitor.warned
    assert monitor.report().drifted.tolist() == [1, 2, 3]


def test_too_few_rounds_are_not_judged() -> None:
    monitor = DriftMonitor(min_rounds=500)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        survival, offered, accepted = survivals(400, shift=0.4)
        monitor.update(survival, np.full_like(offered, 3), accepted)
    assert np.isinf(monitor.report().limit).all()


def test_without_forgetting_it_is_the_ece() -> None:
    survival, _, accepted = survivals(4000, shift=0.1)
    accepted = np.logical_and.accumulate(np.random.default_rng(1).random((4000, 3)) < 0.7, axis=1).sum(1)
    monitor = DriftMonitor(memory=1e12, tolerance=1.0)
    monitor.update(survival, np.full(4000, 3), accepted)
    c = survival / np.concatenate([np.ones((4000, 1)), survival[:, :-1]], axis=1)
    want = survival_metrics(c, (np.arange(3) < accepted[:, None]).astype(np.int64))
    np.testing.assert_allclose(monitor.report().ece, want.ece, rtol=1e-6)
    np.testing.assert_allclose(monitor.report().rounds, 4000, rtol=1e-6)


def test_old_rounds_are_forgotten() -> None:
    """Drift that is over does not last: after ten times the memory nothing of it is left."""
    monitor = DriftMonitor(memory=300.0, min_rounds=100)
    with pytest.warns(DSparkWarning, match="drift"):
        feed(monitor, 40, 50, shift=0.3)
    feed(monitor, 60, 50)
    assert monitor.report().drifted.tolist() == []


def record(survival: FloatArray, offered: IntArray, accepted: IntArray, *, mode: Mode = Mode.GREEDY) -> RoundRecord:
    rows, gamma = survival.shape
    views = tuple(
        RequestView(
            f"r{i}",
            i,
            1,
            TokenView([1, 2]),
            1,
            1,
            8,
            SamplingParams(temperature=float(mode is not Mode.GREEDY)),
            mode,
            i,
        )
        for i in range(rows)
    )
    q: Any = None
    draft = DraftBlock(torch.zeros(rows, gamma, dtype=torch.int64), np.full(rows, gamma), q)
    done = [
        Committed(view, row, (0,) * (int(a) + 1), int(o), int(a), 1, None, None)
        for row, (view, o, a) in enumerate(zip(views, offered, accepted, strict=True))
    ]
    done[-1] = Committed(views[-1], rows - 1, (), gamma, 0, 1, None, "error")
    confidence = Confidence(survival, survival)
    return RoundRecord(0, BatchView(views, gamma), draft, confidence, None, tuple(done), rows, {})


def test_it_observes_an_engine_and_ignores_failed_rows() -> None:
    monitor = DriftMonitor()
    assert isinstance(monitor, RoundObserver)
    survival, offered, accepted = survivals(5)
    monitor.on_round(record(survival, offered, accepted))
    other = DriftMonitor()
    other.update(survival[:4], offered[:4], accepted[:4])
    np.testing.assert_array_equal(monitor.report().ece, other.report().ece)
    monitor.on_finish(SimpleNamespace(), "stop")


def observe(estimator: LinearConfidence, count: int, shift: float = 0.3) -> None:
    """Rounds of a mode that is calibrated, and of one that is not and far off."""
    for seed in range(count):
        estimator.observe(record(*survivals(40, seed=seed, shift=shift)))
        estimator.observe(record(*survivals(40, seed=seed, shift=0.9), mode=Mode.COUPLED))


def test_linear_watches_what_it_calibrated() -> None:
    """Rows that no entry fits are raw, and nobody says that raw confidences are calibrated."""
    fitted = CalibrationEntry("tiny", "dspark/greedy", "greedy", 3, 0.0, 0.0, (1.0, 1.0, 1.0))
    estimator = LinearConfidence(torch.ones(1, 1), None, Calibration((fitted,)), "tiny")
    with pytest.warns(DSparkWarning, match="calibrated for mode 'greedy', gamma 3, temperature 0-0") as caught:
        observe(estimator, 60)
    assert len(caught) == 1
    assert list(estimator.drift) == [fitted.key]
    calm = LinearConfidence(torch.ones(1, 1), None, Calibration((fitted,)), "tiny")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        observe(calm, 60, shift=0.0)
    for settings in ({"drift_tolerance": None}, {"calibration": None}):
        arguments: dict[str, Any] = {"calibration": Calibration((fitted,)), "target": "tiny"} | settings
        silent = LinearConfidence(torch.ones(1, 1), None, **arguments)
        observe(silent, 20)
        assert not silent.drift
