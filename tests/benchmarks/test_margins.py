"""What benchmarks.margins calls rounding, and what it must not."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.margins import BOUND, Reference, decided, filtered, margin
from dspark.config import SamplingParams
from dspark.ops import noise

GREEDY = SamplingParams()


def noise_at(seed: int, position: int, width: int) -> torch.Tensor:
    return noise.gumbel(np.array([seed], dtype=np.uint64), np.array([position], dtype=np.int64), width)[0].double()


def test_greedy_margin_is_the_distance_to_the_best_logit() -> None:
    logits = torch.tensor([1.0, 3.0, 2.5])
    assert margin(logits, [0], 1, GREEDY) == 0.0
    assert margin(logits, [0], 2, GREEDY) == pytest.approx(0.5)


def test_repetition_penalty_counts_the_history() -> None:
    logits = torch.tensor([1.0, 3.0, 2.5])
    params = SamplingParams(repetition_penalty=2.0)
    assert decided(logits, [1], params) == 2
    assert margin(logits, [1], 1, params) == pytest.approx(1.0)


def test_seeded_margin_weighs_noise_by_temperature() -> None:
    logits = torch.tensor([0.0, 0.1, -0.2, 0.3])
    params = SamplingParams(temperature=0.5, seed=11)
    total = logits.double() + 0.5 * noise_at(11, 3, 4)
    best = int(total.argmax())
    assert decided(logits, [0, 1, 2], params) == best
    for token in range(4):
        assert margin(logits, [0, 1, 2], token, params) == pytest.approx(float(total[best] - total[token]))


@pytest.mark.parametrize(
    ("params", "kept", "distance"),
    [
        ({"top_k": 2}, [True, True, False, False], [2.0, 1.0, 1.0, 2.0]),
        ({"top_k": 2, "temperature": 0.5}, [True, True, False, False], [2.0, 1.0, 1.0, 2.0]),
    ],
)
def test_top_k_boundary_in_logits(params: dict[str, Any], kept: list[bool], distance: list[float]) -> None:
    settings = SamplingParams(**{"temperature": 1.0, "seed": 0, **params})
    scores = torch.tensor([3.0, 2.0, 1.0, 0.0], dtype=torch.float64) / settings.temperature
    inside, far = filtered(scores, settings)
    assert inside.tolist() == kept
    assert far.tolist() == pytest.approx(distance)


def test_top_p_and_min_p_boundaries_in_probability() -> None:
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    inside, far = filtered(probs.log(), SamplingParams(temperature=1.0, seed=0, top_p=0.9))
    assert inside.tolist() == [True, True, True, False]
    assert far.tolist() == pytest.approx([math.inf, 0.4, 0.1, 0.05])
    inside, far = filtered(probs.log(), SamplingParams(temperature=1.0, seed=0, min_p=0.4))
    assert inside.tolist() == [True, True, False, False]
    assert far.tolist() == pytest.approx([math.inf, 0.1, 0.05, 0.15])


def test_removed_token_has_the_margin_of_its_boundary() -> None:
    """A token just outside top-k that would win by its noise differs by rounding; one far outside does not."""
    params = SamplingParams(temperature=1.0, seed=5, top_k=2)
    g = noise_at(5, 1, 4)
    winner = int(g.argmax())
    near, far = torch.zeros(4), torch.zeros(4)
    others = [i for i in range(4) if i != winner]
    near[others[:2]], near[others[2]], near[winner] = 1e-3, -9.0, 1e-3 - 1e-5
    far[others[:2]], far[others[2]], far[winner] = 1e-3, -9.0, -0.2
    assert margin(near, [0], winner, params) == pytest.approx(1e-5, rel=0.05)
    assert margin(far, [0], winner, params) == pytest.approx(0.201, rel=0.05)
    assert decided(near, [0], params) != winner


def test_nominal_winner_that_may_leave_is_no_obstacle() -> None:
    """The next-best token is decided for as soon as a winner just inside top-k leaves."""
    params = SamplingParams(temperature=1.0, seed=5, top_k=2)
    g = noise_at(5, 1, 4)
    order = g.argsort(descending=True).tolist()
    winner, second, third = order[0], order[1], order[2]
    logits = torch.full((4,), -9.0)
    logits[second], logits[winner], logits[third] = 0.0, -0.1, -0.1 - 1e-5
    assert decided(logits, [0], params) == winner
    assert margin(logits, [0], second, params) == pytest.approx(1e-5, rel=0.05)


@pytest.fixture
def reference(tiny_model: Any) -> Reference:
    return Reference(tiny_model)


def test_equal_outputs_are_no_finding(reference: Reference) -> None:
    prompt = [5, 9, 11]
    expected = reference.generate(prompt, 6)
    assert reference.compare(prompt, expected, list(expected), GREEDY) is None
    assert reference.margins(prompt, expected, GREEDY) == pytest.approx([0.0] * len(expected), abs=1e-6)


def test_wrong_token_is_a_fault(reference: Reference) -> None:
    prompt = [5, 9, 11]
    expected = reference.generate(prompt, 6)
    got = [*expected[:2], (expected[2] + 1) % 300, *expected[3:]]
    found = reference.compare(prompt, expected, got, GREEDY)
    assert found is not None
    assert (found.position, found.rounding) == (2, False)
    assert found.margin > BOUND


def test_output_that_ends_early_is_a_fault(reference: Reference) -> None:
    prompt = [5, 9, 11]
    expected = reference.generate(prompt, 6)
    found = reference.compare(prompt, expected, expected[:-1], GREEDY)
    assert found is not None
    assert found.margin == math.inf
    assert found.as_dict()["verdict"] == "FAULT"
    assert found.as_dict()["margin"] is None


def test_a_tie_excuses_its_own_token_alone(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a tie, what follows must still be what the model decides."""
    prompt = [5, 9, 11]
    expected = reference.generate(prompt, 4)
    other = (expected[1] + 1) % 300
    real = reference.logits

    def tied(ids: Any, first: int) -> torch.Tensor:
        rows = real(ids, first).clone()
        at = len(prompt) - first  # the row after prompt and one token
        if 0 <= at < len(rows):
            rows[at, other] = rows[at, expected[1]] - 1e-6
        return rows

    follow = [*expected[:1], other]
    ids = [*prompt, *follow]
    for _ in range(2):
        ids.append(int(real(ids, len(ids) - 1)[0].argmax()))
    monkeypatch.setattr(reference, "logits", tied)
    found = reference.compare(prompt, expected, ids[len(prompt) :], GREEDY)
    assert found is not None
    assert found.rounding
    assert 0 < found.margin < BOUND
    wrong = [*ids[len(prompt) : -1], (ids[-1] + 1) % 300]
    found = reference.compare(prompt, expected, wrong, GREEDY)
    assert found is not None
    assert found.margin < BOUND < found.after
    assert not found.rounding
