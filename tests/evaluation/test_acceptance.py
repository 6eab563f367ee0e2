"""Accepted lengths with bootstrap intervals, counts by position, and the threshold sweep, on hand-made rounds."""

from __future__ import annotations

import numpy as np
import pytest

from dspark.errors import EvaluationError
from dspark.evaluation.acceptance import (
    Bootstrap,
    Estimate,
    Positions,
    accepted_lengths,
    gain,
    threshold_sweep,
)
from dspark.evaluation.rounds import Rounds


def rounds(accepted: list[int], gamma: int = 3, offered: list[int] | None = None, c: float = 0.5) -> Rounds:
    counts = np.array(accepted, dtype=np.int64)
    given = np.full(len(counts), gamma) if offered is None else np.array(offered, dtype=np.int64)
    return Rounds(np.full((len(counts), gamma), c), given, counts, counts + 1)


def test_accepted_length_is_the_mean_over_rounds() -> None:
    """Case 17: rounds that accept (3, 1) and (2, 0) commit 4, 2, 3 and 1 tokens: 2.5, not a product of rates."""
    data = {"a": [rounds([3, 1]), rounds([2, 0])], "b": [rounds([0]), rounds([0, 0, 0])]}
    found = accepted_lengths(data, Bootstrap(200))
    assert found["a"].value == 2.5
    assert found["b"].as_list() == [1.0, 1.0, 1.0]
    assert found["macro"].value == 1.75
    for name in ("a", "macro"):
        assert found[name].low <= found[name].value <= found[name].high
    assert found["a"].low == 2.0, "a prompt with fewer tokens a round, drawn twice"
    assert found["a"].high == 3.0


def test_prompts_are_drawn_not_rounds() -> None:
    """One prompt of many rounds and many of one round: weights follow rounds, draws follow prompts."""
    long, short = rounds([3] * 100), rounds([0])
    found = accepted_lengths({"a": [long, *[short] * 9]}, Bootstrap(4000))["a"]
    assert found.value == pytest.approx((400 + 9) / 109)
    without = float((found.replicates == 1.0).mean())
    assert without == pytest.approx(0.9**10, abs=0.03), "replicates that miss the long prompt"


def test_intervals_hold_the_truth() -> None:
    """Coverage of the 95 % interval for prompts whose acceptance differs."""
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        rates = rng.beta(4, 2, size=60)
        data = [rounds(rng.binomial(1, np.full(20, r)).tolist(), gamma=1) for r in rates]
        found = accepted_lengths({"a": data}, Bootstrap(400, seed=trial))["a"]
        hits += found.low <= 1 + 4 / 6 <= found.high
    assert 0.89 <= hits / 200 <= 0.99


def test_replicates_are_shared_between_drafters_and_repeat() -> None:
    """A drafter that does one token better everywhere gains without any doubt."""
    data = [rounds([i % 3, (i * 7) % 3]) for i in range(30)]
    better = [Rounds(r.probs, r.offered, r.accepted, 2 * r.committed) for r in data]
    bootstrap = Bootstrap(500, seed=4)
    one, two = (accepted_lengths({"a": d}, bootstrap)["a"] for d in (data, better))
    assert gain(two, one).as_list() == pytest.approx([1.0, 1.0, 1.0])
    assert one.high - one.low > 0.1
    again = accepted_lengths({"a": data}, Bootstrap(500, seed=4))["a"]
    assert np.array_equal(one.replicates, again.replicates)
    other = accepted_lengths({"a": data}, Bootstrap(500, seed=5))["a"]
    assert not np.array_equal(one.replicates, other.replicates)
    apart = bootstrap.counts("a", 30), bootstrap.counts("b", 30)
    assert not np.array_equal(*apart), "data sets are drawn independently"


def test_a_gain_is_relative() -> None:
    own = Estimate(3.0, 0, 0, np.array([3.0, 2.0]))
    base = Estimate(2.0, 0, 0, np.array([2.0, 2.0]))
    assert gain(own, base).value == 0.5
    assert gain(own, base).replicates.tolist() == [0.5, 0.0]


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(EvaluationError, match="at least 1 replicate"):
        Bootstrap(0)
    for data in ({}, {"macro": [rounds([1])]}):
        with pytest.raises(EvaluationError, match="'macro'"):
            accepted_lengths(data, Bootstrap(10))


def test_positions_divide_by_what_was_offered() -> None:
    """Case 18: widths 1, 3 and 5; case 16: (1, 0, 1) has accepted one."""
    r = rounds([1, 1, 3, 0], gamma=5, offered=[1, 3, 5, 0])
    counted = Positions.of(r).as_dict()
    assert counted["offered"] == [3, 2, 2, 1, 1]
    assert counted["accepted"] == [3, 1, 1, 0, 0]
    assert counted["reached"] == [3, 2, 1, 1, 0]
    assert counted["acceptance"] == [1.0, 0.5, 0.5, 0.0, 0.0]
    assert counted["conditional_acceptance"] == [1.0, 0.5, 1.0, 0.0, None]


def test_thresholds_cut_before_the_first_low_score() -> None:
    probs = np.array([[0.9, 0.4, 0.9], [0.7, 0.6, 0.1], [0.2, 0.9, 0.9], [0.0, 0.0, 0.0]])
    r = Rounds(probs, np.array([3, 2, 3, 0]), np.array([3, 1, 0, 0]), np.array([4, 2, 1, 1]))
    at = {row["threshold"]: row for row in threshold_sweep(r, (0.0, 0.5, 0.8, 1.0))}
    assert at[0.0] == {"threshold": 0.0, "verified": 2.0, "acceptance": 0.5, "accepted_length": 2.0}
    assert at[0.5] == {"threshold": 0.5, "verified": 0.75, "acceptance": 2 / 3, "accepted_length": 1.5}
    assert at[0.8] == {"threshold": 0.8, "verified": 0.25, "acceptance": 1.0, "accepted_length": 1.25}
    assert at[1.0] == {"threshold": 1.0, "verified": 0.0, "acceptance": None, "accepted_length": 1.0}


def test_the_sweep_cuts_as_the_scheduler_does() -> None:
    """Against ``threshold`` of the Rust schedulers, row by row."""
    from dspark._sched import plan_threshold

    rng = np.random.default_rng(1)
    probs = rng.random((50, 4))
    r = Rounds(probs, np.full(50, 4), np.zeros(50, dtype=np.int64), np.ones(50, dtype=np.int64))
    for row in threshold_sweep(r):
        out = np.zeros(50, dtype=np.int64)
        survival = np.cumprod(probs, axis=1)
        plan_threshold(probs, survival, r.offered, out, float(row["threshold"] or 0.0), 50)
        assert row["verified"] == pytest.approx(out.mean())
