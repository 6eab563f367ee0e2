"""Keys of draws by noise, and blocks drawn through ``bias_sample``: q is the law drawn from."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from dspark.config import SamplingParams
from dspark.engine.replay import RecordedDraws
from dspark.errors import ConfigError, RowFault
from dspark.ops import bias_sample
from dspark.sampling.draft import RoundSampler
from dspark.sampling.draws import CounterDraws
from dspark.sampling.fused import Block
from dspark.tokens import TokenView
from dspark.types import BatchView, DrawKeys, Mode, Purpose, RequestView


def batch(modes: tuple[Mode, ...], gamma: int = 2, **params: float) -> BatchView:
    rows = []
    for i, mode in enumerate(modes):
        own = SamplingParams(temperature=0.0 if mode is Mode.GREEDY else 0.5 + i / 4, **params)
        ids = TokenView([1, 2, 3])
        rows.append(RequestView(f"r{i}", i, 0, ids, 3, 2, gamma, own, mode, 70 + i))
    return BatchView(tuple(rows), gamma)


def drawn(kept: int | None = None, pruned: bool = False) -> tuple[RoundSampler, Block, list[torch.Tensor]]:
    g = torch.Generator().manual_seed(4)
    names = torch.randperm(40, generator=g)[:30] if pruned else None
    base, w2 = torch.randn(2, 3, 30, generator=g), torch.randn(30, 5, generator=g)
    ids = None
    if kept is not None:
        ids = base.topk(kept, dim=-1).indices.sort(-1).values
        base = base.gather(2, ids)
    block = Block(base, w2, names, ids)
    sampler = RoundSampler(
        batch((Mode.GREEDY, Mode.REJECTION, Mode.COUPLED)), CounterDraws(), 40, "cpu", bias_sample.reference
    )
    assert sampler.fused is not None
    sampler.fused.begin(block)
    latents = [torch.randn(3, 5, generator=g) for _ in range(2)]
    for k, latent in enumerate(latents):
        sampler.fused.sample(latent, k)
    return sampler, block, latents


def test_no_two_draws_share_their_noise() -> None:
    keys = set()
    for request, anchor, offset, purpose in itertools.product((1, 2), (5, 6), (0, 1), Purpose):
        one = DrawKeys(np.array([request], dtype=np.uint64), np.array([anchor]), np.array([offset]), purpose)
        keys.add(int(CounterDraws().row_keys(one)[0]))
    assert len(keys) == 2 * 2 * 2 * len(Purpose)


@pytest.mark.parametrize("kept", [None, 7])
@pytest.mark.parametrize("pruned", [False, True])
def test_q_is_what_was_drawn_from(kept: int | None, pruned: bool) -> None:
    sampler, block, latents = drawn(kept, pruned)
    assert sampler.draws_taken == 4
    made = sampler.finish()
    rows, places = np.repeat(np.arange(3), 2), np.tile(np.arange(2), 3)
    q = made.q.probs(rows, places)
    torch.testing.assert_close(q.sum(1), torch.ones(6, dtype=torch.float64), atol=1e-6, rtol=0)
    picked = q[torch.arange(6), made.token_ids.flatten()]
    torch.testing.assert_close(picked, made.q.token_probs().flatten(), atol=1e-6, rtol=1e-5)
    assert made.q.token_probs()[0].tolist() == [1.0, 1.0]
    ids = None if block.candidates is None else block.candidates[1]
    scores = bias_sample.biased_logits(block.base[1], latents[1], block.w2, ids)[1] / 0.75
    names = bias_sample.column_names(30, block.token_map, ids, torch.device("cpu")).expand(3, -1)[1]
    torch.testing.assert_close(q[3][names], torch.softmax(scores.double(), 0), atol=1e-6, rtol=1e-5)


def test_warpers_that_the_operation_does_not_know_are_left_to_torch() -> None:
    for params in ({"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}):
        made = RoundSampler(batch((Mode.REJECTION,), **params), CounterDraws(), 40, "cpu", bias_sample.reference)
        assert made.fused is None
    assert RoundSampler(batch((Mode.REJECTION,)), CounterDraws(), 40, "cpu").fused is None


def test_a_block_without_a_finite_score_is_a_fault_of_its_rows_once() -> None:
    sampler = RoundSampler(batch((Mode.REJECTION,) * 3), CounterDraws(), 30, "cpu", bias_sample.reference)
    assert sampler.fused is not None
    base = torch.zeros(1, 3, 30)
    base[0, 1] = -torch.inf
    sampler.fused.begin(Block(base, None, None, None))
    sampler.fused.sample(None, 0)
    with pytest.raises(RowFault, match=r"\[1\]"):
        sampler.finish()
    assert sampler.finish().token_ids.shape == (3, 2)


def test_a_sampler_draws_one_block_in_order() -> None:
    sampler, block, latents = drawn()
    assert sampler.fused is not None
    with pytest.raises(ConfigError, match="one block"):
        sampler.fused.begin(block)
    with pytest.raises(ConfigError, match="offset 2"):
        sampler.fused.sample(latents[0], 1)


def test_hashed_draws_count_as_taken() -> None:
    """A fault after them may depend on drafts (METHOD section 4, rule 6)."""
    draws = RecordedDraws(CounterDraws())
    assert not draws.taken
    one = DrawKeys(np.array([1], dtype=np.uint64), np.array([3]), np.array([0]), Purpose.DRAFT)
    assert draws.row_keys(one) is not None
    assert draws.taken
