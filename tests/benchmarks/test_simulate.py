"""The comparison of simulated with measured figures: it passes within its tolerance, and fails beyond it."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.simulate import compare, parse, report, requests_of
from dspark import _sched
from dspark.bench.load import Closed
from dspark.bench.simulation import Policy, World, replay
from dspark.bench.trace import AcceptanceTrace, TracedRequest

COST = _sched.CostTable([(1, 1.0), (8, 1.0), (400, 40.0)])


class Profile:
    """What the comparison reads of one."""

    @staticmethod
    def table() -> _sched.CostTable:
        return COST


def trace() -> AcceptanceTrace:
    one = TracedRequest(5, 20, 20, tuple(range(20)), (3,) * 20, (2,) * 20, ((0.8,) * 3,) * 20)
    return AcceptanceTrace((one,) * 3, 3)


@pytest.mark.parametrize(("factor", "met"), [(1.0, True), (1.08, True), (1.15, False), (0.85, False)])
def test_a_figure_that_is_off_is_seen(factor: float, met: bool) -> None:
    options = parse(["--concurrency", "1,4"])
    real: dict[int, list[dict[str, Any]]] = {}
    for users in options.concurrency:
        point = replay(World(trace(), COST, max_slots=4), Policy("fixed"), Closed(users), requests_of(users, options))
        figures = {name: float(point.figures[name]) for name in ("throughput", "accepted_length", "verify_budget")}
        real[users] = [figures | {"throughput": factor * figures["throughput"]}] * 3
    rows = compare(trace(), Profile(), real, "fixed", options)
    assert [row["met"] for row in rows] == [met, met]
    assert rows[0]["throughput"]["off"] == pytest.approx(1 / factor - 1)
    assert rows[1]["accepted_length"]["off"] == pytest.approx(0.0)
    names = (
        "date",
        "cpu",
        "cores",
        "torch_threads",
        "memory_gib",
        "system",
        "python",
        "torch",
        "transformers",
        "dspark",
    )
    about = dict.fromkeys(names, "")
    assert f"{100 * (1 / factor - 1):+.1f} %" in report(rows, about, options)
