"""``identity`` and ``sts``: applied position by position, order kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.confidence import identity, sts
from dspark.confidence.sts import STSCalibrator, STSConfig
from dspark.config import SamplingParams, build_config
from dspark.errors import ConfigError
from dspark.protocols import BuildContext, Calibrator
from dspark.tokens import TokenView
from dspark.types import BatchView, Mode, RequestView


def batch_of(*modes: Mode, gamma: int = 3) -> BatchView:
    def view(slot: int, mode: Mode) -> RequestView:
        return RequestView("r", slot, 0, TokenView([1]), 1, 0, 99, SamplingParams(), mode, 0)

    return BatchView(tuple(view(i, m) for i, m in enumerate(modes)), gamma)


def sigmoid(x: float) -> float:
    return float(1 / (1 + np.exp(-x)))


def test_identity() -> None:
    calibrator = identity.build(build_config(identity.IdentityConfig, {}), BuildContext())
    assert isinstance(calibrator, Calibrator)
    probs = np.array([[0.0, 0.3, 1.0]])
    assert calibrator.calibrate(probs, batch_of(Mode.GREEDY)).tolist() == [[0.0, 0.3, 1.0]]


def test_sts_divides_logits_by_position() -> None:
    calibrator = sts.build(build_config(STSConfig, {"temperatures": [2.0, 1.0, 0.5]}), BuildContext(gamma=3))
    assert isinstance(calibrator, Calibrator)
    probs = np.array([[sigmoid(1.0), sigmoid(1.0), sigmoid(1.0)], [sigmoid(-2.0), 0.5, 0.9]])
    before = probs.copy()
    got = calibrator.calibrate(probs, batch_of(Mode.GREEDY, Mode.REJECTION))
    assert got[0] == pytest.approx([sigmoid(0.5), sigmoid(1.0), sigmoid(2.0)])
    assert got[1] == pytest.approx([sigmoid(-1.0), 0.5, 0.81 / 0.82])
    assert probs.tolist() == before.tolist()


def test_sts_by_mode() -> None:
    calibrator = STSCalibrator(STSConfig(temperatures=(1.0,), by_mode={"coupled": (2.0,)}))
    got = calibrator.calibrate(np.full((2, 1), 0.9), batch_of(Mode.COUPLED, Mode.GREEDY, gamma=1))
    assert got[:, 0] == pytest.approx([0.75, 0.9])


def test_certainties_stay_and_what_is_no_probability_is_refused() -> None:
    """An exploring row reports 1, a hopeless one 0; neither is for a temperature to change."""
    calibrator, batch = STSCalibrator(STSConfig((3.0, 0.1))), batch_of(Mode.GREEDY, Mode.COUPLED, gamma=2)
    assert calibrator.calibrate(np.array([[0.0, 1.0], [1.0, 0.0]]), batch).tolist() == [[0.0, 1.0], [1.0, 0.0]]
    for bad in (np.nan, 1.5, -0.1):
        with pytest.raises(ValueError, match="0 to 1"):
            calibrator.calibrate(np.array([[0.5, 0.5], [0.5, bad]]), batch)


@given(
    probs=st.lists(st.floats(0, 1), min_size=4, max_size=4),
    temperatures=st.lists(st.floats(0.05, 20), min_size=2, max_size=2),
    other=st.floats(0, 1),
)
def test_sts_keeps_order_and_entries_apart(probs: list[float], temperatures: list[float], other: float) -> None:
    calibrator, batch = STSCalibrator(STSConfig(temperatures)), batch_of(Mode.GREEDY, Mode.GREEDY, gamma=2)
    rows = np.array(probs).reshape(2, 2)
    got = calibrator.calibrate(rows, batch)
    assert ((got >= 0) & (got <= 1)).all()
    for k in range(2):
        assert (got[0, k] - got[1, k]) * (rows[0, k] - rows[1, k]) >= 0
    changed = rows.copy()
    changed[:, 1] = other
    assert calibrator.calibrate(changed, batch)[:, 0].tolist() == got[:, 0].tolist()


def test_fewer_temperatures_than_gamma_are_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"5 temperatures .* gamma is 7"):
        sts.build(STSConfig((1.0,) * 5), BuildContext(gamma=7))
    with pytest.raises(ConfigError, match="2 temperatures for coupled"):
        sts.build(STSConfig((1.0,) * 3, by_mode={"coupled": (1.0, 1.0)}), BuildContext(gamma=3))
    calibrator = sts.build(STSConfig((1.0,) * 5), BuildContext(gamma=3))
    with pytest.raises(ConfigError, match="gamma is 6"):
        calibrator.calibrate(np.full((1, 6), 0.5), batch_of(Mode.GREEDY, gamma=6))


def test_an_empty_batch() -> None:
    assert STSCalibrator(STSConfig((1.0,))).calibrate(np.zeros((0, 1)), batch_of(gamma=1)).shape == (0, 1)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, "give temperatures"),
        ({"temperatures": [0.0]}, "above 0"),
        ({"temperatures": [float("inf")]}, "above 0"),
        ({"temperatures": "1.0"}, "above 0"),
        ({"temperatures": [True]}, "above 0"),
        ({"temperatures": [1.0], "by_mode": {"gredy": [1.0]}}, "did you mean 'greedy'"),
        ({"by_mode": {"greedy": [1.0]}}, "every mode"),
        ({"temperature": [1.0]}, "did you mean 'temperatures'"),
    ],
)
def test_sts_refuses(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build_config(STSConfig, values)
