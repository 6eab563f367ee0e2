"""Drafting and deciding through the operations gives the same laws and the same seeded tokens; their references here,
the Triton kernels in ``tests/kernels_interp``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dspark.config import SamplingParams
from dspark.ops import bias_sample, reject_sample
from dspark.sampling.draws import CounterDraws
from tests.drafters.exact import HEADS, Cell, one_round
from tests.drafters.kernels import KernelCell, Remembered, distance
from tests.exactness.harness import decode

pytestmark = pytest.mark.filterwarnings("error")  # an engine that stops drafting is exact, and says so by a warning
BIAS, REJECT = bias_sample.reference, reject_sample.reference


def cell(head: str, sampling: str, *, bias: Any = BIAS, reject: Any = REJECT, kept: int | None = None) -> KernelCell:
    return KernelCell(head, True, "constant", "fixed", "dip", sampling, kept, bias, reject)


@pytest.mark.parametrize("head", HEADS)
def test_one_round_has_the_targets_law(head: str) -> None:
    bias, reject = Remembered(BIAS), Remembered(REJECT)
    assert one_round(cell(head, "T=.7", bias=bias, reject=reject)) <= 1e-6
    assert bias.calls > 0
    assert reject.calls > 0


@pytest.mark.parametrize(
    ("bias", "reject", "sampling", "kept"),
    [(BIAS, None, "T=1", None), (None, REJECT, "T=1", None), (BIAS, REJECT, "T=1", 2), (BIAS, REJECT, "top_p", None)],
    ids=["bias alone", "reject alone", "candidates", "warpers the operation does not know"],
)
def test_each_alone_and_what_it_does_not_know(bias: Any, reject: Any, sampling: str, kept: int | None) -> None:
    assert one_round(cell("markov", sampling, bias=bias, reject=reject, kept=kept)) <= 1e-6


def test_a_whole_generation_has_the_targets_law() -> None:
    assert distance(cell("gated", "T=1"), 2) <= 1e-6


def test_a_wrong_q_is_noticed() -> None:
    """The comparisons above can fail: a drafter that draws colder than it says."""

    def wrong(base: Any, temperature: Any, *rest: Any) -> Any:
        drawn, said = BIAS(base, temperature * 0.5, *rest), BIAS(base, temperature, *rest)
        return bias_sample.Sampled(drawn.token, drawn.log_q, said.lse)

    assert one_round(cell("markov", "T=1", bias=wrong)) > 1e-3


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("kept", [None, 2])
def test_seeded_requests_give_the_tokens_of_plain_torch(head: str, kept: int | None) -> None:
    prompts = [(0, 1, 2, 0), (2,), (1, 1, 0)]
    requests = [(p, SamplingParams(max_tokens=9, temperature=1.0, seed=5 + i)) for i, p in enumerate(prompts)]
    requests.append(((0, 2), SamplingParams(max_tokens=9, temperature=0.0)))
    plain = Cell(head, True, "constant", "fixed", "dip", "T=1", kept)
    with_ops: Any = cell(head, "T=1", kept=kept)
    tokens = [[decode(made.engine(CounterDraws()), [r])[0] for r in requests] for made in (plain, with_ops)]
    assert tokens[0] == tokens[1]


def test_one_request_key_draws_one_sequence() -> None:
    params = SamplingParams(max_tokens=9, temperature=1.0, request_key=77)

    def run(key: int) -> Any:
        made = cell("markov", "T=1").engine(CounterDraws())
        return decode(made, [((0, 1, 2, 0), SamplingParams(max_tokens=9, temperature=1.0, request_key=key))])[0]

    assert params.request_key == 77
    assert run(77) == run(77)
    assert len({run(key) for key in range(8)}) > 1


def test_a_row_without_finite_draft_logits_ends_with_an_error() -> None:
    def broken(*arguments: Any) -> Any:
        found = BIAS(*arguments)
        return found._replace(log_q=found.log_q * float("nan"))

    made = cell("markov", "T=1", bias=broken).engine(CounterDraws())
    out: Callable[..., Any] = decode
    tokens = out(made, [((0, 1, 2, 0), SamplingParams(max_tokens=6, temperature=1.0))], faults=True)
    assert tokens == ((-1,),)
