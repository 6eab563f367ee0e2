"""Keys of draws by noise, and blocks drawn through ``bias_sample``: q is the law drawn from."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

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
from dspark.sampling.processors import ProcessEntry, process
from dspark.sampling.settings import settings_of
from dspark.sampling.warpers import Warpers, warp
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


@pytest.mark.parametrize("params", [{"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_masks_do_not_touch_q(params: dict[str, float]) -> None:
    """A draft that the target's masks forbid is rejected; q stays the law of the temperature alone."""
    laws = []
    for own in ({}, params):
        made = RoundSampler(batch((Mode.REJECTION,), **own), CounterDraws(), 40, "cpu", bias_sample.reference)
        assert made.fused is not None
        made.fused.begin(Block(torch.randn(1, 1, 40, generator=torch.Generator().manual_seed(1)), None, None, None))
        made.fused.sample(None, 0)
        laws.append(made.finish().q.probs(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)))
    assert torch.equal(laws[0], laws[1])
    assert bool((laws[0] > 0).all())


def test_of_one_allowed_token_the_argmax_is_drafted() -> None:
    modes = (Mode.REJECTION, Mode.COUPLED)
    sampler = RoundSampler(batch(modes, top_k=1), CounterDraws(), 40, "cpu", bias_sample.reference)
    assert sampler.fused is not None
    base = torch.randn(1, 2, 40, generator=torch.Generator().manual_seed(2))
    sampler.fused.begin(Block(base, None, None, None))
    assert sampler.fused.sample(None, 0).tolist() == base[0].argmax(-1).tolist()
    made = sampler.finish()
    q = made.q.probs(np.arange(2), np.zeros(2, dtype=np.int64))
    assert q.sum(1).tolist() == q.amax(1).tolist() == [1.0, 1.0]


def test_without_a_kernel_torch_draws() -> None:
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


def test_the_engine_warps_for_those_that_do_not() -> None:
    """Rows of a mode whose verifier applies the warpers are left as they are; the others pass them."""
    params = SamplingParams(temperature=0.5, top_k=3)
    logits = torch.randn(2, 20, generator=torch.Generator().manual_seed(1))
    entries = []
    for row, mode in enumerate((Mode.REJECTION, Mode.COUPLED)):
        state: Any = SimpleNamespace(edits=False, mode=mode, params=params)
        entries.append(ProcessEntry(state, row))
    assert process(logits, entries, frozenset((Mode.REJECTION, Mode.COUPLED))) is logits
    mixed = process(logits, entries, frozenset((Mode.REJECTION,)))
    assert torch.equal(mixed[0], logits[0])
    assert torch.equal(mixed[1], warp(logits[1:], Warpers.of([params]))[0])


def test_settings_go_over_as_they_are() -> None:
    assert settings_of([SamplingParams(temperature=1.0)], "cpu") is None
    warm = settings_of([SamplingParams(temperature=1.0), SamplingParams(temperature=0.5)], "cpu")
    assert warm is not None
    assert (warm.temperature.tolist(), warm.masked) == ([1.0, 0.5], False)
    masked = settings_of([SamplingParams(temperature=1.0, top_k=151_936, top_p=0.5, min_p=0.25)], "cpu")
    assert masked is not None
    assert masked.masked
    assert (masked.top_k.tolist(), masked.top_p.tolist(), masked.min_p.tolist()) == ([151_936], [0.5], [0.25])
    assert masked.top_k.dtype == torch.int32
