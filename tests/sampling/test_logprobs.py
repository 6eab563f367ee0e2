"""Log-probabilities of chosen and most likely tokens."""

import math

import pytest
import torch

from dspark.sampling.logprobs import token_logprobs


def test_values_ids_and_order():
    law = torch.tensor([[0.1, 0.4, 0.4, 0.1], [0.7, 0.1, 0.1, 0.1]], dtype=torch.float64)
    first, second = token_logprobs(law.log() + 5.0, [3, 0], 3)
    assert first.token_id == 3
    assert first.logprob == pytest.approx(math.log(0.1))
    assert [i for i, _ in first.top] == [1, 2, 0]
    assert [v for _, v in first.top] == pytest.approx([math.log(0.4)] * 2 + [math.log(0.1)])
    assert second.top[0] == (0, pytest.approx(math.log(0.7)))


def test_ends_of_the_range():
    scores = torch.tensor([[0.0, -math.inf, 1.0]])
    (none,) = token_logprobs(scores, [2], 0)
    assert none.top == ()
    (everything,) = token_logprobs(scores, [1], 10)
    assert everything.logprob == -math.inf
    assert len(everything.top) == 3
    assert token_logprobs(scores, [], 3) == []


def test_bf16_scores_are_raised_first():
    scores = torch.randn(1, 100, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    (got,) = token_logprobs(scores, [5], 1)
    assert got.logprob == pytest.approx(torch.log_softmax(scores.double(), -1)[0, 5].item(), abs=1e-6)
