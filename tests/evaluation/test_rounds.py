"""Rounds as arrays, and which steps of an engine are rounds."""

from __future__ import annotations

import numpy as np

from dspark.evaluation.rounds import Rounds


def some() -> Rounds:
    probs = np.array([[0.9, 0.8, 0.7], [0.5, 1.0, 0.0], [0.0, 0.0, 0.0], [0.6, 0.5, 0.4]])
    return Rounds(probs, np.array([3, 2, 0, 3]), np.array([1, 2, 0, 3]), np.array([2, 2, 1, 4]))


def test_masks_follow_the_counts() -> None:
    """Case 16: a draft behind the first rejection never counts."""
    rounds = some()
    assert rounds.weight.astype(int).tolist() == [[1, 1, 1], [1, 1, 0], [0, 0, 0], [1, 1, 1]]
    assert rounds.prefix.tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 0], [1, 1, 1]]
    assert len(rounds) == 4
    assert len(rounds.drafted()) == 3
    assert rounds.drafted().accepted.tolist() == [1, 2, 3]


def test_logits_are_those_of_the_probabilities() -> None:
    logits = some().logits
    np.testing.assert_allclose(1 / (1 + np.exp(-logits[0])), [0.9, 0.8, 0.7])
    assert logits[1].tolist() == [0.0, np.inf, -np.inf]


def test_concat_keeps_order_and_width() -> None:
    rounds = some()
    twice = Rounds.concat([rounds, rounds.take(np.array([0]))], 3)
    assert twice.offered.tolist() == [3, 2, 0, 3, 3]
    assert len(Rounds.concat([], 5)) == 0
    assert Rounds.concat([], 5).gamma == 5
