"""Planning times: ``python -m benchmarks.planning``.

The scheduler ``causal`` through its Python binding, all drafts admitted, against a vectorised planner in numpy that
decides the same (cumprod, sort, cumsum, argmax, top-K), in the same run and in turn: R = 256 requests of gamma = 7, and
R = 4,096 of gamma = 16. The bar in seconds is on the plan alone, from survivals to verify lengths; the ratio is of both
from confidences on, products along the rows included. Medians. Algorithm 1 breaks ties by position, then request, which
takes a stable sort; the time with numpy's quicker unstable sort, which may decide ties otherwise, is shown beside it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from benchmarks._common import describe, machine, table, write_json, write_section
from dspark import _sched

SIZES = ((256, 7), (4096, 16))
BARS = {(256, 7): 20e-6, (4096, 16): 1.5e-3}
"""Seconds of ``causal`` with everything admitted."""
SPEED_UP = 4.0
Plan = Callable[[], "np.ndarray[Any, np.dtype[np.int64]]"]


def confidences(rows: int, gamma: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """c of mixed difficulty."""
    return np.random.default_rng(7).uniform(0.5, 0.99, size=(rows, gamma))


def numpy_planner(c: Any, seconds: Any, *, stable: bool) -> Plan:
    """The best prefix of Algorithm 1's order, without loops: cumprod, sort, cumsum, argmax, top-K counted by row.

    Args:
        c: confidences, [R, gamma].
        seconds: of a step by executed tokens beyond R, [R * gamma + 1].
        stable: ties as Algorithm 1 breaks them.
    """
    rows = len(c)
    kind: Any = "stable" if stable else "quicksort"

    def plan() -> Any:
        flat = np.cumprod(c, axis=1).T.reshape(-1)
        order = np.argsort(-flat, kind=kind)
        tau = rows + np.concatenate(([0.0], np.cumsum(flat[order])))
        best = int(np.argmax(tau / seconds))
        return np.bincount(order[:best] % rows, minlength=rows).astype(np.int64)

    return plan


def causal_planner(c: Any, cost: _sched.CostTable, *, products: bool) -> Plan:
    """dspark's; with the products along the rows, or from survivals."""
    rows, gamma = c.shape
    survival = np.cumprod(c, axis=1)
    scheduler, out = _sched.Causal(), np.zeros(rows, dtype=np.int64)
    max_lens = np.full(rows, gamma, dtype=np.int64)

    def plan() -> Any:
        if products:
            _sched.survival(c, max_lens, survival)
        scheduler.plan(survival, max_lens, out, cost, rows)
        return out

    return plan


def timed(plan: Plan, repeats: int) -> float:
    """Seconds of one call, over some."""
    began = time.perf_counter()
    for _ in range(repeats):
        plan()
    return (time.perf_counter() - began) / repeats


def measure(rows: int, gamma: int, passes: int) -> dict[str, Any]:
    """Medians of both planners at one size.

    Raises:
        RuntimeError: they decide differently.
    """
    c = confidences(rows, gamma)
    cost = _sched.CostTable([(1, 1.0), (1_000_000, 1.0001)])
    seconds = np.array([cost.step_seconds(n, rows, gamma) for n in range(rows, rows * (gamma + 1) + 1)])
    plans = {
        "plan": causal_planner(c, cost, products=False),
        "ours": causal_planner(c, cost, products=True),
        "numpy": numpy_planner(c, seconds, stable=True),
        "unstable": numpy_planner(c, seconds, stable=False),
    }
    lens = [plan().copy() for plan in plans.values()]
    if any((one != lens[0]).any() for one in lens) or int(lens[0].sum()) != rows * gamma:
        raise RuntimeError(f"R = {rows}, gamma = {gamma}: the planners differ, or not all drafts are admitted")
    repeats = max(3, 20_000 // (rows * gamma))
    times: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(passes):
        for name, plan in plans.items():
            times[name].append(timed(plan, repeats))
    mine, whole, other, quick = (statistics.median(times[name]) for name in plans)
    bar = BARS[rows, gamma]
    return {
        "rows": rows, "gamma": gamma, "causal_seconds": mine, "with_products_seconds": whole,
        "numpy_seconds": other, "numpy_unstable_seconds": quick, "speed_up": other / whole,
        "bar_seconds": bar, "met": mine <= bar and other / whole >= SPEED_UP,
    }  # fmt: skip


def report(results: list[dict[str, Any]], about: dict[str, Any]) -> str:
    """The section of the results page."""
    head = [
        "requests",
        "gamma",
        "causal",
        "bar",
        "with products",
        "numpy",
        "numpy over causal",
        "bar",
        "numpy, unstable sort",
    ]
    rows = [
        [
            f"{r['rows']:,}", str(r["gamma"]), micro(r["causal_seconds"]), micro(r["bar_seconds"]),
            micro(r["with_products_seconds"]), micro(r["numpy_seconds"]), f"{r['speed_up']:.1f}x", f"{SPEED_UP:.0f}x",
            micro(r["numpy_unstable_seconds"]),
        ]
        for r in results
    ]  # fmt: skip
    return f"{table(head, rows)}\n\n{describe(about)}"


def micro(seconds: float) -> str:
    """``14.2 us``."""
    return f"{1e6 * seconds:,.1f} us"


def main(arguments: Iterable[str] | None = None) -> int:
    """Measure and print; exit code 1 where a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning", description=__doc__.split("\n\n")[0])
    parser.add_argument("--passes", type=int, default=25, help="passes over both planners")
    parser.add_argument("--no-write", action="store_true", help="leave results/ and the results page alone")
    options = parser.parse_args(None if arguments is None else list(arguments))
    about = machine()
    results = [measure(*size, options.passes) for size in SIZES]
    text = report(results, about)
    print(f"\n{text}\n")
    if not options.no_write:
        print(f"written: {write_json('planning', {'about': about, 'sizes': results})}")
        write_section("planning", text)
    return 0 if all(r["met"] for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
