"""The largest sizes that the operations are made for: a vocabulary of 262,144, a rank of 512, 512 rows."""

from __future__ import annotations

import pytest
import torch

from dspark.ops import bias_sample as bias
from dspark.ops.reject_sample import COUPLED, REJECTION, reference
from dspark.ops.triton import reject_sample as deciding
from dspark.ops.triton.bias_sample import bias_sample
from dspark.ops.triton.launch import Tile
from dspark.ops.triton.reject_sample import reject_sample
from tests.kernels_interp.cases import BiasCase, RejectCase
from tests.kernels_interp.test_reject_sample import same

pytestmark = pytest.mark.timeout(1500)
WIDE = Tile(block_v=4096, most_d=16)
VOCAB = 262_144

LARGE_BIAS = (
    (BiasCase(2, VOCAB, 8, torch.bfloat16), WIDE),
    (BiasCase(2, VOCAB, 0, torch.bfloat16, pruned=True), WIDE),
    (BiasCase(3, 65, 512, torch.bfloat16), Tile(block_v=64, most_d=512)),
    (BiasCase(3, 65, 511, torch.bfloat16), Tile(block_v=64, most_d=128)),
    (BiasCase(512, 33, 8), Tile(block_r=128, block_v=32, most_d=16)),
)


@pytest.mark.parametrize(("case", "tile"), LARGE_BIAS, ids=str)
def test_a_position_is_drawn(case: BiasCase, tile: Tile) -> None:
    arguments = case.arguments()
    got, want = bias_sample(**arguments, tile=tile), bias.reference(**arguments)
    assert torch.equal(got.token, want.token)
    torch.testing.assert_close(got.log_q, want.log_q, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(got.lse, want.lse, atol=2e-5, rtol=1e-5)


LARGE_REJECT = (
    (RejectCase(1, 1, VOCAB, rank=8, dtype=torch.bfloat16, modes=(REJECTION,), apart=20), WIDE),
    (RejectCase(1, 1, VOCAB, law=False, dtype=torch.bfloat16, modes=(COUPLED,), settings="all"), WIDE),
    (RejectCase(3, 1, 65, rank=512, dtype=torch.bfloat16, modes=(REJECTION,), apart=20), Tile(most_d=512)),
    (RejectCase(512, 1, 33, rank=0, shuffled=True), Tile(block_r=128, block_v=32)),
)


@pytest.mark.parametrize(("case", "tile"), LARGE_REJECT, ids=str)
def test_a_round_is_decided(case: RejectCase, tile: Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deciding, "ROW_BLOCK", 1 << 14 if case.vocab == VOCAB else 2048)
    monkeypatch.setattr(deciding, "MASK_BLOCK", 1 << 14 if case.vocab == VOCAB else 2048)
    arguments = case.arguments()
    want = reference(**arguments)
    got = reject_sample(**arguments, tile=tile)
    # sums over a quarter of a million terms: float32 in another order
    same(got._replace(log_prob=want.log_prob), want)
    torch.testing.assert_close(got.log_prob, want.log_prob, atol=5e-5, rtol=1e-4)


def test_the_limits_are_those_that_are_claimed() -> None:
    """Or a smaller case would pass for the largest."""
    assert max(c.width for c, _ in LARGE_BIAS) == max(c.vocab for c, _ in LARGE_REJECT) == VOCAB
    assert max(c.rank for c, _ in LARGE_BIAS) == max(c.rank for c, _ in LARGE_REJECT) == 512
    assert max(c.rows for c, _ in LARGE_BIAS) == max(c.rows for c, _ in LARGE_REJECT) == 512
