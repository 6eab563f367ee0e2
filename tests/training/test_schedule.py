"""Learning rates and schedules of weights."""

from __future__ import annotations

import pytest

from dspark.errors import ConfigError
from dspark.training.schedule import at, learning_rate, points
from tests.drafters.golden import io


def test_recorded_rates() -> None:
    """DeepSpec's 101 rates, its step slightly above the base included; the last is that after the run."""
    recorded = io("deepspec_lr_schedule")["lr_used_at_step"].tolist()
    got = [learning_rate(i, lr=6e-4, steps=100, warmup=0.04) for i in range(101)]
    assert got == pytest.approx(recorded, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("warmup", [0.0, 0.001, 0.5, 1.0])
@pytest.mark.parametrize("steps", [1, 2, 4, 7, 1000])
def test_rates_rise_then_fall_to_the_final_share(steps: int, warmup: float) -> None:
    rates = [learning_rate(i, lr=1.0, steps=steps, warmup=warmup, final=0.1) for i in range(steps + 1)]
    assert all(0 < r <= 1.001 for r in rates)
    top = rates.index(max(rates))
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    if warmup < 1:
        assert rates[-1] == pytest.approx(0.1)


def test_weights_between_points() -> None:
    assert at(0.3, 0.9) == 0.3
    schedule = [[0.0, 1.0], [0.5, 1.0], [1.0, 0.2]]
    assert [at(schedule, x) for x in (0.0, 0.25, 0.5, 0.75, 1.0)] == pytest.approx([1.0, 1.0, 1.0, 0.6, 0.2])
    assert at([[0.4, 2.0], [0.6, 4.0]], 0.1) == 2.0
    assert at([[0.4, 2.0], [0.6, 4.0]], 0.9) == 4.0


@pytest.mark.parametrize(
    "bad", [True, "much", [], [[0.5, 1.0], [0.2, 1.0]], [[0.0, -1.0]], [[0.0, float("nan")]], [[2, 1]]]
)
def test_bad_schedules_are_refused(bad: object) -> None:
    with pytest.raises(ConfigError, match=r"loss\.ce"):
        points(bad, "loss.ce")  # type: ignore[arg-type]
