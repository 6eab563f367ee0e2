"""The two planners of the planning benchmark decide the same, ties included."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.planning import SIZES, causal_planner, confidences, numpy_planner, report
from dspark import _sched


def seconds(cost: _sched.CostTable, rows: int, gamma: int) -> np.ndarray:
    return np.array([cost.step_seconds(n, rows, gamma) for n in range(rows, rows * (gamma + 1) + 1)])


@pytest.mark.parametrize("tied", [False, True])
def test_with_everything_admitted_all_planners_agree(tied: bool) -> None:
    c = np.round(confidences(16, 5), 1) if tied else confidences(16, 5)
    cost = _sched.CostTable([(1, 1.0), (1_000_000, 1.0001)])
    lens = numpy_planner(c, seconds(cost, 16, 5), stable=True)()
    assert lens.tolist() == [5] * 16
    for products in (False, True):
        assert (causal_planner(c, cost, products=products)() == lens).all()


@pytest.mark.parametrize("tied", [False, True])
def test_the_numpy_planner_finds_the_retrospective_optimum(tied: bool) -> None:
    """Where not everything pays, it is compared with the scheduler that takes the best prefix of the same order."""
    for slope in (0.02, 0.1, 0.5):
        c = np.round(confidences(16, 5), 1) if tied else confidences(16, 5)
        cost = _sched.CostTable([(1, 1.0), (401, 1.0 + 400 * slope)])
        out = np.zeros(16, dtype=np.int64)
        survival = np.cumprod(c, axis=1)
        _sched.Global().plan(survival, np.full(16, 5, dtype=np.int64), out, cost, 16)
        assert (numpy_planner(c, seconds(cost, 16, 5), stable=True)() == out).all()
        assert 0 < out.sum() < 80 or slope != 0.1


def test_the_report_names_both_bars() -> None:
    sizes = [
        {
            "rows": rows, "gamma": gamma, "causal_seconds": 1e-5, "with_products_seconds": 2e-5, "numpy_seconds": 1e-4,
            "numpy_unstable_seconds": 5e-5, "speed_up": 5.0, "bar_seconds": 2e-5,
        }
        for rows, gamma in SIZES
    ]  # fmt: skip
    about = {
        "date": "d", "cpu": "c", "cores": 1, "torch_threads": 1, "memory_gib": 1, "system": "s", "python": "p",
        "torch": "t", "transformers": "t", "dspark": "d",
    }  # fmt: skip
    text = report(sizes, about)
    assert "| 4,096 | 16 | 10.0 us | 20.0 us | 20.0 us | 100.0 us | 5.0x | 4x | 50.0 us |" in text
