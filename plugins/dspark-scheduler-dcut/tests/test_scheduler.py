"""The scheduler is held to dspark's contracts; its buckets, its budget and how it is spent are checked by hand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
from dspark_scheduler_dcut.history import Recent, expected_gains
from dspark_scheduler_dcut.scheduler import DCutConfig, DCutScheduler, admit, buckets

from dspark._sched import CostTable
from dspark.testing import PluginSuite, SchedulerSuite
from dspark.types import ScheduleInput

NAME = "dspark-scheduler-dcut/dcut"


class TestPlugin(PluginSuite):
    component = "dspark-scheduler-dcut"


class TestDCut(SchedulerSuite):
    component = NAME
    bad_settings = (
        {"ratios": ()},
        {"ratios": (0.5, 0.25)},
        {"ratios": (0.5, 1.5)},
        {"ratio": 2},
        {"min_depth": -1},
        {"memory": 0},
        {"prior": "high"},
    )


class TestWithoutFloor(SchedulerSuite):
    component = NAME
    settings: ClassVar[dict[str, Any]] = {"min_depth": 0, "memory": 2, "ratios": (0.1, 0.3, 0.5, 0.7, 0.9)}


def make_input(probs: Sequence[Sequence[float]], **fields: Any) -> ScheduleInput:
    c = np.array(probs, dtype=np.float64)
    rows, gamma = c.shape
    lens = np.asarray(fields.pop("max_lens", [gamma] * rows), dtype=np.int64)
    survival = np.where(np.arange(gamma) < lens[:, None], c.cumprod(axis=1), 0.0)
    given = {"base_tokens": rows, "context": 0, "gamma": gamma, "groups": None, **fields}
    return ScheduleInput(c, survival, lens, np.arange(rows), np.ones(rows, dtype=np.int64), **given)


def make(**settings: Any) -> DCutScheduler:
    return DCutScheduler(DCutConfig(**settings))


STAIRS = CostTable([(4, 1.0), (8, 1.1), (16, 2.5), (32, 5.0)], mode="staircase")
SLOPE = CostTable([(1, 1.0), (64, 10.0)])


def test_buckets_of_a_staircase_are_its_steps() -> None:
    assert buckets(STAIRS, 4, 0, 20, 4, (0.5,)) == [4, 12, 20]
    assert buckets(STAIRS, 3, 0, 20, 0, (0.5,)) == [0, 1, 5, 13, 20]


def test_buckets_follow_the_context() -> None:
    table = CostTable.from_buckets([(100, [(8, 1.0), (64, 2.0)]), (None, [(16, 1.0), (64, 2.0)])], mode="staircase")
    assert buckets(table, 4, 100, 20, 0, ()) == [0, 4, 20]
    assert buckets(table, 4, 101, 20, 0, ()) == [0, 12, 20]


def test_buckets_of_a_slope_are_shares() -> None:
    assert buckets(SLOPE, 4, 0, 20, 3, (0.1, 0.25, 0.5, 1.0)) == [3, 5, 10, 20]


def test_a_staircase_is_filled_to_an_edge() -> None:
    made = make()
    for _ in range(3):
        plan = made.plan(make_input([[0.9] * 4] * 4), STAIRS)
    assert 4 + int(plan.verify_lens.sum()) in (8, 16, 20)
    assert plan.verify_lens.sum() < 16


def test_the_budget_is_history_s_and_the_choice_is_the_round_s() -> None:
    """Whatever this round's confidences are, as many tokens are verified; the likeliest."""
    histories = ([[0.95] * 4] * 4, [[0.95] * 4] * 2 + [[0.05] * 4] * 2, [[0.3] * 4] * 4)
    budgets = []
    for history in histories:
        sizes = set()
        for now in ([[0.9] * 4] * 4, [[0.2, 0.9, 0.9, 0.9], [0.99] * 4, [0.5] * 4, [0.6] * 4]):
            made = make(min_depth=0)
            made.plan(make_input(history), SLOPE)
            plan = made.plan(make_input(now), SLOPE)
            sizes.add(int(plan.verify_lens.sum()))
        assert len(sizes) == 1
        budgets.append(sizes.pop())
    assert budgets[0] > budgets[1] > budgets[2]


