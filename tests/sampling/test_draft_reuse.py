"""RoundSampler with handed-over buffers and with candidates of each row: the same draws and the same q, held once."""

import numpy as np
import pytest
import torch

from dspark.config import SamplingParams
from dspark.errors import ConfigError
from dspark.ops import reference
from dspark.sampling.draft import RoundSampler
from dspark.sampling.draws import CounterDraws
from dspark.testing.enumerate import law, total_variation
from dspark.types import BatchView, Mode, RequestView, TokenView
from dspark.verifiers.rejection import RejectionVerifier
from tests.sampling.test_draft import batch, logits, request

GREEDY, LAW, SEED = Mode.GREEDY, Mode.REJECTION, Mode.COUPLED
MIXES = {
    "all": (LAW, SEED, LAW),
    "a run": (GREEDY, LAW, SEED, GREEDY),
    "scattered": (LAW, GREEDY, SEED, GREEDY, LAW),
    "greedy": (GREEDY, GREEDY),
}
WARPERS = ({}, {"temperature": 0.6, "top_k": 7}, {"top_p": 0.8, "min_p": 0.05})


def view_of(modes, gamma=3):
    settings = [{} if m is GREEDY else WARPERS[i % 3] for i, m in enumerate(modes)]
    return batch(*(request(i, m, **s) for i, (m, s) in enumerate(zip(modes, settings, strict=True))), gamma=gamma)


def run(view, steps, vocab, maps=None, **options):
    sampler = RoundSampler(view, CounterDraws(), vocab)
    for k, step in enumerate(steps):
        sampler.sample(step, k, None if maps is None else maps[k], **options)
    return sampler.finish()


