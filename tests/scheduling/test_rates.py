"""What gamma is chosen from: averages by position, changes of acceptance, difficulty, and what rounds are worth."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from dspark._sched import CostTable
from dspark.config import SamplingParams
from dspark.scheduling._difficulty import Difficulty, Signals
from dspark.scheduling._gain import Outlook
from dspark.scheduling._guard import Correction, Regime
from dspark.scheduling._rates import Rates
from dspark.tokens import TokenView
from dspark.types import GammaInput, Mode, RequestView


def outcome(rng: np.random.Generator, rates: list[float]) -> tuple[np.ndarray, np.ndarray, tuple[float, float]]:
    """One row's outcomes up to the first rejection."""
    seen, won = np.zeros(len(rates)), np.zeros(len(rates))
    for k, rate in enumerate(rates):
        seen[k] = 1.0
        if rng.random() >= rate:
            break
        won[k] = 1.0
    return seen, won, (1.0, won[0])


def learned(rates: list[float], rounds: int, **settings: float) -> Rates:
    made = Rates(len(rates), (0.7, 4.0), settings.get("memory", 256.0), settings.get("alarm", 7.0))
    rng = np.random.default_rng(4)
    for _ in range(rounds):
        made.add(len(rates), *outcome(rng, rates))
    return made


def test_conditional_rates_by_position_are_recovered() -> None:
    found = learned([0.8, 0.5, 0.9], 1500, memory=2000.0)(3)
    assert found == pytest.approx([0.8, 0.5, 0.9], abs=0.05)


def test_positions_never_reached_follow_the_last_that_was() -> None:
    made = Rates(5, (0.7, 4.0), 256.0, 7.0)
    assert made(5) == pytest.approx([0.7] * 5)
    for _ in range(100):
        made.add(2, np.array([1.0, 0.0]), np.array([0.0, 0.0]), (1.0, 0.0))
    low = made(5)
    assert low[0] < 0.05
    assert low[1:] == pytest.approx([low[0]] * 4), "a useless drafter has no promising tail"


def test_a_gamma_of_its_own_departs_from_the_average_over_all() -> None:
    made = Rates(3, (0.7, 4.0), 1e6, 1e9)
    for _ in range(200):
        made.add(3, np.ones(3), np.ones(3), (1.0, 1.0))
        made.add(2, np.array([1.0, 0.0]), np.zeros(2), (1.0, 0.0))
    assert made(3)[0] > 0.85
    assert made(2)[0] < 0.15
    assert made(1)[0] == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize(("before", "after", "within"), [(0.75, 0.0, 14), (0.02, 0.75, 8), (0.9, 0.3, 25)])
def test_how_soon_a_change_is_found(before: float, after: float, within: int) -> None:
    delays = []
    for seed in range(20):
        made, rng = learned([before] * 3, 300), np.random.default_rng(seed)
        changes = made.changes
        rounds = 0
        while made.changes == changes and rounds < 200:
            made.add(3, *outcome(rng, [after] * 3))
            rounds += 1
        delays.append(rounds)
        assert abs(float(made(3)[0]) - after) < abs(float(made(3)[0]) - before)
    assert float(np.mean(delays)) <= within


def test_no_change_is_seen_where_there_is_none() -> None:
    assert sum(learned([rate] * 3, 2000).changes for rate in (0.05, 0.5, 0.8, 0.95)) <= 3


def test_how_many_rows_find_something_to_draft() -> None:
    made = Rates(3, (0.7, 4.0), 32.0, 7.0)
    for _ in range(200):
        made.fill(4, 1)
    assert made.filled == pytest.approx(0.25, abs=0.01)


# Difficulty -----------------------------------------------------------------------------------------------------------


def taught(kind: str, rounds: int = 600) -> tuple[Difficulty, float]:
    """A regression taught on outcomes that depend on one feature, and its later loss over the average's."""
    rng = np.random.default_rng(9)
    made = Difficulty()
    loss = base = 0.0
    for n in range(rounds):
        token, entropy, hidden = int(rng.integers(40)), float(rng.gamma(2.0)), rng.normal(size=24)
        easy = {"token": token < 20, "entropy": entropy < 1.5, "hidden": hidden[:8].sum() > 0, "nothing": True}[kind]
        rate = 0.6 if kind == "nothing" else 0.95 if easy else 0.1
        features = made.features([Signals(token, entropy, hidden)])
        p, won = float(made.predict(features)[0]), float(rng.random() < rate)
        if n >= rounds // 2:
            loss -= math.log(p if won else 1 - p)
            base -= math.log(0.525 if won else 0.475)
        made.learn(features, np.array([token]), np.array([won]))
    return made, loss / base


