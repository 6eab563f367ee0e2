"""The noise of the kernels is that of the reference: the same words, and variates to a few ulp."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from dspark.ops import noise
from dspark.ops.triton.common import bits, gumbel_of_bits


@triton.jit
def words_kernel(keys, words, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k0 = tl.load(keys).to(tl.uint32, bitcast=True)
    k1 = tl.load(keys + 1).to(tl.uint32, bitcast=True)
    x = bits(k0, k1, at.to(tl.uint32, bitcast=True))
    tl.store(words + at, x.to(tl.int32, bitcast=True), mask=at < count)


@triton.jit
def gumbel_kernel(words, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(words + at, mask=at < count, other=0).to(tl.uint32, bitcast=True)
    tl.store(out + at, gumbel_of_bits(x), mask=at < count)


def gumbel(x: np.ndarray) -> torch.Tensor:
    words = torch.from_numpy(x.astype(np.uint32).view(np.int32).copy())
    out = torch.empty(len(words))
    gumbel_kernel[(triton.cdiv(len(words), 1024),)](words, out, len(words), BLOCK=1024)
    return out


@pytest.mark.parametrize("key", [0, 1, 2**32, 0x9E3779B97F4A7C15, 2**64 - 1])
def test_words_equal_the_reference(key: int) -> None:
    count = 5001
    word = np.array([key], dtype=np.uint64)
    got = torch.empty(count, dtype=torch.int32)
    words_kernel[(triton.cdiv(count, 512),)](noise.key_halves(word)[0], got, count, BLOCK=512)
    assert torch.equal(got, noise.bits(word, torch.arange(count, dtype=torch.int32))[0])


def test_variates_are_those_of_exact_arithmetic() -> None:
    x = np.random.default_rng(0).integers(0, 2**32, size=20_000, dtype=np.uint32)
    x = np.concatenate([x, x >> np.uint32(12), x >> np.uint32(24), ~(x >> np.uint32(16)), ~(x >> np.uint32(26))])
    u = np.minimum((x.astype(np.float64) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    exact = -np.log(-np.log1p(-u))
    u_rounding = 2.0**-24 * u / ((1 - u) * -np.log1p(-u))  # half an ulp of u, carried through
    assert (np.abs(gumbel(x).numpy() - exact) <= 2 * u_rounding + 4e-6).all()


def test_variates_are_the_references() -> None:
    x = np.random.default_rng(1).integers(0, 2**32, size=20_000, dtype=np.uint32)
    ours, theirs = gumbel(x), noise.gumbel_of_bits(torch.from_numpy(x.view(np.int32).copy()))
    assert float((ours - theirs).abs().max()) <= 4e-6


def test_extremes_are_finite_and_ordered() -> None:
    g = gumbel(np.array([0, 1, 2**31, 2**32 - 2, 2**32 - 1]))
    theirs = noise.gumbel_of_bits(torch.tensor([0, 1, -(2**31), -2, -1], dtype=torch.int32))
    assert torch.isfinite(g).all()
    assert (g[:-1] >= g[1:]).all()
    torch.testing.assert_close(g, theirs, atol=4e-6, rtol=0)
