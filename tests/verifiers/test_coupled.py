"""``coupled``: path by path equal to one-by-one argmax(log p + g), whatever is offered and however it was drafted."""

import itertools

import numpy as np
import pytest
import torch
from verify_toy import table, verify_input

from dspark.config import SamplingParams
from dspark.errors import RowFault
from dspark.protocols import BuildContext, Verifier
from dspark.sampling.draft import PointMass, RoundSampler
from dspark.sampling.draws import CounterDraws
from dspark.sampling.history import RequestSampling
from dspark.sampling.processors import ProcessEntry, process
from dspark.types import BatchView, Mode, RequestView, TokenView
from dspark.verifiers.coupled import CAPABILITIES, CoupledConfig, CoupledVerifier, build

VERIFIER = CoupledVerifier()
PARAMS = SamplingParams(temperature=0.8, top_k=5, frequency_penalty=0.4, seed=7)
V = 8


def context(ids):
    return tuple(ids[-2:])


class Toy:
    """A target of the last two tokens, float64."""

    def __init__(self, seed):
        look = table(V, 2, seed)
        self.look = lambda ids: look(context(ids))


def alone(target, prompt, params, seed, tokens):
    """One by one: argmax(processed scores + g(seed, absolute position))."""
    sampling = RequestSampling(params, prompt, V, mode=Mode.COUPLED)
    ids = list(prompt)
    for _ in range(tokens):
        scores = process(target.look(ids)[None], [ProcessEntry(sampling, 0)])
        noise = CounterDraws().gumbel(np.array([seed], dtype=np.uint64), np.array([len(ids)]), V)
        token = int((scores + noise).argmax())
        ids.append(token)
        sampling.commit([token])
    return ids[len(prompt) :]


class Row:
    def __init__(self, prompt, seed, params=PARAMS):
        self.ids, self.prompt, self.seed, self.params = list(prompt), len(prompt), seed, params
        self.sampling = RequestSampling(params, prompt, V, mode=Mode.COUPLED)

    def view(self, slot):
        ids = TokenView(self.ids, len(self.ids))
        return RequestView("r", slot, 1, ids, self.prompt, 0, 9, self.params, Mode.COUPLED, self.seed)

    @property
    def output(self):
        return self.ids[self.prompt :]


def run_round(rows, target, drafter, gamma, schedule):
    """One round of all rows; returns the number of accepted drafts."""
    draws = CounterDraws()
    sampler = RoundSampler(BatchView(tuple(r.view(i) for i, r in enumerate(rows)), gamma), draws, V)
    drafts = [[] for _ in rows]
    for k in range(gamma):
        logits = torch.stack([drafter.look([*r.ids, *drafts[i]]) for i, r in enumerate(rows)])
        for i, token in enumerate(sampler.sample(logits, k).tolist()):
            drafts[i].append(token)
    block = sampler.finish()
    lens = [schedule(d) for d in drafts]
    logits, entries = [], []
    for row, draft, length in zip(rows, drafts, lens, strict=True):
        entries.append(ProcessEntry(row.sampling, len(logits), draft[:length]))
        logits += [target.look([*row.ids, *draft[:k]]) for k in range(length + 1)]
    scores = process(torch.stack(logits), entries)
    keys, anchors = [r.seed for r in rows], [len(r.ids) - 1 for r in rows]
    result = VERIFIER.verify(verify_input(scores, block.token_ids, lens, block.q, draws, keys=keys, anchors=anchors))
    for row, draft, accepted, token in zip(rows, drafts, result.num_accepted, result.next_ids, strict=True):
        new = [*draft[:accepted], int(token)]
        row.ids += new
        row.sampling.commit(new)
    return int(result.num_accepted.sum())


