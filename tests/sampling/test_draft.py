"""RoundSampler: one q, sampled from and accepted with; modes, keys, pruned and padded vocabularies."""

import math

import numpy as np
import pytest
import torch

from dspark.config import SamplingParams
from dspark.errors import ConfigError, RowFault
from dspark.sampling.draft import DenseDistribution, PointMass, RoundSampler, check_token_map
from dspark.sampling.draws import CounterDraws
from dspark.sampling.warpers import Warpers, warp
from dspark.types import BatchView, DraftDistribution, Mode, Purpose, RequestView, TokenView


class Recorder(CounterDraws):
    """Production draws that note what they were asked."""

    def __init__(self):
        super().__init__()
        self.categoricals, self.gumbels = [], []

    def categorical(self, keys, probs):
        self.categoricals.append((keys, probs.clone()))
        return super().categorical(keys, probs)

    def gumbel(self, seeds, positions, vocab_size, token_ids=None):
        self.gumbels.append((seeds, positions))
        return super().gumbel(seeds, positions, vocab_size, token_ids)


def request(row, mode, ids=(1, 2, 3), key=None, **params):
    params = SamplingParams(**({"temperature": 0.0 if mode is Mode.GREEDY else 1.0} | params))
    ids = list(ids)
    return RequestView(
        f"r{row}", row, 1, TokenView(ids), len(ids), 0, 9, params, mode, key if key is not None else 100 + row
    )


def batch(*requests, gamma=2):
    return BatchView(requests, gamma)


def logits(rows, vocab, seed=0, dtype=torch.float32, scale=2.0):
    made = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
    return made.to(dtype)


def test_it_makes_distributions():
    sampler = RoundSampler(batch(request(0, Mode.REJECTION), gamma=1), CounterDraws(), 5)
    sampler.sample(logits(1, 5), 0)
    assert isinstance(sampler.finish().q, DraftDistribution)
    assert isinstance(PointMass(torch.zeros(1, 1, dtype=torch.int64), 5), DraftDistribution)


def test_each_mode_samples_its_own_way():
    vocab, gamma = 40, 3
    view = batch(
        request(0, Mode.GREEDY),
        request(1, Mode.REJECTION, ids=range(7)),
        request(2, Mode.COUPLED, ids=range(5), key=2**64 - 1, temperature=0.5, top_k=10),
        request(3, Mode.REJECTION, temperature=0.8, top_p=0.7),
        gamma=gamma,
    )
    draws = Recorder()
    sampler = RoundSampler(view, draws, vocab)
    steps = [logits(4, vocab, seed=k) for k in range(gamma)]
    tokens = torch.stack([sampler.sample(step, k) for k, step in enumerate(steps)], dim=1)
    assert sampler.draws_taken == 3 * gamma
    block = sampler.finish()
    assert torch.equal(block.token_ids, tokens)
    assert block.lens.tolist() == [gamma] * 4
    for k, step in enumerate(steps):
        assert tokens[0, k] == step[0].argmax()
        keys, law = draws.categoricals[k]
        assert keys.request.tolist() == [101, 103]
        assert keys.anchor.tolist() == [6, 2]
        assert keys.offset.tolist() == [k, k]
        assert keys.purpose is Purpose.DRAFT
        warped = warp(step, Warpers.of([None] + [r.params for r in view.requests[1:]]))
        assert torch.allclose(law, torch.softmax(warped[[1, 3]].double(), -1), atol=1e-6)
        seeds, positions = draws.gumbels[k]
        assert seeds.tolist() == [2**64 - 1]
        assert positions.tolist() == [4 + 1 + k]
        noise = CounterDraws().gumbel(seeds, positions, vocab)[0]
        assert tokens[2, k] == (warped[2] + noise).argmax()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_one_q_sampled_from_and_accepted_with(dtype):
    """Cases 1 and 3: what the draw saw is what acceptance reads, bit for bit, and it is a law in float64."""
    view = batch(request(0, Mode.REJECTION), request(1, Mode.REJECTION, top_k=3), gamma=2)
    draws = Recorder()
    sampler = RoundSampler(view, draws, 30)
    for k in range(2):
        sampler.sample(logits(2, 30, seed=k, dtype=dtype), k)
    q = sampler.finish().q
    tokens = sampler.finish().token_ids
    for k in range(2):
        law = q.probs(np.array([0, 1]), np.array([k, k]))
        assert torch.equal(law, draws.categoricals[k][1])
        assert (law.sum(-1) - 1).abs().max() < 1e-15
        assert (law[1] > 0).sum() == 3
        assert torch.equal(law.gather(1, tokens[:, k : k + 1])[:, 0], q.token_probs()[:, k])


