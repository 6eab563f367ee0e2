"""The estimator ``linear`` with STS, and the metrics of survival estimates."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dspark.confidence.calibration import (
    Calibration,
    CalibrationEntry,
    read_calibration,
    target_key,
    write_calibration,
)
from dspark.confidence.linear import LinearConfidence, LinearConfig, build
from dspark.confidence.metrics import survival_metrics
from dspark.config import SamplingParams
from dspark.errors import ConfigError, DSparkWarning
from dspark.protocols import BuildContext, ConfidenceEstimator
from dspark.tokens import TokenView
from dspark.types import BatchView, DraftBlock, Mode, RequestView

torch.set_num_threads(1)
ROOT = Path(__file__).parents[1] / "golden"


def view(row: int, mode: Mode, temperature: float) -> RequestView:
    params = SamplingParams(temperature=temperature)
    return RequestView(f"r{row}", row, 1, TokenView([1, 2]), 1, 1, 8, params, mode, row)


def block(hidden: torch.Tensor | None, markov: torch.Tensor | None = None, rows: int = 2, gamma: int = 3) -> DraftBlock:
    tokens = torch.zeros(rows, gamma, dtype=torch.int64)
    lens = np.full(rows, gamma)
    q: Any = None
    return DraftBlock(tokens, lens, q, hidden, {} if markov is None else {"markov": markov})


def entry(**changes: Any) -> CalibrationEntry:
    values: dict[str, Any] = {
        "target": "tiny", "verifier": "dspark/rejection", "mode": "rejection", "gamma": 3, "low": 0.9, "high": 1.1,
        "temperatures": (0.5, 1.0, 4.0), "name": "tiny-model",
    }  # fmt: skip
    return CalibrationEntry(**values | changes)


def test_metrics_equal_golden() -> None:
    """ECE, ROC-AUC, Brier and means per position, of 400 rounds."""
    data = load_file(ROOT / "deepspec_confidence_metrics" / "io.safetensors")
    probs = torch.sigmoid(data["confidence_logits"]).double().numpy()
    np.testing.assert_allclose(np.cumprod(probs, axis=1), data["cumprod_pred"].numpy(), rtol=0, atol=1e-12)
    got = survival_metrics(probs, data["prefix_label"].numpy())
    for name, key in (
        ("ece", "ece"),
        ("auc", "auc"),
        ("brier", "brier"),
        ("predicted", "pred_mean"),
        ("observed", "target_mean"),
        ("count", "total_weight"),
    ):
        np.testing.assert_allclose(getattr(got, name), data[key].numpy(), rtol=0, atol=1e-9, err_msg=name)


def test_metrics_edge_cases() -> None:
    probs, ones = np.full((3, 2), 1.0), np.ones((3, 2), dtype=np.int64)
    got = survival_metrics(probs, ones)
    assert np.isnan(got.auc).all()
    assert (got.ece == 0).all()
    weight = np.array([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    assert survival_metrics(probs, ones * 0, weight).ece.tolist() == [1.0, 0.0]
    with pytest.raises(ConfigError, match="must lie in"):
        survival_metrics(probs * 2, ones)
    with pytest.raises(ConfigError, match="alike"):
        survival_metrics(probs, ones[:2])


def test_logits_split_hidden_and_markov() -> None:
    weight, bias = torch.tensor([[1.0, -2.0, 3.0]]), torch.tensor([0.5])
    estimator = LinearConfidence(weight, bias)
    hidden, markov = torch.tensor([[[1.0, 1.0]]]), torch.tensor([[[2.0]]])
    assert estimator.logits(hidden, markov).tolist() == [[1 - 2 + 6 + 0.5]]
    alone = LinearConfidence(weight[:, :2], None)
    assert alone.logits(hidden, markov).tolist() == [[-1.0]]
    assert isinstance(estimator, ConfidenceEstimator)
    with pytest.raises(ConfigError, match="no Markov embedding"):
        estimator.logits(hidden)
    with pytest.raises(ConfigError, match="Markov embedding of width 2"):
        estimator.logits(hidden, torch.zeros(1, 1, 2))


def test_estimates_are_sigmoids_and_zero_without_drafts() -> None:
    estimator = LinearConfidence(torch.tensor([[2.0]]), torch.tensor([0.0]))
    batch = BatchView((view(0, Mode.GREEDY, 0.0), view(1, Mode.GREEDY, 0.0)), 3)
    hidden = torch.tensor([[[0.0], [1.0], [-1.0]], [[500.0], [-500.0], [0.5]]])
    got = estimator.estimate(batch, block(hidden))
    np.testing.assert_allclose(got[0], 1 / (1 + np.exp([0.0, -2.0, 2.0])))
    assert got.dtype == np.float64
    assert ((got >= 0) & (got <= 1)).all()
    with pytest.raises(ConfigError, match="no hidden states"):
        estimator.estimate(batch, block(None))
    empty = DraftBlock(torch.zeros(2, 3, dtype=torch.int64), np.zeros(2, dtype=np.int64), None)  # type: ignore[arg-type]
    assert not estimator.estimate(batch, empty).any()


def test_sts_applies_to_rows_that_it_fits_and_says_where_not() -> None:
    """Keyed by target, verifier, mode, gamma (or a longer one) and temperature; nothing fitting leaves scores raw."""
    calibration = Calibration((entry(), entry(low=0.0, high=2.0, temperatures=(9.0, 9.0, 9.0))))
    estimator = LinearConfidence(torch.tensor([[1.0]]), None, calibration, "tiny")
    rows = (view(0, Mode.REJECTION, 1.0), view(1, Mode.REJECTION, 1.9), view(2, Mode.COUPLED, 1.0))
    hidden = torch.ones(3, 3, 1)
    with pytest.warns(DSparkWarning, match="mode 'coupled', gamma 3, temperature 1 .*raw"):
        got = estimator.estimate(BatchView(rows, 3), block(hidden, rows=3))
    expected = [[0.5, 1.0, 4.0], [9.0] * 3, [1.0] * 3]
    np.testing.assert_allclose(got, 1 / (1 + np.exp(-1 / np.array(expected))))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        estimator.estimate(BatchView(rows, 3), block(hidden, rows=3))
    assert estimator.uncalibrated == {("coupled", 3, 1.0)}
    shorter = BatchView(rows[:1], 2)
    got = estimator.estimate(shorter, block(hidden[:1, :2], rows=1, gamma=2))
    np.testing.assert_allclose(got, 1 / (1 + np.exp(-1 / np.array([[0.5, 1.0]]))))
    longer = BatchView(rows[:1], 4)
    with pytest.warns(DSparkWarning, match="gamma 4"):
        got = estimator.estimate(longer, block(torch.ones(1, 4, 1), rows=1, gamma=4))
    np.testing.assert_allclose(got, 1 / (1 + np.exp(-np.ones((1, 4)))))
    for changes in ({"target": "other", "name": "other-model"}, {"verifiers": {"rejection": "acme/careful"}}):
        settings: dict[str, Any] = {"target": "tiny", "name": "tiny-model"} | changes
        foreign = LinearConfidence(torch.tensor([[1.0]]), None, calibration, settings.pop("target"), **settings)
        with pytest.warns(DSparkWarning, match="fitted for tiny-model rejection by dspark/rejection, gamma 3"):
            got = foreign.estimate(BatchView(rows[:1], 3), block(hidden[:1], rows=1))
        np.testing.assert_allclose(got, 1 / (1 + np.exp(-np.ones((1, 3)))))


def test_entries_are_found_by_their_whole_key() -> None:
    """The narrowest bucket wins, ends belong to it, and a new fit of the same key replaces the old one."""
    wide, narrow = entry(low=0.0, high=2.0), entry(low=0.6, high=0.7, temperatures=(2.0, 2.0, 2.0))
    calibration = Calibration((wide,)).with_entry(narrow)

    def find(**changes: Any) -> CalibrationEntry | None:
        key: dict[str, Any] = {
            "target": "tiny", "verifier": "dspark/rejection", "mode": "rejection", "gamma": 3, "temperature": 0.7,
        }  # fmt: skip
        return calibration.find(**key | changes)

    assert find() is narrow
    assert find(temperature=0.3 + 0.4) is narrow
    assert find(temperature=0.71) is wide
    for changes in ({"target": "b"}, {"verifier": "b"}, {"mode": "greedy"}, {"gamma": 4}, {"temperature": 2.1}):
        assert find(**changes) is None, changes
    assert find(gamma=2) is narrow, "a longer block's first temperatures"
    exact = entry(gamma=2, low=0.0, high=2.0, temperatures=(1.0, 2.0))
    longest = entry(gamma=5, low=0.7, high=0.7, temperatures=(1.0,) * 5)
    both = calibration.with_entry(exact).with_entry(longest)
    assert both.find("tiny", "dspark/rejection", "rejection", 2, 0.7) is exact
    assert both.find("tiny", "dspark/rejection", "rejection", 3, 0.7) is narrow
    assert both.find("tiny", "dspark/rejection", "rejection", 4, 0.7) is longest
    again = entry(low=0.6, high=0.7)
    assert calibration.with_entry(again).entries == (wide, again)


def test_calibration_files(tmp_path: Path) -> None:
    greedy = entry(verifier="dspark/greedy", mode="greedy", low=0.0, high=0.0, fit={"rounds": 15000, "ece": [0.01]})
    calibration = Calibration((entry(), greedy))
    path = tmp_path / "calibration.json"
    write_calibration(path, calibration)
    assert read_calibration(path) == calibration
    assert read_calibration(calibration.to_json()) == calibration
    assert [p.name for p in tmp_path.iterdir()] == ["calibration.json"]
    with pytest.raises(ConfigError, match="can't be written"):
        write_calibration(tmp_path / "no" / "calibration.json", calibration)
    for changes, words in (
        ({"mode": "greeedy"}, "none of greedy, rejection, coupled"),
        ({"target": ""}, "needs its target's hash"),
        ({"temperatures": (1.0,)}, "1 temperatures for gamma 3"),
        ({"temperatures": (1.0, 0.0, 1.0)}, "above 0"),
        ({"low": 2.0}, "not a range"),
    ):
        with pytest.raises(ConfigError, match=words):
            entry(**changes)
    with pytest.raises(ConfigError, match="expected format"):
        read_calibration({"format": "other"})
    with pytest.raises(ConfigError, match="version 2, got 1; fit it again"):
        read_calibration({"format": "dspark-sts", "version": 1, "target": "tiny", "entries": []})
    with pytest.raises(ConfigError, match="malformed entry"):
        read_calibration({**calibration.to_json(), "entries": [{"verifier": "greedy"}]})
    with pytest.raises(ConfigError, match=r"absent.json"):
        read_calibration(tmp_path / "absent.json")


def test_build(tmp_path: Path) -> None:
    weights = {"weight": torch.ones(1, 4), "bias": torch.zeros(1)}
    calibration = Calibration((entry(),))
    write_calibration(tmp_path / "calibration.json", calibration)
    drafter = SimpleNamespace(confidence_weights=weights, checkpoint=SimpleNamespace(path=tmp_path))
    target = SimpleNamespace(name="tiny-model", fingerprint=lambda: {"model": "x", "config": "tiny"})
    names = {"greedy": "dspark/greedy", "rejection": "acme/careful"}
    context = BuildContext(target=target, drafter=drafter, extras={"verifiers": names})
    built = build(LinearConfig(), context)
    assert (built.calibration, built.target, built.name) == (calibration, "tiny", "tiny-model")
    assert built.verifiers == names
    assert build(LinearConfig(calibrate=False), context).calibration is None
    other = Calibration((entry(gamma=2, temperatures=(1.0, 2.0)),))
    assert build(LinearConfig(calibration=other.to_json()), context).calibration == other
    with pytest.raises(ConfigError, match="no confidence head"):
        build(LinearConfig(), BuildContext(drafter=SimpleNamespace(confidence_weights={})))
    with pytest.raises(ConfigError, match="drift_tolerance"):
        LinearConfig(drift_tolerance=-0.1)


def test_a_target_is_known_by_its_configuration() -> None:
    """Two folders with one configuration are one target; names do not matter where there is a hash."""
    assert target_key(SimpleNamespace(name="a", fingerprint=lambda: {"model": "a", "config": "0f"})) == "0f"
    assert target_key(SimpleNamespace(name="a", fingerprint=lambda: {"model": "b"})) == "b"
    assert target_key(SimpleNamespace(name="a")) == "a"
