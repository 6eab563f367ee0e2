"""The schedulers through the binding: what they decide, what they refuse, what they keep."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from dspark._sched import CostTable
from dspark.errors import ConfigError
from dspark.protocols import VerifyScheduler
from dspark.testing.cheats import RetreatingLookahead, Retrospective, VetoingGuard

from .support import HONEST, MODULES, NEED_COST, batch, confidences, jagged, make, theta

APPENDIX = CostTable.from_sps([(1, 1.0), (2, 0.5), (3, 0.45)])


def seasoned(name: str, seed: int, rows: int, gamma: int) -> Any:
    """A scheduler with two rounds of history; the same for the same seed."""
    made = make(name)
    rng = np.random.default_rng(seed)
    for _ in range(2):
        made.plan(batch(confidences(rng, rows, gamma)), jagged(rng))
    return made


def violations(plan: Any, trials: int, seed: int = 5) -> int:
    """How often lengths change with what lies beyond l_r + 1 (METHOD section 4, rule 1)."""
    rng = np.random.default_rng(seed)
    broken = 0
    for trial in range(trials):
        rows, gamma = int(rng.integers(1, 5)), int(rng.integers(1, 6))
        c, cost, extra = confidences(rng, rows, gamma), jagged(rng), int(rng.integers(0, 3))
        most = rng.integers(0, gamma + 1, rows) if rng.random() < 0.3 else np.full(rows, gamma)
        lens = plan(trial, batch(c, max_lens=most, base=rows + extra), cost)
        assert ((lens >= 0) & (lens <= most)).all()
        beyond = np.arange(gamma)[None, :] > lens[:, None]
        for fill in (0.0, 1.0, rng.random(c.shape)):
            other = batch(np.where(beyond, fill, c), max_lens=most, base=rows + extra)
            if (plan(trial, other, cost) != lens).any():
                broken += 1
                break
    return broken


@pytest.mark.parametrize("name", HONEST)
def test_what_ships_does_not_anticipate(name: str) -> None:
    def plan(trial: int, given: Any, cost: CostTable) -> Any:
        return seasoned(name, trial, *given.probs.shape).plan(given, cost).verify_lens

    assert violations(plan, 400) == 0


@pytest.mark.parametrize("cheat", ["global", "retrospective", "retreating", "veto"])
def test_the_property_catches_cheats(cheat: str) -> None:
    def plan(trial: int, given: Any, cost: CostTable) -> Any:
        seconds = cost.verify_seconds
        if cheat == "global":
            return make("global_").plan(given, cost).verify_lens
        if cheat == "retrospective":
            return Retrospective(seconds).plan(given).verify_lens
        if cheat == "retreating":
            return RetreatingLookahead(seconds, [0.9] * given.gamma).plan(given).verify_lens
        return VetoingGuard(make("lookahead", prior=0.9), seconds, 1.04).plan(given, cost).verify_lens

    assert violations(plan, 1500) > 0


@pytest.mark.parametrize("name", MODULES)
def test_protocol_and_capabilities(name: str) -> None:
    made = make(name)
    assert isinstance(made, VerifyScheduler)
    assert made.capabilities.anticipates == (name == "global_")
    assert made.capabilities.needs_cost == (name in NEED_COST)


@pytest.mark.parametrize("name", NEED_COST)
def test_without_a_cost_table_every_draft_is_verified_and_said(name: str) -> None:
    plan = make(name).plan(batch([[0.5, 0.5, 0.5], [0.9, 0.9, 0.9]], max_lens=[2, 3]), None)
    assert plan.verify_lens.tolist() == [2, 3]
    assert plan.stop_reason == "no-cost-table"
    assert plan.expected_accepts == pytest.approx(2 + 0.75 + 0.9 + 0.81 + 0.729)
    assert np.isnan(plan.throughput)


@pytest.mark.parametrize("name", NEED_COST)
def test_a_flat_table_is_a_named_state(name: str) -> None:
    flat = CostTable([(1, 0.1), (64, 0.101)])
    plan = make(name).plan(batch([[0.5, 0.25]]), flat)
    assert plan.stop_reason == "flat-cost"
    assert plan.verify_lens.tolist() == [2]


@pytest.mark.parametrize("c2", [0.9, 0.0])
def test_appendix_a(c2: float) -> None:
    given = batch([[0.8, c2]])
    assert make("causal").plan(given, APPENDIX).verify_lens.tolist() == [0]
    lookahead = make("lookahead")
    lookahead.seed_averages([0.8, 0.9], weight=1e6)
    assert lookahead.plan(given, APPENDIX).verify_lens.tolist() == [2 if c2 else 1]
    assert make("global_").plan(given, APPENDIX).verify_lens.tolist() == [2 if c2 else 0]


def test_plans_tell_what_they_expect() -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        given, cost = batch(confidences(rng, 3, 4), base=5), jagged(rng)
        for name in MODULES:
            plan = make(name).plan(given, cost)
            assert plan.throughput == pytest.approx(theta(given, plan.verify_lens, cost))
            tau = 3 + sum(given.survival[r, :n].sum() for r, n in enumerate(plan.verify_lens))
            assert plan.expected_accepts == pytest.approx(tau)


def test_global_is_the_optimum_of_all_lengths() -> None:
    rng = np.random.default_rng(4)
    for _ in range(60):
        given, cost = batch(np.clip(confidences(rng, 3, 3), 0.01, 1.0)), jagged(rng)
        best = max(theta(given, lens, cost) for lens in product(range(4), repeat=3))
        assert make("global_").plan(given, cost).throughput == pytest.approx(best)


def test_ties_go_by_position_then_row() -> None:
    given = batch([[0.5, 1.0], [0.5, 1.0], [0.5, 1.0]])
    for room, lens in ((1, [1, 0, 0]), (3, [1, 1, 1]), (4, [2, 1, 1]), (6, [2, 2, 2])):
        wall = CostTable([(3 + room, 1.0), (4 + room, 1e6)], mode="staircase")
        assert make("causal").plan(given, wall).verify_lens.tolist() == lens


def test_threshold_and_fixed() -> None:
    given = batch([[0.9, 0.6, 0.9], [0.5, 0.4, 0.9], [0.9, 0.9, 0.9]], max_lens=[3, 3, 1])
    assert make("threshold", threshold=0.5).plan(given, None).verify_lens.tolist() == [3, 1, 1]
    assert make("threshold", threshold=0.0).plan(given, None).verify_lens.tolist() == [3, 3, 1]
    assert make("threshold", threshold=1.0).plan(given, None).verify_lens.tolist() == [0, 0, 0]
    assert make("fixed").plan(given, None).verify_lens.tolist() == [3, 3, 1]
    assert make("fixed", length=2).plan(given, None).verify_lens.tolist() == [2, 2, 1]
    assert make("off").plan(given, None).verify_lens.tolist() == [0, 0, 0]


def test_lagged_forgets_released_requests_and_new_generations() -> None:
    steep = CostTable([(1, 1.0), (101, 21.0)])
    made = make("lagged", prior=0.0)
    made.seed_history(0, 1, [0.9, 0.8])
    made.seed_history(1, 1, [0.9, 0.8])
    # Slot 0's history calls for its two drafts; slot 1 has been given to a second request, without history.
    given = batch([[0.9, 0.9], [0.5, 0.5]], generations=np.array([1, 2]))
    assert made.plan(given, steep).verify_lens.sum() == 2
    assert len(made) == 2
    made.release(0, 2)
    assert len(made) == 2
    made.release(0, 1)
    made.release(1, 2)
    assert len(made) == 0


def test_averages_are_kept_by_group_and_learn_after_the_plan() -> None:
    made = make("lookahead", prior=0.6)
    assert made.averages(2) == [0.6, 0.6]
    steep = CostTable([(1, 1.0), (101, 2001.0)])
    made.plan(batch([[0.5, 0.4], [1.0, 0.8]], groups=np.array([0, 7])), steep)
    assert made.averages(2, group=0) == pytest.approx([0.5, 0.4])
    assert made.averages(2, group=7) == pytest.approx([1.0, 0.8])
    made.plan(batch([[0.7, 0.1]], max_lens=[1]), steep)
    assert made.averages(2, group=0) == pytest.approx([0.6, 0.4])  # the second position was not drafted


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("threshold", {"threshold": 1.5}),
        ("threshold", {"threshold": float("nan")}),
        ("threshold", {"threshold": "0.5"}),
        ("fixed", {"length": -1}),
        ("fixed", {"length": True}),
        ("lookahead", {"prior": -0.1}),
        ("lagged", {"prior": 2}),
        ("causal", {"threshold": 0.5}),
    ],
)
def test_settings_are_checked(name: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        make(name, **settings)