def test_float64_logits_stay_float64():
    step = logits(1, 6, dtype=torch.float64)
    sampler = RoundSampler(batch(request(0, Mode.REJECTION), gamma=1), CounterDraws(), 6)
    sampler.sample(step, 0)
    law = sampler.finish().q.probs(np.array([0]), np.array([0]))
    assert torch.allclose(law, torch.softmax(step, -1), atol=1e-16, rtol=1e-15)


def test_argmax_drafts_are_declared_a_point_mass():
    """Case 2: greedy rows say q = 1 at what they took, also in a batch with rows that sample."""
    step = torch.tensor([[2.0, 1.5, 1.0, 0.5]] * 2)
    alone = RoundSampler(batch(request(0, Mode.GREEDY), request(1, Mode.GREEDY), gamma=1), CounterDraws(), 4)
    assert alone.sample(step, 0).tolist() == [0, 0]
    assert alone.draws_taken == 0
    q = alone.finish().q
    assert isinstance(q, PointMass)
    assert q.probs(np.array([1]), np.array([0])).tolist() == [[1.0, 0.0, 0.0, 0.0]]
    mixed = RoundSampler(batch(request(0, Mode.GREEDY), request(1, Mode.REJECTION), gamma=1), CounterDraws(), 4)
    mixed.sample(step, 0)
    q = mixed.finish().q
    assert isinstance(q, DenseDistribution)
    both = q.probs(np.array([1, 0]), np.array([0, 0]))
    assert both[1].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert torch.allclose(both[0], torch.softmax(step[1].double(), -1), atol=1e-7)
    assert q.token_probs()[0, 0] == 1.0


def test_rows_do_not_depend_on_their_neighbours():
    requests = [request(i, m) for i, m in enumerate((Mode.GREEDY, Mode.COUPLED, Mode.REJECTION, Mode.COUPLED))]
    step = logits(4, 50, scale=1.0)
    together = RoundSampler(batch(*requests, gamma=1), CounterDraws(), 50).sample(step, 0)
    for i, one in enumerate(requests):
        alone = RoundSampler(batch(one, gamma=1), CounterDraws(), 50).sample(step[i : i + 1], 0)
        assert alone[0] == together[i]
    order = [2, 0, 3, 1]
    moved = RoundSampler(batch(*(requests[i] for i in order), gamma=1), CounterDraws(), 50).sample(step[order], 0)
    assert torch.equal(moved, together[order])


def test_pruned_vocabulary_shares_the_target_noise():
    token_map = torch.tensor([7, 2, 5])
    view = batch(*(request(i, m) for i, m in enumerate((Mode.GREEDY, Mode.COUPLED, Mode.REJECTION))), gamma=1)
    step = logits(3, 3)
    sampler = RoundSampler(view, CounterDraws(), 10)
    tokens = sampler.sample(step, 0, token_map)
    assert tokens[0] == token_map[step[0].argmax()]
    noise = CounterDraws().gumbel(np.array([101], dtype=np.uint64), np.array([3]), 10)[0]
    assert tokens[1] == token_map[(step[1] + noise[token_map]).argmax()]
    law = sampler.finish().q.probs(np.array([2]), np.array([0]))[0]
    assert law.shape == (10,)
    assert torch.allclose(law[token_map], torch.softmax(step[2].double(), -1), atol=1e-7)
    assert law.sum().item() == pytest.approx(1.0, abs=1e-12)
    assert law[tokens[2]] == sampler.finish().q.token_probs()[2, 0]