def all_of(block, rows, gamma):
    return torch.stack([block.q.probs(np.arange(rows), np.full(rows, k)) for k in range(gamma)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("mix", MIXES)
def test_a_handed_over_buffer_changes_nothing(mix, dtype):
    """Bit for bit the tokens and q of a sampler that copies."""
    modes, vocab = MIXES[mix], 40
    view = view_of(modes)
    base = torch.stack([logits(len(modes), vocab, seed=k, dtype=dtype) for k in range(3)])
    kept = base.clone()
    plain = run(view, base, vocab)
    assert torch.equal(base, kept), "without the permission nothing is written"
    reused = run(view, base, vocab, reuse=True)
    assert torch.equal(plain.token_ids, reused.token_ids)
    assert torch.equal(plain.q.token_probs(), reused.q.token_probs())
    assert torch.equal(all_of(plain, len(modes), 3), all_of(reused, len(modes), 3))


@pytest.mark.parametrize("mix", ["all", "a run", "scattered"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_q_lies_in_the_handed_over_buffer(mix, dtype):
    modes = MIXES[mix]
    base = torch.stack([logits(len(modes), 40, seed=k, dtype=dtype) for k in range(3)])
    q = run(view_of(modes), base, 40, reuse=True).q
    assert {w.untyped_storage().data_ptr() for w in q._weights} == {base.untyped_storage().data_ptr()}
    copied = run(view_of(modes), base, 40).q
    assert base.untyped_storage().data_ptr() not in {w.untyped_storage().data_ptr() for w in copied._weights}


def test_candidates_of_each_row_are_the_masked_vocabulary():
    """K logits with their target ids decide as V logits of which all others are -inf: greedy, seeded, and q."""
    vocab, k = 50, 9
    modes = (GREEDY, SEED, LAW, SEED, GREEDY, LAW)
    view = view_of(modes)
    full = torch.stack([logits(len(modes), vocab, seed=s, dtype=torch.float64) for s in range(3)])
    ids = torch.stack([reference.top_ids(step, k) for step in full])
    masked = torch.full_like(full, -torch.inf).scatter_(2, ids, full.gather(2, ids))
    wide = run(view, masked, vocab)
    for options in ({}, {"reuse": True}):
        cut = run(view, full.gather(2, ids), vocab, ids, **options)
        same = [i for i, m in enumerate(modes) if m is not LAW]  # the inverse CDF adds in another order
        assert torch.equal(cut.token_ids[same], wide.token_ids[same])
        a, b = all_of(cut, len(modes), 3), all_of(wide, len(modes), 3)
        drawn = [i for i, m in enumerate(modes) if m is not GREEDY]
        assert (a[:, drawn] - b[:, drawn]).abs().max() < 1e-14
        assert ((a[:, drawn] > 0).sum(-1) <= k).all()
        chosen = a.gather(2, cut.token_ids.T.unsqueeze(2)).squeeze(2)
        assert torch.equal(chosen.T[drawn], cut.q.token_probs()[drawn])


def test_a_row_with_candidates_does_not_depend_on_its_neighbours():
    modes = (SEED, LAW, GREEDY, SEED)
    view, step = view_of(modes, gamma=1), logits(4, 30)
    ids = reference.top_ids(step, 6)
    values = step.gather(1, ids)
    together = run(view, [values], 30, [ids]).token_ids[:, 0]
    for i in range(4):
        alone = run(BatchView(view.requests[i : i + 1], 1), [values[i : i + 1]], 30, [ids[i : i + 1]])
        assert alone.token_ids[0, 0] == together[i]


def test_candidates_keep_the_targets_law():
    """V = 5, three candidates that differ from row to row: enumerated, the emitted token has the target's law."""
    target = logits(2, 5, seed=3, dtype=torch.float64)
    step = logits(2, 5, seed=4, dtype=torch.float64)
    ids = torch.tensor([[0, 2, 3], [1, 2, 4]])
    requests = tuple(
        RequestView(f"r{i}", i, 1, TokenView([0]), 1, 0, 9, SamplingParams(temperature=1.0), LAW, 100 + i)
        for i in range(2)
    )

    def program(draws):
        from dspark.types import VerifyInput

        sampler = RoundSampler(BatchView(requests, 1), draws, 5)
        sampler.sample(step.gather(1, ids), 0, ids, reuse=True)
        block = sampler.finish()
        rows = np.arange(2)
        result = RejectionVerifier().verify(
            VerifyInput(
                scores=target.repeat_interleave(2, dim=0),
                row_starts=2 * rows,
                verify_lens=np.ones(2, dtype=np.int64),
                draft_ids=block.token_ids,
                q=block.q,
                draft_rows=rows,
                keys=np.array([100, 101], dtype=np.uint64),
                anchors=np.zeros(2, dtype=np.int64),
                draws=draws,
            )
        )
        first = [int(block.token_ids[r, 0]) if result.num_accepted[r] else int(result.next_ids[r]) for r in range(2)]
        return tuple(first)

    p = torch.softmax(target, -1)
    want = {(a, b): float(p[0, a] * p[1, b]) for a in range(5) for b in range(5)}
    assert total_variation(law(program), want) <= 1e-9


def test_a_map_of_another_shape_is_refused():
    sampler = RoundSampler(view_of((LAW, LAW)), CounterDraws(), 9)
    with pytest.raises(ConfigError, match="token map"):
        sampler.sample(logits(2, 4), 0, torch.zeros(1, 4, dtype=torch.int64))


@pytest.mark.parametrize(("width", "count"), [(8192, 64), (8192, 1), (1000, 7), (33, 1), (40, 40), (5, 2)])
def test_top_ids_are_the_largest(width, count):
    scores = logits(6, width, seed=width)
    got = reference.top_ids(scores, count)
    assert torch.equal(got, scores.topk(count, dim=-1).indices.sort(-1).values)
    tied = (scores * 2).round()  # which of equals is open, their values are not
    values = tied.gather(1, reference.top_ids(tied, count)).sort(-1).values
    assert torch.equal(values, tied.topk(count, dim=-1).values.sort(-1).values)
