"""The exact matrix of block drafters, once with the Triton kernels: the same laws, to float32's precision."""

from __future__ import annotations

import pytest

from dspark.config import SamplingParams
from dspark.ops.triton.bias_sample import bias_sample
from dspark.ops.triton.reject_sample import reject_sample
from dspark.sampling.draws import CounterDraws
from tests.drafters.exact import HEADS, Cell, one_round
from tests.drafters.kernels import KernelCell, Remembered
from tests.exactness.harness import decode

pytestmark = pytest.mark.filterwarnings("error::dspark.errors.DSparkWarning")
BIAS, REJECT = Remembered(bias_sample), Remembered(reject_sample)


def cell(head: str, sampling: str, *, anchor_first: bool = True) -> KernelCell:
    return KernelCell(head, anchor_first, "token", "fixed", "dip", sampling, None, BIAS, REJECT)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("head", "anchor_first"), [("markov", True), ("rnn", False)])
def test_one_round_has_the_targets_law(head: str, anchor_first: bool) -> None:
    before = BIAS.calls, REJECT.calls
    assert one_round(cell(head, "T=.7", anchor_first=anchor_first)) <= 1e-6
    assert BIAS.calls > before[0]
    assert REJECT.calls > before[1]


@pytest.mark.parametrize("head", HEADS)
def test_seeded_requests_give_the_tokens_of_plain_torch(head: str) -> None:
    request = ((0, 1, 2, 0), SamplingParams(max_tokens=8, temperature=1.0, seed=5))
    plain = Cell(head, True, "token", "fixed", "dip", "T=1")
    made = cell(head, "T=1")
    assert decode(plain.engine(CounterDraws()), [request]) == decode(made.engine(CounterDraws()), [request])