@pytest.mark.parametrize("width", [12, 10, 6])
def test_padded_and_narrow_draft_vocabularies(width):
    """Case 36: surplus draft logits, the largest of all, are cut before q is made."""
    step = logits(3, width)
    step[:, 10:] = 50.0
    view = batch(*(request(i, m) for i, m in enumerate((Mode.GREEDY, Mode.COUPLED, Mode.REJECTION))), gamma=1)
    sampler = RoundSampler(view, CounterDraws(), 10)
    assert (sampler.sample(step, 0) < min(width, 10)).all()
    law = sampler.finish().q.probs(np.array([1, 2]), np.array([0, 0]))
    assert law.shape == (2, 10)
    assert (law.sum(-1) - 1).abs().max() < 1e-12


def test_lengths_and_padding():
    sampler = RoundSampler(batch(request(0, Mode.REJECTION), request(1, Mode.GREEDY), gamma=4), CounterDraws(), 5)
    for k in range(2):
        sampler.sample(logits(2, 5, seed=k), k)
    hidden = torch.zeros(2, 4, 1)
    block = sampler.finish(np.array([2, 1]), hidden=hidden, features={"a": 1})
    assert block.token_ids.shape == (2, 4)
    assert block.q.token_probs().shape == (2, 4)
    assert block.lens.tolist() == [2, 1]
    assert block.hidden is hidden
    assert block.features == {"a": 1}
    with pytest.raises(ConfigError, match="lens"):
        sampler.finish(np.array([3, 0]))
    empty = RoundSampler(batch(request(0, Mode.REJECTION), gamma=2), CounterDraws(), 5).finish()
    assert empty.lens.tolist() == [0]
    assert empty.token_ids.shape == (1, 2)


def test_point_mass_block():
    sampler = RoundSampler(batch(request(0, Mode.REJECTION), gamma=2), CounterDraws(), 5)
    block = sampler.point_mass(torch.tensor([[3, 1]], dtype=torch.int32), np.array([2]))
    assert block.token_ids.dtype == torch.int64
    assert block.q.token_probs().tolist() == [[1.0, 1.0]]
    assert block.q.probs(np.array([0]), np.array([1])).tolist() == [[0.0, 1.0, 0.0, 0.0, 0.0]]
    assert sampler.draws_taken == 0


def test_what_sample_refuses():
    view = batch(request(0, Mode.REJECTION), request(1, Mode.GREEDY))
    sampler = RoundSampler(view, CounterDraws(), 5)
    with pytest.raises(ConfigError, match="offset"):
        sampler.sample(logits(2, 5), 1)
    with pytest.raises(ConfigError, match="rows"):
        sampler.sample(logits(1, 5), 0)
    with pytest.raises(ConfigError, match="token map"):
        sampler.sample(logits(2, 5), 0, torch.tensor([0, 1]))
    for bad in (-math.inf, math.nan):
        step = logits(2, 5)
        step[1] = bad
        with pytest.raises(RowFault) as caught:
            sampler.sample(step, 0)
        assert caught.value.rows == (1,)
    assert sampler.draws_taken == 0


def test_check_token_map():
    check_token_map(torch.tensor([4, 0, 2]), 3, 5)
    for bad, words in (([4, 0], "shape"), ([4, 0, 5], "outside"), ([-1, 0, 1], "outside"), ([4, 0, 4], "two draft")):
        with pytest.raises(ConfigError, match=words):
            check_token_map(torch.tensor(bad), 3, 5)