SCHEDULES = {
    "all": len,
    "off": lambda draft: 0,
    "one": lambda draft: 1,
    "retrospective": lambda draft: len(draft) if draft[-1] % 2 else 0,
    "own value": lambda draft: 0 if draft[0] == 3 else 2,
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("drafter", ["same", "other", "bad"])
def test_output_is_a_function_of_seed_and_target(schedule, drafter):
    """Case 8: alone, in a batch, reordered, under any drafter and schedule, adversarial ones included."""
    target = Toy(1)
    draft = {"same": Toy(1), "other": Toy(2), "bad": Toy(1)}[drafter]
    if drafter == "bad":
        look = draft.look
        draft.look = lambda ids: -look(ids)
    prompts = [[1, 2], [3, 4, 5], [6]]
    seeds = [7, 2**64 - 1, 7]
    want = [alone(target, p, PARAMS, s, 20) for p, s in zip(prompts, seeds, strict=True)]
    for order in ([0, 1, 2], [2, 0, 1], [0], [1]):
        rows = [Row(prompts[i], seeds[i]) for i in order]
        accepted = sum(run_round(rows, target, draft, 3, SCHEDULES[schedule]) for _ in range(7))
        for i, row in zip(order, rows, strict=True):
            n = min(20, len(row.output))
            assert row.output[:n] == want[i][:n]
        if schedule == "all" and drafter == "same":
            assert accepted >= len(order) * 7  # the frequency penalty is the target's alone
        if schedule == "off":
            assert accepted == 0


def test_draft_equal_to_target_is_always_accepted():
    params = SamplingParams(temperature=0.7, top_p=0.9, seed=3)
    rows = [Row([1, 2], 3, params), Row([1, 2], 4, params)]
    target = Toy(5)
    assert sum(run_round(rows, target, target, 3, len) for _ in range(10)) == 60
    assert rows[0].output != rows[1].output


def test_acceptance_lies_between_its_bounds():
    """(1 - TV) / (1 + TV) <= acceptance <= 1 - TV, over seeds."""
    p, q = torch.tensor([0.5, 0.3, 0.1, 0.1]), torch.tensor([0.2, 0.3, 0.4, 0.1])
    n = 20_000
    seeds = np.arange(n)
    noise = CounterDraws().gumbel(seeds.astype(np.uint64), np.full(n, 6), 4)
    drafts = (q.log() + noise).argmax(-1)
    scores = p.log().expand(2 * n, -1)
    result = VERIFIER.verify(
        verify_input(scores, drafts[:, None], [1] * n, PointMass(drafts[:, None], 4), CounterDraws(), keys=seeds)
    )
    tv = 0.5 * (p - q).abs().sum().item()
    rate = result.num_accepted.mean()
    assert (1 - tv) / (1 + tv) - 0.02 < rate < 1 - tv + 0.02
    first = np.where(result.num_accepted == 1, drafts.numpy(), result.next_ids)
    counts = np.bincount(first, minlength=4)
    expected = p.numpy() * n
    assert ((counts - expected) ** 2 / expected).sum() < 25.9  # 3 degrees of freedom, p = 1e-5


def test_a_ten_thousand_noise_tables():
    """Every table decides as one-by-one argmax does: emitted token, accepted length, against all 4 x 4 drafts."""
    n, vocab = 10_000, 4
    look = table(vocab, 2, 9)
    draws = CounterDraws()
    seeds = np.arange(n, dtype=np.uint64)
    g = [draws.gumbel(seeds, np.full(n, 6 + k), vocab).double() for k in range(3)]
    y0 = (look(()) + g[0]).argmax(-1)
    for a, b in itertools.product(range(vocab), repeat=2):
        drafts = torch.tensor([[a, b]]).expand(n, -1)
        scores = torch.stack([look(()), look((a,)), look((a, b))]).repeat(n, 1)
        got = VERIFIER.verify(verify_input(scores, drafts, [2] * n, PointMass(drafts, vocab), draws, keys=seeds))
        y1 = (look((a,)) + g[1]).argmax(-1)
        y2 = (look((a, b)) + g[2]).argmax(-1)
        accepted = torch.where(y0 != a, 0, torch.where(y1 != b, 1, 2))
        emitted = torch.where(y0 != a, y0, torch.where(y1 != b, y1, y2))
        assert got.num_accepted.tolist() == accepted.tolist()
        assert got.next_ids.tolist() == emitted.tolist()


def test_noise_is_asked_for_lazily_and_at_the_tokens_position():
    asked = []

    class Noting(CounterDraws):
        def gumbel(self, seeds, positions, vocab_size, token_ids=None):
            asked.append((seeds.tolist(), positions.tolist()))
            return torch.zeros(len(seeds), vocab_size)

    scores = torch.zeros(7, 5)
    scores[:, 2] = 1.0
    drafts = torch.tensor([[2, 0, 2], [1, 2, 2]])
    result = VERIFIER.verify(
        verify_input(scores, drafts, [3, 2], PointMass(drafts, 5), Noting(), keys=[8, 9], anchors=[4, 10])
    )
    assert asked == [([8, 9], [5, 11]), ([8], [6])]
    assert result.num_accepted.tolist() == [1, 0]
    assert result.next_ids.tolist() == [2, 2]


def test_ties_go_to_the_lowest_id():
    """Case 10, with equal noise."""

    class Flat(CounterDraws):
        def gumbel(self, seeds, positions, vocab_size, token_ids=None):
            return torch.zeros(len(seeds), vocab_size)

    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        scores = torch.tensor([[0.0, 2.0, 2.0]], dtype=dtype)
        got = VERIFIER.verify(verify_input(scores, torch.zeros(1, 0), [0], PointMass(torch.zeros(1, 0), 3), Flat()))
        assert got.next_ids.tolist() == [1]


def test_faults_name_their_rows_and_unread_rows_do_not_matter():
    scores = torch.zeros(4, 3)
    scores[1] = -torch.inf
    scores[:, 0] = torch.tensor([100.0, -torch.inf, 100.0, 100.0])
    drafts = torch.tensor([[1], [0]])
    fine = VERIFIER.verify(verify_input(scores, drafts, [1, 1], PointMass(drafts, 3), CounterDraws()))
    assert fine.num_accepted.tolist() == [0, 1]
    drafts = torch.tensor([[0], [0]])
    with pytest.raises(RowFault) as caught:
        VERIFIER.verify(verify_input(scores, drafts, [1, 1], PointMass(drafts, 3), CounterDraws()))
    assert caught.value.rows == (0,)


def test_it_declares_itself():
    made = build(CoupledConfig(), BuildContext())
    assert isinstance(made, Verifier)
    assert (made.capabilities.exact_under, made.capabilities.pathwise) == ("any", True)
    assert made.capabilities is CAPABILITIES
