"""The whole engine on the Triton kernels: plain torch's tokens, masks and all, and nothing as large as the scores."""

from __future__ import annotations

from typing import Any

import pytest

from dspark.ops import bias_sample as bias
from dspark.ops import reject_sample as reject
from dspark.ops.triton.bias_sample import bias_sample
from dspark.ops.triton.reject_sample import reject_sample
from tests.drafters.watch import made_engine, requests, watching
from tests.exactness.harness import decode

pytestmark = pytest.mark.filterwarnings("error::dspark.errors.DSparkWarning")
MASKS: dict[str, Any] = {"top_k": 20, "top_p": 0.9, "min_p": 0.02}
OURS = (bias_sample, reject_sample)
REFERENCES = (bias.reference, reject.reference)


@pytest.mark.parametrize("head", ["markov", "gated", "rnn"])
def test_no_scores_are_written(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither biased logits nor a warped copy nor a law: nothing as large as one row of scores for each request."""
    made = made_engine(head, *OURS)
    with watching(monkeypatch, ["_sample_fused"]) as watch:
        tokens = decode(made, requests(4, **MASKS))
    assert watch.found == []
    assert tokens == decode(made_engine(head, *REFERENCES), requests(4, **MASKS))


def test_the_watch_sees_what_plain_torch_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    with watching(monkeypatch, ["_step"]) as watch:
        decode(made_engine("markov", None, None), requests(4, **MASKS))
    assert len(watch.found) > 10


CASES = (({"top_p": 0.9}, None), ({"min_p": 0.02}, None), ({"top_k": 1}, None), ({}, 12), ({"top_k": 20}, 12))


@pytest.mark.parametrize(("masks", "candidates"), CASES, ids=str)
def test_seeded_and_greedy_requests_give_the_tokens_of_plain_torch(masks: Any, candidates: int | None) -> None:
    """And a request without a seed those of the references, whose draws are the same."""
    asked = requests(4, **masks)
    plain = decode(made_engine("markov", None, None, candidates), asked)
    known = decode(made_engine("markov", *REFERENCES, candidates), asked)
    ours = decode(made_engine("markov", *OURS, candidates), asked)
    assert ours[:2] == plain[:2]
    assert ours == known
