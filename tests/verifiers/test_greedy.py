"""``greedy``: argmax, the lowest id among equals, and the golden T = 0 rounds."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from verify_toy import verify_input

from dspark.config import SamplingParams
from dspark.errors import RowFault
from dspark.protocols import BuildContext, Verifier
from dspark.sampling.draft import PointMass, RoundSampler
from dspark.sampling.history import RequestSampling
from dspark.sampling.logprobs import token_logprobs
from dspark.sampling.processors import ProcessEntry, process
from dspark.types import BatchView, Mode, RequestView, TokenView
from dspark.verifiers.coupled import CoupledVerifier
from dspark.verifiers.greedy import CAPABILITIES, GreedyConfig, GreedyVerifier, build
from dspark.verifiers.rejection import RejectionVerifier

GOLDEN = Path(__file__).parent.parent / "golden" / "deepspec_verify" / "io.safetensors"
VERIFIER = GreedyVerifier()


def test_golden_rounds():
    io = {k[5:]: v for k, v in load_file(GOLDEN).items() if k.startswith("T0.0.")}
    rounds, gamma, vocab = io["draft_logits"].shape
    drafts = io["draft_tokens"]
    scores = io["target_logits"].reshape(-1, vocab)
    result = VERIFIER.verify(verify_input(scores, drafts, [gamma] * rounds, PointMass(drafts, vocab), None))
    assert result.num_accepted.tolist() == io["accepted"].tolist()
    assert result.next_ids.tolist() == io["next_token_drawn"].tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_random_blocks_equal_one_by_one(dtype):
    rng = np.random.default_rng(0)
    for _ in range(50):
        lens = rng.integers(0, 5, size=4)
        scores = torch.from_numpy(rng.integers(0, 4, size=(int(lens.sum()) + 4, 6))).to(dtype)  # many ties
        drafts = torch.from_numpy(rng.integers(0, 3, size=(4, 5)))
        got = VERIFIER.verify(verify_input(scores, drafts, lens, PointMass(drafts, 6), None))
        start = 0
        for r, length in enumerate(lens):
            best = [row.tolist().index(max(row.tolist())) for row in scores[start : start + length + 1]]
            accepted = 0
            while accepted < length and best[accepted] == drafts[r, accepted]:
                accepted += 1
            assert (got.num_accepted[r], got.next_ids[r]) == (accepted, best[accepted])
            start += length + 1


@pytest.mark.parametrize("leftover", [{"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}])
def test_draft_equal_to_target_is_always_accepted(leftover):
    """Case 9: T or top_k left at other values must not make the draft random."""
    params = SamplingParams(**leftover, top_k=2, top_p=0.5)
    assert params.mode is Mode.GREEDY
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    request = RequestView("r", 0, 1, TokenView([1]), 1, 0, 9, params, params.mode, 5)
    sampler = RoundSampler(BatchView((request,), 3), None, 50)
    drafts = [int(sampler.sample(logits[k : k + 1], k)) for k in range(3)]
    block = sampler.finish()
    scores = process(logits, [ProcessEntry(RequestSampling(params, [1], 50), 0, drafts)])
    result = VERIFIER.verify(verify_input(scores, block.token_ids, [3], block.q, None))
    assert result.num_accepted.tolist() == [3]
    assert block.q.token_probs().tolist() == [[1.0] * 3]


def test_an_exact_tie_takes_the_lowest_id():
    """Case 10."""
    scores = torch.zeros(1, 70_000)
    scores[0, [123, 5, 69_999]] = 1.0
    got = VERIFIER.verify(verify_input(scores, torch.zeros(1, 0), [0], PointMass(torch.zeros(1, 0), 3), None))
    assert got.next_ids.tolist() == [5]


class Zero:
    def gumbel(self, seeds, positions, vocab_size, token_ids=None):
        return torch.zeros(len(seeds), vocab_size)


class Certain:
    def accept(self, keys, probs):
        return probs.numpy() > 0.5

    def categorical(self, keys, probs):
        return probs.argmax(-1)


def test_it_is_the_limit_of_both_exact_rules():
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(9, 5, generator=generator, dtype=torch.float64)
    best = scores.argmax(-1)
    drafts = torch.stack([best[[0, 1]], torch.tensor([int(best[3]), (int(best[4]) + 1) % 5]), (best[[6, 7]] + 1) % 5])
    q = PointMass(drafts, 5)
    want = VERIFIER.verify(verify_input(scores, drafts, [2, 2, 2], q, None))
    assert want.num_accepted.tolist() == [2, 1, 0]
    for verifier, made, draws in ((CoupledVerifier(), scores, Zero()), (RejectionVerifier(), scores * 1e4, Certain())):
        got = verifier.verify(verify_input(made, drafts, [2, 2, 2], q, draws))
        assert got.num_accepted.tolist() == want.num_accepted.tolist()
        assert got.next_ids.tolist() == want.next_ids.tolist()


def test_rows_may_lie_anywhere():
    scores = torch.full((10, 4), torch.nan)
    scores[6:9] = torch.eye(4)[[1, 2, 3]]
    scores[2] = torch.eye(4)[0]
    drafts = torch.tensor([[1, 2], [0, 0]])
    got = VERIFIER.verify(verify_input(scores, drafts, [2, 0], PointMass(drafts, 4), None, row_starts=[6, 2]))
    assert got.num_accepted.tolist() == [2, 0]
    assert got.next_ids.tolist() == [3, 0]


def test_logprobs_are_the_targets_for_every_kind_of_token():
    """Case 12: accepted, corrected and bonus tokens, raw and processed."""
    params = SamplingParams(logprobs=3, frequency_penalty=1.0, min_tokens=2)
    raw = torch.randn(4, 9, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    sampling = RequestSampling(params, [1], 9, (0,))
    drafts = []
    for k in range(3):  # drafts that will be accepted
        drafts.append(int(process(raw[: k + 1], [ProcessEntry(sampling, 0, drafts)])[k].argmax()))
    for wrong_at in (None, 0, 2):
        sent = [(d + 1) % 9 if k == wrong_at else d for k, d in enumerate(drafts)]
        scores = process(raw, [ProcessEntry(sampling, 0, sent)])
        got = VERIFIER.verify(verify_input(scores, [sent], [3], PointMass(torch.tensor([sent]), 9), None))
        accepted = int(got.num_accepted[0])
        assert accepted == (3 if wrong_at is None else wrong_at)
        tokens = [*sent[:accepted], int(got.next_ids[0])]
        single = RequestSampling(params, [1], 9, (0,))
        for k, token in enumerate(tokens):
            (of_raw,) = token_logprobs(raw[k : k + 1], [token], 3)
            (of_processed,) = token_logprobs(process(raw[k : k + 1], [ProcessEntry(single, 0)]), [token], 3)
            assert token_logprobs(raw[: accepted + 1], tokens, 3)[k] == of_raw
            assert token_logprobs(scores[: accepted + 1], tokens, 3)[k] == of_processed
            assert of_processed.top[0][0] == token
            assert of_raw.logprob == pytest.approx(torch.log_softmax(raw[k], -1)[token].item(), abs=1e-12)
            single.commit([token])


def test_only_rows_that_decide_can_fault():
    scores = torch.zeros(4, 3)
    scores[1] = torch.nan
    scores[:, 0] = torch.tensor([1.0, torch.nan, 1.0, 1.0])
    drafts = torch.tensor([[1], [0]])
    fine = VERIFIER.verify(verify_input(scores, drafts, [1, 1], PointMass(drafts, 3), None))
    assert fine.num_accepted.tolist() == [0, 1]
    scores[3] = -torch.inf
    with pytest.raises(RowFault) as caught:
        VERIFIER.verify(verify_input(scores, drafts, [1, 1], PointMass(drafts, 3), None))
    assert caught.value.rows == (1,)


def test_no_requests():
    assert len(VERIFIER.verify(verify_input(torch.zeros(0, 3), torch.zeros(0, 2), [], None, None)).next_ids) == 0


def test_it_declares_itself():
    made = build(GreedyConfig(), BuildContext())
    assert isinstance(made, Verifier)
    assert (made.capabilities.exact_under, made.capabilities.pathwise) == ("any", True)
    assert made.capabilities is CAPABILITIES
