"""Drafting and deciding through the operations gives the same laws and the same seeded tokens; their references here,
the Triton kernels in ``tests/kernels_interp``."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dspark.config import SamplingParams
from dspark.engine.verification import entropies, unwarped_modes
from dspark.ops import bias_sample, reject_sample
from dspark.sampling.draws import CounterDraws
from dspark.sampling.warpers import Warpers, warp
from dspark.types import Mode
from tests.drafters.exact import HEADS, Cell, one_round
from tests.drafters.kernels import KernelCell, Remembered, distance
from tests.drafters.watch import made_engine
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
    [(BIAS, None, "T=1", None), (None, REJECT, "T=1", None), (BIAS, REJECT, "T=.7", 2), (None, REJECT, "top_k", None)],
    ids=["bias alone", "reject alone", "candidates", "a q that the operation does not know"],
)
def test_each_alone_and_what_it_does_not_know(bias: Any, reject: Any, sampling: str, kept: int | None) -> None:
    assert one_round(cell("markov", sampling, bias=bias, reject=reject, kept=kept)) <= 1e-6


@pytest.mark.parametrize("sampling", ["top_k", "top_p", "min_p", "penalties"])
def test_masks_are_applied_by_the_operation(sampling: str) -> None:
    """The engine hands over scores that no warper has touched, and the settings; the law is the warped one."""
    seen = set()

    def watched(*arguments: Any) -> Any:
        seen.add(arguments[10] is not None)
        return reject(*arguments)

    reject = Remembered(REJECT)
    assert one_round(cell("markov", sampling, bias=Remembered(BIAS), reject=watched)) <= 1e-6
    assert seen == {sampling != "penalties"}


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
    for i, masks in enumerate(
        ({"top_k": 2}, {"top_k": 1}, {"top_p": 0.8}, {"min_p": 0.3}, {"repetition_penalty": 1.4})
    ):
        own: Any = {"max_tokens": 9, "temperature": 0.8, "seed": 20 + i, **masks}
        requests.append(((0, 1), SamplingParams(**own)))
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


@pytest.mark.parametrize("masks", [{"top_k": 20}, {"top_p": 0.9, "min_p": 0.02}], ids=str)
def test_logprobs_are_processed_where_the_operation_applies_the_masks(masks: Any) -> None:
    """Scores reach the operation without masks; the log-probabilities that users see have them."""
    own: Any = {"max_tokens": 8, "temperature": 0.8, "logprobs": 3, "logprobs_mode": "processed", **masks}
    for key in ({"seed": 4}, {"request_key": 8}):
        made = made_engine("markov", BIAS, REJECT)
        made.submit((3, 1, 4), SamplingParams(**own, **key))
        ids, entries = list[int](), list[Any]()
        for chunk in made.run():
            ids += chunk.ids
            entries += chunk.logprobs
        assert len(entries) == 8
        for i, entry in enumerate(entries):
            logits = made.parts.target.next_logits([3, 1, 4, *ids[:i]]).float()
            law = warp(logits[None] if logits.dim() == 1 else logits, Warpers.of([SamplingParams(**own)]))
            wanted = torch.log_softmax(law, dim=-1)[0]
            assert entry.token_id == ids[i]
            assert entry.logprob == pytest.approx(wanted[ids[i]].item(), abs=1e-5)
            assert [token for token, _ in entry.top] == wanted.topk(3).indices.tolist()


def test_entropies_are_those_of_the_masked_law() -> None:
    params = SamplingParams(max_tokens=6, temperature=0.8, top_k=5, seed=4)
    made = made_engine("markov", BIAS, REJECT)
    parts, seen = made.parts, list[tuple[float, float]]()
    scores = torch.randn(3, 97, generator=torch.Generator().manual_seed(0))
    packed: Any = SimpleNamespace(row_starts=[0, 1, 2], decode=[SimpleNamespace(mode=m, params=params) for m in Mode])
    parts.gamma_policy = SimpleNamespace(capabilities=SimpleNamespace(needs_entropy=True))  # type: ignore[assignment]
    found = entropies(parts, packed, scores, {0: (0, 0), 1: (0, 0), 2: (0, 0)}, unwarped_modes(parts))
    for i, mode in enumerate(Mode):
        law = torch.softmax(scores[i] if mode is Mode.GREEDY else warp(scores[i : i + 1], Warpers.of([params]))[0], -1)
        seen.append((found[i], float(torch.special.entr(law).sum())))
    assert all(got == pytest.approx(want, abs=1e-5) for got, want in seen)
    assert seen[0][0] > seen[1][0]
