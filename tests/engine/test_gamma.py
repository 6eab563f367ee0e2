"""The choice of gamma in the engine: guard, gamma, early exit, probes, faults. Time is what a synthetic table says."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from dspark._sched import CostTable
from dspark.capabilities import GammaCapabilities
from dspark.config import SamplingParams
from dspark.errors import ConfigError, DSparkWarning
from dspark.scheduling._guard import Probes, Regime
from dspark.scheduling.gamma_adaptive import AdaptiveConfig
from dspark.scheduling.gamma_static import StaticGamma
from dspark.testing import TableEstimator
from dspark.testing.cheats import LengthTable
from dspark.types import GammaChoice, GammaInput
from tests.engine.adaptive import CPU, STEEP, Timed, V, make, step, submit
from tests.exactness.harness import build, decode

RECOVERY = 150
"""Rounds in which a swapped drafter is found out, either way, at one request."""


@pytest.mark.parametrize(("rows", "rounds"), [(1, 400), (6, 200)])
def test_a_useless_drafter_and_a_good_one_swapped_in_mid_run(rows: int, rounds: int) -> None:
    timed = Timed(CPU)
    made = make(0.75, slots=rows, observers=[timed])
    submit(made, rows)
    step(made, 100)
    timed.reset()
    step(made, 100)
    good = timed.speed
    assert good > 1.2
    drafter: Any = made.parts.drafter
    for useless in (0.0, 0.03):
        drafter.rate = useless
        timed.reset()
        reasons = step(made, rounds)
        assert "drafting" not in reasons[RECOVERY:], "the guard was to notice"
        assert timed.speed >= 0.97
        assert "probe" in reasons[RECOVERY:], "plain phases look for something better now and then"
        drafter.rate = 0.75
        timed.reset()
        reasons = step(made, rounds)
        first = reasons.index("drafting")
        assert first <= RECOVERY
        assert set(reasons[first + 20 :]) == {"drafting"}
        timed.reset()
        step(made, 100)
        assert timed.speed - 1.0 >= 0.9 * (good - 1.0), "the good drafter's gain is back"


def test_what_was_held_back_is_counted_and_plain_rounds_are_plain() -> None:
    made = make(0.0)
    submit(made)
    step(made, 300)
    stats, target = made.stats, made.parts.target
    plain = stats.gammas[0]
    assert plain == stats.gamma_reasons["guard"] > 250
    assert target.executed.count(1) >= plain, "a plain round executes the anchor alone"
    assert len(made.parts.drafter.gammas) == stats.steps - plain, "and does not call the drafter"
    assert stats.buffered_tokens == plain
    assert stats.row_reasons["guard"] == plain
    shown = stats.as_dict()
    assert shown["gamma_reasons"]["probe"] == stats.gamma_reasons["probe"] > 0
    assert shown["gammas"]["0"] == plain
    drafted = shown["gain"]["steps"] + stats.gamma_reasons["probe"]
    assert drafted == len(made.parts.drafter.gammas) - 1, "the step that reads the prompt is no measure of gain"


def test_case_28_where_nothing_pays_nothing_is_drafted() -> None:
    timed = Timed(STEEP)
    made = make(1.0, cost=STEEP, observers=[timed])
    submit(made)
    reasons = step(made, 400)
    assert "drafting" not in reasons
    assert timed.speed >= 0.97
    assert made.stats.gains.steps == 0


def gain_table(gain: float) -> CostTable:
    """Two tokens for the price of which one draft that is always accepted gains so much."""
    return CostTable([(1, 1.0), (2, 2.0 / (1.0 + gain)), (3, 30.0)], noise=0.0)


def rates_of_one(made: Any, rounds: int) -> list[str]:
    submit(made)
    return step(made, rounds)


def test_case_23_a_gain_of_one_percent_is_not_taken_and_the_threshold_is_a_setting() -> None:
    settings = {"gamma": 1, "prior_mean": 1.0, "estimator": TableEstimator([[0.99] * V])}
    assert set(rates_of_one(make(1.0, cost=gain_table(0.01), **settings), 60)) <= {"guard", "probe"}
    assert set(rates_of_one(make(1.0, cost=gain_table(0.05), **settings), 60)) == {"drafting"}
    low = make(1.0, cost=gain_table(0.01), threshold=0.005, **settings)
    assert set(rates_of_one(low, 60)) == {"drafting"}


def test_case_23_no_flapping_where_the_gain_hovers_at_the_threshold() -> None:
    rng = np.random.default_rng(2)
    regime, bare = Regime(), Regime()
    gains = 0.04 + rng.normal(0.0, 0.006, size=2000)
    on = [regime.decide(float(g), 0.04, 0.03) for g in gains]
    flapping = [bare.decide(float(g), 0.04, 0.0) for g in gains]
    assert int(np.abs(np.diff(np.array(on, dtype=int))).sum()) <= 2
    assert int(np.abs(np.diff(np.array(flapping, dtype=int))).sum()) > 500, "without hysteresis it would"


def test_case_23_no_flapping_in_the_engine() -> None:
    made = make(0.8, cost=gain_table(0.18), gamma=1)  # at rate .8: 1.8 / (2 / 1.18) = 1.06, hovering
    reasons = [r for r in rates_of_one(made, 500) if r != "probe"]
    assert sum(a != b for a, b in itertools.pairwise(reasons)) <= 8


def test_probing_spends_its_share_whatever_happens() -> None:
    for surprised in (False, True):
        probes = Probes(0.01, 8)
        due = [probes.due(1.0, 0.5, surprised) for _ in range(4000)]
        assert 0.5 * sum(due) <= 0.011 * due.count(False) + 4.0
        assert any(due[-600:]), "it goes on for ever"
    rows = Probes(0.01, 3)
    due = [rows.due(1.0, 0.5, True) for _ in range(300)]
    longest = max(len(run) for run in "".join("x" if d else " " for d in due).split())
    assert longest == 3


def hard(anchor: int) -> float:
    return 0.97 if anchor % 2 else 0.02


@pytest.mark.parametrize("rows", [1, 3])
def test_early_exit_by_the_anchor_beats_what_knows_averages_alone(rows: int) -> None:
    """After odd tokens drafts are right, after even ones wrong; nothing but the anchor tells."""
    speeds = {}
    for early in (True, False):
        timed = Timed(CPU)
        made = make(hard, slots=rows, observers=[timed], early_exit=early)
        submit(made, rows)
        step(made, 250)
        timed.reset()
        step(made, 250)
        speeds[early] = timed.speed
        policy = made.parts.gamma_policy
        assert policy.difficulty.trusted is early
        assert (made.stats.row_reasons["early-exit"] > 20) is early
        assert (made.stats.row_reasons["explore"] > 0) is early
    assert speeds[True] > 1.03 * speeds[False]


def test_rows_that_draft_deeper_than_pays_are_shortened_where_the_scheduler_cuts_nothing() -> None:
    timed = Timed(CPU)
    made = make(0.6, slots=6, scheduler=build("scheduling", "fixed", V, 7), observers=[timed])
    made.parts.gamma_policy._prunes = False
    submit(made, 6)
    step(made, 120)
    assert made.stats.verify_budget < 3.0
    assert timed.speed > 1.1
    static = Timed(CPU)
    fixed = make(0.6, slots=6, scheduler=build("scheduling", "fixed", V, 7), observers=[static], policy=StaticGamma())
    submit(fixed, 6)
    step(fixed, 120)
    assert static.speed < timed.speed


class ByRow:
    """A policy that asks for lengths by slot."""

    capabilities = GammaCapabilities()

    def __init__(self, lens: list[int], reason: str = "by row", verify_all: bool = False) -> None:
        self.lens, self.reason, self.verify_all = lens, reason, verify_all
        self.known: list[GammaInput] = []
        self.released: list[tuple[int, int]] = []

    def choose(self, batch: GammaInput, cost: Any) -> GammaChoice:
        self.known.append(batch)
        gammas = np.array([self.lens[view.slot] for view in batch.requests])
        return GammaChoice(gammas, self.reason, {"x": 1}, verify_all=self.verify_all)

    def observe(self, record: Any) -> None:
        pass

    def release(self, slot: int, generation: int) -> None:
        self.released.append((slot, generation))


def test_each_row_drafts_and_packs_at_most_its_own_gamma() -> None:
    policy = ByRow([2, 0, 3])
    made = make(1.0, slots=3, gamma=5, policy=policy, scheduler=build("scheduling", "fixed", V, 5))
    names = submit(made, 3, tokens=30)
    made.step()
    made.step()
    assert made.parts.drafter.gammas == [3, 3], "the block is as long as the longest"
    assert made.parts.drafter.asked == [2, 2], "who sits out costs the drafter nothing"
    assert made.parts.target.forwards[1] == [1 + 2, 1, 1 + 3]
    assert policy.known[0].gamma == 5
    assert (policy.known[1].decoding, policy.known[1].base_tokens) == (3, 3)
    assert made.stats.row_reasons["x"] == 2
    while made.has_work:
        made.step()
    assert sorted(policy.released) == [(0, 1), (1, 1), (2, 1)]
    assert len(names) == 3


def test_a_probe_is_verified_in_full_whatever_the_scheduler_says() -> None:
    for verify_all, offered in ((False, 0), (True, 2)):
        policy = ByRow([2], verify_all=verify_all)
        made = make(1.0, policy=policy, scheduler=build("scheduling", "off", V, 7))
        submit(made, tokens=20)
        made.step()
        made.step()
        assert made.parts.target.forwards[1] == [1 + offered]


def test_static_and_no_policy_give_the_same_rounds() -> None:
    runs = []
    for policy in (None, StaticGamma()):
        made = make(0.6, slots=3, policy=policy)
        params = [SamplingParams(max_tokens=40), SamplingParams(max_tokens=30, temperature=1.0, seed=3)]
        out = decode(made, [([1, 2], params[0]), ([3], params[1]), ([4, 5], params[0])])
        runs.append((out, made.parts.target.forwards, made.parts.drafter.gammas))
    assert runs[0] == runs[1]
    assert set(made.stats.gamma_reasons) == {"static"}


@pytest.mark.parametrize(
    "broken",
    [
        lambda batch: 1 / 0,
        lambda batch: GammaChoice(np.full(len(batch.requests), batch.gamma + 1), "too long"),
        lambda batch: GammaChoice(np.zeros(len(batch.requests) + 1, dtype=np.int64), "too many"),
        lambda batch: GammaChoice(np.zeros(len(batch.requests)), "no integers"),
    ],
)
def test_a_policy_that_fails_costs_nobody_anything(broken: Any) -> None:
    unasked = make(0.6, policy=None)
    wanted = decode(unasked, [([1, 2], SamplingParams(max_tokens=30))])
    policy = ByRow([1])
    made = make(0.6, policy=policy)
    policy.choose = lambda batch, cost: broken(batch)  # type: ignore[method-assign]
    with pytest.warns(DSparkWarning, match="later rounds draft a fixed gamma"):
        assert decode(made, [([1, 2], SamplingParams(max_tokens=30))]) == wanted
    assert made.parts.drafter.gammas == unasked.parts.drafter.gammas, "the fixed block is drafted, in this round too"
    assert made.parts.target.forwards == unasked.parts.target.forwards
    assert made.stats.faults == {"gamma_policy:choose": 1}
    assert made.parts.gamma_policy is None
    assert made.stats.unproven_rounds == 0


def test_a_policy_that_fails_to_learn_is_no_longer_used() -> None:
    policy = ByRow([1])
    policy.observe = lambda record: 1 / 0  # type: ignore[method-assign]
    made = make(0.6, policy=policy)
    with pytest.warns(DSparkWarning, match="no longer used"):
        decode(made, [([1, 2], SamplingParams(max_tokens=10))])
    assert made.parts.gamma_policy is None


def test_a_drafter_that_is_never_accepted_is_said_though_the_guard_holds_it_back() -> None:
    made = make(0.0)
    submit(made)
    with pytest.warns(DSparkWarning, match=r"no draft accepted in \d+ rounds of drafter \(and \d+ more were plain"):
        step(made, 80)


def test_without_a_cost_table_all_of_gamma_is_drafted_and_said() -> None:
    made = make(0.6, cost=None, scheduler=build("scheduling", "fixed", V, 7))  # type: ignore[arg-type]
    submit(made)
    with pytest.warns(DSparkWarning, match="gamma-not-chosen"):
        step(made, 5)
    assert set(made.stats.gamma_reasons) == {"no-cost-table"}
    assert set(made.parts.drafter.gammas) == {7}


def test_entropies_are_those_of_the_target_and_asked_for_where_they_are_read() -> None:
    class Wants(ByRow):
        capabilities = GammaCapabilities(needs_entropy=True)

    for policy, known in ((Wants([2]), True), (ByRow([2]), False)):
        seen: list[tuple[Any, float]] = []
        made = make(0.5, policy=policy)
        policy.observe = lambda record, seen=seen: seen.extend((c, c.entropy) for c in record.committed)  # type: ignore
        submit(made, tokens=12)
        ids: list[int] = [1, 2]
        for _ in range(6):
            made.step()
            done, entropy = seen[-1]
            ids += done.new_ids
            if not known:
                assert math.isnan(entropy)
                continue
            logits = made.parts.target.next_logits(ids[:-1])
            law = torch.softmax(logits, dim=-1)
            assert entropy == pytest.approx(float(-(law * law.log()).sum()), abs=1e-9)


def test_rates_are_of_positions_up_to_the_first_rejection_and_uncensored() -> None:
    """A drafter whose drafts are right for ever but for the first rejection; a scheduler that verifies two of four."""
    confidence = TableEstimator([[0.9] * V] * 4)
    for lens, wanted in (((4,), [0.6, 0.6, 0.6, 0.6]), ((2,), [0.6, 0.6, 0.9, 0.9])):
        made = make(0.6, gamma=4, estimator=confidence, scheduler=LengthTable(lens), memory=2000.0, alarm=1e6)
        made.parts.gamma_policy.choose = lambda batch, cost: GammaChoice(np.full(len(batch.requests), 4), "all")
        submit(made)
        step(made, 500)
        found = made.parts.gamma_policy.history.rates()[0]
        assert found == pytest.approx(wanted, abs=0.09)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"threshold": -0.1}, "threshold"),
        ({"hysteresis": 2}, "hysteresis"),
        ({"probe_gamma": 0}, "probe_gamma"),
        ({"memory": 0.5}, "memory"),
        ({"alarm": math.nan}, "alarm"),
        ({"explore_every": 1.5}, "explore_every"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AdaptiveConfig(**settings)
    assert dataclasses.asdict(AdaptiveConfig())["threshold"] == 0.04