@pytest.mark.parametrize(("kind", "most"), [("token", 0.75), ("entropy", 0.75), ("hidden", 0.93)])
def test_difficulty_learns_from_token_entropy_and_hidden_state(kind: str, most: float) -> None:
    made, share = taught(kind)
    assert share < most
    assert made.trusted
    assert made.advantage > 0.05


def test_difficulty_that_tells_nothing_is_not_believed() -> None:
    made, _ = taught("nothing")
    assert not made.trusted
    assert made.advantage < 0.02


def test_unknown_signals_are_neither_good_nor_bad() -> None:
    made, _ = taught("entropy")
    unknown = made.predict(made.features([Signals(3, math.nan)]))
    known = [made.predict(made.features([Signals(3, e)]))[0] for e in (0.2, 4.0)]
    assert known[1] < unknown[0] < known[0]


# Expectations ---------------------------------------------------------------------------------------------------------

TABLE = CostTable([(1, 1.0), (2, 1.1), (3, 1.2), (4, 3.0), (8, 7.0)], draft=[(1, 1, 0.1), (1, 3, 0.3)], glue=0.1)


def batch(rows: int = 1, *, gamma: int = 3, base: int | None = None) -> GammaInput:
    ids = [1, 2, 3]
    views = tuple(
        RequestView(f"r{r}", r, 1, TokenView(ids, 3), 1, 2, 99, SamplingParams(), Mode.GREEDY, 0) for r in range(rows)
    )
    return GammaInput(views, gamma, rows, rows if base is None else base, 3, np.zeros(rows, dtype=np.int64))


def test_the_best_length_is_brute_force() -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        rows, gamma = int(rng.integers(1, 4)), int(rng.integers(1, 4))
        survival = np.cumprod(rng.random((rows, gamma)), axis=1)
        found = Outlook(batch(rows), TABLE).best(survival)
        best = max(
            (rows + sum(float(survival[r, :n].sum()) for r, n in enumerate(lens)))
            / (TABLE.verify_seconds(rows + sum(lens)) + 0.1 + TABLE.draft_seconds(rows, gamma))
            for lens in itertools.product(range(gamma + 1), repeat=rows)
            if sum(lens)
        )
        assert found.rate == pytest.approx(best)
        gained = rows + sum(float(survival[r, :n].sum()) for r, n in enumerate(found.lens))
        assert found.tokens == pytest.approx(gained)


def test_time_has_a_price_where_easy_and_hard_rounds_alternate() -> None:
    """A hard draft beats a plain round by itself, and still costs more than the long run brings in that time."""
    outlook = Outlook(batch(), TABLE)
    hard = np.array([[0.30, 0.1, 0.0]])
    assert outlook.best(hard).rate < outlook.plain.rate * 1.1
    easy = np.array([[0.95, 0.9, 0.0]])
    assert outlook.worth(easy, 1.6).gamma == 3
    assert outlook.worth(hard, 1.6).gamma == 0
    assert outlook.worth(hard, 0.1).gamma == 3


def test_drafting_is_paid_for_rows_that_find_nothing_too() -> None:
    survival = np.array([[0.9]])
    whole, seldom = (Outlook(batch(), TABLE, f).best(survival).seconds for f in (1.0, 0.25))
    assert seldom - whole == pytest.approx(0.3)


def test_predictions_are_corrected_by_what_came() -> None:
    made = Correction()
    assert made.factor == 1.0
    for _ in range(200):
        made.add((1.2, 1.0), (1.0, 1.0))
    assert 1.1 < made.factor < 1.2
    for _ in range(500):
        made.add((0.1, 1.0), (1.0, 1.0))
    assert made.factor == pytest.approx(1 / 1.5), "bounded"
    for _ in range(1500):
        made.fade()
    assert made.factor > 0.9, "a plain phase is not held by what came before it"
    made.clear()
    assert made.factor == 1.0


def test_the_long_run_is_never_worse_than_plain() -> None:
    regime = Regime()
    assert regime.rate(2.0) == 2.0
    regime.add(1.0, 1.0)
    assert regime.rate(2.0) == 2.0
    for _ in range(100):
        regime.add(3.0, 1.0)
    assert 2.5 < regime.rate(2.0) <= 3.0
    regime.restart(TABLE)
    assert regime.rate(2.0) == 2.0, "seconds of another table are another currency"
