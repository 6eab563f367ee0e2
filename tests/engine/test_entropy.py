"""Entropies that the gamma policy reads: of the law that each token was decided from."""

from __future__ import annotations

import math

import pytest
import torch

from dspark.engine.verification import entropy


@pytest.mark.parametrize("shape", [(1, 7), (5, 64), (3, 1000)])
def test_it_is_the_entropy_of_the_softmax_row_by_row(shape: tuple[int, int]) -> None:
    scores = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 4
    wanted = torch.distributions.Categorical(logits=scores).entropy()
    torch.testing.assert_close(entropy(scores), wanted)
    torch.testing.assert_close(torch.stack([entropy(row) for row in scores]), wanted)


def test_masked_tokens_weigh_nothing() -> None:
    scores = torch.full((2, 8), -math.inf)
    scores[0, 3] = 1e4
    scores[1, :2] = -1e4
    assert entropy(scores).tolist() == pytest.approx([0.0, math.log(2)], abs=1e-6)