def test_the_likeliest_are_admitted_after_the_floor() -> None:
    batch = make_input([[0.9, 0.9, 0.9], [0.5, 0.5, 0.5], [0.95, 0.1, 0.9]])
    assert admit(batch, 3, 1).tolist() == [1, 1, 1]
    assert admit(batch, 5, 1).tolist() == [3, 1, 1]
    assert admit(batch, 3, 0).tolist() == [2, 0, 1]
    assert admit(batch, 2, 1).tolist() == [1, 1, 1]
    assert admit(make_input([[0.5, 0.0, 0.0]]), 3, 1).tolist() == [1]


def test_admission_is_the_best_use_of_a_budget() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        batch = make_input(rng.random((3, 3)))
        for budget in range(10):
            got = admit(batch, budget, 0)
            brought = sum(batch.survival[r, :n].sum() for r, n in enumerate(got))
            every = itertools.product(range(4), repeat=3)
            best = max(
                sum(batch.survival[r, :n].sum() for r, n in enumerate(lens)) for lens in every if sum(lens) <= budget
            )
            assert math.isclose(brought, best, abs_tol=1e-12)


def test_expected_gains_are_those_of_the_rows_seen() -> None:
    recent = Recent(2, 8, 0.8)
    recent.learn(np.array([[0.9, 0.6], [0.5, 0.1]]), np.array([2, 2]))
    counts, gains = expected_gains([(recent, np.array([2, 2, 2, 1]))], 2)
    # four first positions, half 0.9 and half 0.5; three second ones, half 0.6 and half 0.1
    assert np.allclose(counts, [2.0, 3.5, 5.5, 7.0])
    assert np.allclose(gains, np.cumsum([2 * 0.9, 1.5 * 0.6, 2 * 0.5, 1.5 * 0.1]))


def test_what_was_not_drafted_is_not_taken_for_a_rejection() -> None:
    recent = Recent(3, 4, 0.5)
    assert recent.column(1).tolist() == [0.25]
    recent.learn(np.array([[0.9, 0.0, 0.0], [0.8, 0.7, 0.0]]), np.array([1, 2]))
    assert recent.column(1).tolist() == [0.7]
    assert recent.column(2).tolist() == [0.125]
    recent.learn(np.tile([0.1, 0.1, 0.1], (6, 1)), np.full(6, 3))
    assert recent.column(0).tolist() == [0.1] * 4


def test_groups_of_rows_have_histories_of_their_own() -> None:
    made = make(min_depth=0)
    groups = np.array([0, 0, 1, 1])
    for _ in range(3):
        made.plan(make_input([[0.99] * 4] * 2 + [[0.05] * 4] * 2, groups=groups), SLOPE)
    easy = made.plan(make_input([[0.5] * 4] * 2, groups=np.array([0, 0])), SLOPE)
    hard = made.plan(make_input([[0.5] * 4] * 2, groups=np.array([1, 1])), SLOPE)
    assert easy.verify_lens.sum() > hard.verify_lens.sum()


def test_without_a_cost_table_a_share_is_verified() -> None:
    plan = make().plan(make_input([[0.9] * 4, [0.2] * 4]), None)
    assert plan.verify_lens.tolist() == [4, 2]
    assert math.isnan(plan.throughput)
    assert plan.stop_reason == "dcut-ratio"
    assert make(ratio=1.0).plan(make_input([[0.9] * 4]), None).stop_reason == "all-admitted"


def test_it_beats_a_fixed_length_where_rows_differ() -> None:
    """Expected Theta over random mixed batches on a staircase, against every fixed length."""
    rng = np.random.default_rng(3)
    made, totals = make(), np.zeros(6)
    table = CostTable([(n, 1.0 + 0.04 * n) for n in range(8, 65, 8)], mode="staircase")
    for _ in range(60):
        level = rng.choice([0.25, 0.95], size=(8, 1))
        batch = make_input(np.clip(level + rng.normal(0, 0.03, (8, 4)), 0.01, 0.99))
        plans = [made.plan(batch, table).verify_lens, *(np.full(8, length) for length in range(5))]
        for i, lens in enumerate(plans):
            tau = 8 + sum(batch.survival[r, :n].sum() for r, n in enumerate(lens))
            totals[i] += table.throughput(float(tau), 8 + int(lens.sum()), 8, 4)
    assert totals[0] > 1.02 * totals[1:].max()


def test_settings_of_a_wrong_kind_are_named() -> None:
    with pytest.raises(ValueError, match="ratios"):
        DCutConfig(ratios="0.5")  # type: ignore[arg-type]
