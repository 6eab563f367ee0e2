"""The plain-torch operations: inverse CDF, residual, argmax, log-probabilities."""

import math

import numpy as np
import pytest
import torch

from dspark.ops import reference


def u(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("vocab", [1, 2, 5, 255, 256, 257, 512, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inverse_cdf_equals_the_plain_one(vocab, dtype):
    rng = np.random.default_rng(vocab)
    probs = torch.from_numpy(rng.dirichlet(np.full(vocab, 0.3), size=300)).to(dtype)
    uniforms = torch.from_numpy(rng.random(300))
    cdf = probs.double().cumsum(1)
    plain = torch.searchsorted(cdf, uniforms[:, None] * cdf[:, -1:], right=True).squeeze(1)
    assert torch.equal(reference.inverse_cdf(probs, uniforms), plain)


def test_inverse_cdf_scales_unnormalised_rows():
    assert reference.inverse_cdf(u(2.0, 6.0)[None], u(0.249)).item() == 0
    assert reference.inverse_cdf(u(2.0, 6.0)[None], u(0.251)).item() == 1


@pytest.mark.parametrize("vocab", [3, 600])
def test_a_token_of_probability_zero_is_never_drawn(vocab):
    top = math.nextafter(1.0, 0.0)
    for where in ([0], [vocab - 1], [1], [0, vocab - 1]):
        probs = torch.zeros(1, vocab)
        probs[0, where] = 1.0 / len(where)
        for uniform in (0.0, 1e-320, 0.5, top):
            assert reference.inverse_cdf(probs, u(uniform)).item() in where


def test_rounding_past_the_end_falls_to_the_last_token_with_probability():
    # goal - before can exceed the sum inside the last block; and a cdf may stop short of its own last edge
    weights, cdf = u(0.5, 0.5, 0.0)[None], u(0.5, 0.999, 0.999)[None]
    assert reference._pick(weights, cdf, u(0.9999)[None]).item() == 1
    # a cdf that a parallel scan left non-monotone points at a zero weight: the last weight before it is taken
    weights, cdf = u(0.5, 0.0, 0.5)[None], u(0.5, 0.5000001, 1.0)[None]
    assert reference._pick(weights, cdf, u(0.50000005)[None]).item() == 0
    weights, cdf = u(0.0, 1.0)[None], u(1e-9, 1.0)[None]
    assert reference._pick(weights, cdf, u(0.0)[None]).item() == 1


def test_residual_is_clamped_and_normalised():
    r = reference.residual(u(0.6, 0.3, 0.1)[None], u(0.2, 0.5, 0.3)[None])
    assert r.tolist() == [[1.0, 0.0, 0.0]]
    p = u(0.5, 0.3, 0.2)[None]
    hot = u(0.0, 1.0, 0.0)[None]
    assert torch.allclose(reference.residual(p, hot), u(5 / 7, 0.0, 2 / 7)[None], atol=1e-15)


def test_residual_without_mass_is_the_target():
    p = u(0.5, 0.25, 0.25)[None]
    assert torch.equal(reference.residual(p, p.clone()), p)
    tiny = torch.tensor([[1e-42, 1.0]], dtype=torch.float32)
    assert torch.isfinite(reference.residual(tiny, torch.tensor([[0.0, 1.0]]))).all()


def test_argmax_takes_the_lowest_id_among_equals():
    rows = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [-math.inf, -math.inf, 0.0]])
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert reference.argmax_rows(rows.to(dtype)).tolist() == [1, 0, 2]
    wide = torch.zeros(2, 5000)
    wide[0, [77, 4000]] = 1.0
    assert reference.argmax_rows(wide).tolist() == [77, 0]


def test_take_rows():
    values = torch.arange(12.0).reshape(4, 3)
    for rows in ([0, 1, 2, 3], [1, 2], [3, 2, 1, 0], [0, 2, 1, 3], [2], []):
        assert torch.equal(reference.take_rows(values, np.array(rows, dtype=np.int64)), values[rows])


def test_normalised_sums_to_one_in_float64():
    weights = torch.softmax(torch.randn(4, 30_000, generator=torch.Generator().manual_seed(0)), -1)
    law = reference.normalised(weights)
    assert law.dtype == torch.float64
    assert (law.sum(-1) - 1).abs().max() < 1e-14
    assert weights.dtype == torch.float32
    same = torch.tensor([[0.25, 0.25]], dtype=torch.float64)
    assert reference.normalised(same).tolist() == [[0.5, 0.5]]
    assert same.tolist() == [[0.25, 0.25]]
