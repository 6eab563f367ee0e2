"""Packed weights: the same products, in bfloat16 on CPU alone, and never a stale copy while training."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dspark.ops.packed import linear, pack
from tests.drafters.golden import commit, make_drafter, propose, request

torch.set_num_threads(1)


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_the_product_is_the_plain_one(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(96, 48, generator=generator).bfloat16()
    x, bias = torch.randn(rows, 48, generator=generator).bfloat16(), torch.randn(96, generator=generator).bfloat16()
    packed = pack(weight)
    for b in (None, bias):
        got, expected = linear(x, weight, b, packed), F.linear(x, weight, b)
        assert float((got - expected).abs().max()) <= 0.02 * float(expected.abs().max())


def test_what_is_not_packed() -> None:
    weight = torch.randn(8, 8)
    assert pack(weight) is None
    assert pack(weight.double()) is None
    assert pack(weight.bfloat16().requires_grad_()) is None
    trained = torch.nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
    wrong = pack(torch.zeros(8, 8, dtype=torch.bfloat16))
    assert float(linear(torch.ones(1, 8, dtype=torch.bfloat16), trained, None, wrong).detach().sum()) == 64.0


def test_a_packed_drafter_drafts_the_same() -> None:
    drafters = [make_drafter("deepspec_dspark_vanilla", dtype=torch.bfloat16, pack=flag) for flag in (True, False)]
    taps = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    hidden = []
    for drafter in drafters:
        commit(drafter, taps, start=0, end=8)
        hidden.append(propose(drafter, [request([1, 2, 3, 4, 5, 6, 7, 8, 9])])[0].hidden.float())
    assert float((hidden[0] - hidden[1]).abs().max()) <= 0.05 * float(hidden[1].abs().max())
