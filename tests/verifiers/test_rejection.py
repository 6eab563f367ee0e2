"""``rejection``: the law of what it emits, by enumeration of every draw, and the golden accept probabilities."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from verify_toy import table, verify_input

from dspark.capabilities import VerifierCapabilities
from dspark.config import SamplingParams
from dspark.errors import RowFault
from dspark.ops import reference
from dspark.protocols import BuildContext, Verifier
from dspark.sampling.draft import PointMass, RoundSampler
from dspark.sampling.draws import CounterDraws
from dspark.sampling.history import RequestSampling
from dspark.sampling.processors import ProcessEntry, process
from dspark.testing.enumerate import law, total_variation
from dspark.types import BatchView, Mode, Purpose, RequestView, TokenView
from dspark.verifiers.rejection import CAPABILITIES, RejectionConfig, RejectionVerifier, build

GOLDEN = Path(__file__).parent.parent / "golden" / "deepspec_verify" / "io.safetensors"
VERIFIER = RejectionVerifier()


def view(row, params, ids=(0,)):
    ids = list(ids)
    return RequestView(f"r{row}", row, 1, TokenView(ids), 1, 0, 9, params, Mode.REJECTION, 100 + row)


def one_round(draws, target, drafter, params, gamma, length, vocab, argmax=False):
    """Draft, process, verify one request and return what it commits."""
    sampler = RoundSampler(BatchView((view(0, params),), gamma), draws, vocab)
    prefix = []
    for k in range(gamma):
        if argmax:
            prefix.append(int(drafter(prefix).argmax()))
        else:
            prefix.append(int(sampler.sample(drafter(prefix)[None], k)[0]))
    block = sampler.point_mass(torch.tensor([prefix]), np.array([gamma])) if argmax else sampler.finish()
    drafts = prefix[: length(prefix)]
    logits = torch.stack([target(drafts[:k]) for k in range(len(drafts) + 1)])
    sampling = RequestSampling(params, [0], vocab, mode=Mode.REJECTION)
    scores = process(logits, [ProcessEntry(sampling, 0, drafts)])
    result = VERIFIER.verify(verify_input(scores, block.token_ids, [len(drafts)], block.q, draws))
    accepted = int(result.num_accepted[0])
    return (*drafts[:accepted], int(result.next_ids[0]))


def target_next(target, params, prefix, vocab):
    sampling = RequestSampling(params, [0], vocab, mode=Mode.REJECTION)
    sampling.commit(prefix)
    scores = process(target(prefix)[None], [ProcessEntry(sampling, 0)])
    return torch.softmax(scores[0].double(), -1).tolist()


def completed(rounds, target, params, horizon, vocab):
    """Outputs of at least one token, continued from the target's own law up to ``horizon`` tokens."""
    whole = {}
    stack = list(rounds.items())
    while stack:
        output, mass = stack.pop()
        if len(output) >= horizon:
            whole[output[:horizon]] = whole.get(output[:horizon], 0.0) + mass
            continue
        stack += [((*output, t), mass * p) for t, p in enumerate(target_next(target, params, output, vocab)) if p > 0]
    return whole


SETTINGS = [
    {},
    {"temperature": 0.7},
    {"top_k": 2},
    {"top_p": 0.8},
    {"min_p": 0.3},
    {"frequency_penalty": 1.5, "presence_penalty": 0.5},
    {"repetition_penalty": 1.8},
    {"logit_bias": {1: 1.0}, "temperature": 1.3, "top_k": 2, "repetition_penalty": 1.2},
]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("argmax", [False, True])
@pytest.mark.parametrize("length", [0, 1, 2])
def test_a_round_has_the_law_of_the_target(setting, argmax, length):
    """Cases 2, 3, 5: V = 3, gamma = 2; the first three tokens, exactly; no key is used twice (``law`` refuses that)."""
    params = SamplingParams(**({"temperature": 1.0} | setting))
    target, drafter = table(3, 3, 1), table(3, 3, 2)
    got = law(lambda draws: one_round(draws, target, drafter, params, 2, lambda _: length, 3, argmax))
    got = completed(got, target, params, 3, 3)
    want = completed({(): 1.0}, target, params, 3, 3)
    assert total_variation(got, want) < 1e-12


def test_lengths_that_follow_earlier_drafts_keep_the_law():
    """l >= 2 decided by x_1: allowed. Decided by x_1 for x_1 itself: biased, so the check can fail."""
    params = SamplingParams(temperature=1.0)
    target, drafter = table(3, 3, 3), table(3, 3, 4)
    want = completed({(): 1.0}, target, params, 3, 3)
    for length, exact in ((lambda x: 2 if x[0] == 1 else 1, True), (lambda x: 2 if x[0] == 1 else 0, False)):
        got = law(lambda draws, length=length: one_round(draws, target, drafter, params, 2, length, 3))
        tv = total_variation(completed(got, target, params, 3, 3), want)
        assert (tv < 1e-12) is exact


def test_bf16_draft_logits_that_round_together():
    """Case 1: two bf16 logits coincide; q is what was sampled from, so the law stays exact."""
    params = SamplingParams(temperature=1.0)
    target = table(4, 2, 5)
    pair = torch.tensor([3.0, 3.001, 1.0, -2.0]).to(torch.bfloat16)
    assert pair[0] == pair[1]
    got = law(lambda draws: one_round(draws, target, lambda _: pair, params, 1, lambda _: 1, 4))
    want = completed({(): 1.0}, target, params, 2, 4)
    assert total_variation(completed(got, target, params, 2, 4), want) < 1e-12


def test_float32_scores_are_exact_to_float32():
    params = SamplingParams(temperature=0.7, top_p=0.9)
    target, drafter = table(3, 3, 6, torch.float32), table(3, 3, 7, torch.float32)
    got = law(lambda draws: one_round(draws, target, drafter, params, 2, lambda _: 2, 3), tolerance=1e-6)
    want = completed({(): 1.0}, target, params, 3, 3)
    assert total_variation(completed(got, target, params, 3, 3), want) < 1e-6


def test_the_check_catches_wrong_laws(monkeypatch):
    """Case 3 and its kind: acceptance against raw scores, a residual without clamp, a bonus from the wrong row."""
    params = SamplingParams(temperature=1.0, top_k=2)
    target, drafter = table(3, 3, 1), table(3, 3, 2)
    want = completed({(): 1.0}, target, params, 3, 3)

    def tv():
        got = law(lambda draws: one_round(draws, target, drafter, params, 2, lambda _: 2, 3))
        return total_variation(completed(got, target, params, 3, 3), want)

    assert tv() < 1e-12
    with monkeypatch.context() as patch:
        patch.setattr(reference, "accept_probs", lambda p, q: (q / p).clamp(max=1.0))
        assert tv() > 1e-3
    with monkeypatch.context() as patch:
        patch.setattr(reference, "residual", lambda p, q: p)
        assert tv() > 1e-3
    with monkeypatch.context() as patch:
        # q from raw logits, still one q: exact
        patch.setattr("dspark.sampling.draft.warp", lambda scores, _, inplace: scores)
        assert tv() < 1e-12
        patch.setattr("dspark.sampling.draft.reference.normalised", reference.softmax_rows)  # sampled from another law
        assert tv() > 1e-3


def test_two_requests_have_the_product_law():
    """V = 2, gamma = 2, lengths 2 and 1, in one call."""
    params = SamplingParams(temperature=1.0)
    targets, drafters = [table(2, 3, s) for s in (1, 2)], [table(2, 3, s) for s in (3, 4)]
    lens = [2, 1]

    def both(draws):
        sampler = RoundSampler(BatchView((view(0, params), view(1, params)), 2), draws, 2)
        prefixes = [[], []]
        for k in range(2):
            step = torch.stack([drafters[r](prefixes[r]) for r in range(2)])
            for r, token in enumerate(sampler.sample(step, k).tolist()):
                prefixes[r].append(token)
        block = sampler.finish()
        scores = torch.stack([targets[r](prefixes[r][:k]) for r in range(2) for k in range(lens[r] + 1)])
        result = VERIFIER.verify(verify_input(scores, block.token_ids, lens, block.q, draws))
        return tuple((*prefixes[r][: result.num_accepted[r]], int(result.next_ids[r])) for r in range(2))

    joint = {}
    for (a, b), mass in law(both).items():
        tails = completed({a: mass}, targets[0], params, 3, 2)
        for x, m in tails.items():
            for y, n in completed({b: 1.0}, targets[1], params, 2, 2).items():
                joint[x, y] = joint.get((x, y), 0.0) + m * n
    first = completed({(): 1.0}, targets[0], params, 3, 2)
    second = completed({(): 1.0}, targets[1], params, 2, 2)
    product = {(x, y): first[x] * second[y] for x, y in itertools.product(first, second)}
    assert total_variation(joint, product) < 1e-12


class Illegal:
    """A grammar that allows token 2 nowhere."""

    def fork(self):
        return self

    def advance(self, token_id):
        if token_id == 2:
            raise RuntimeError("advanced by an illegal token")

    def process(self, logits):
        out = logits.clone()
        out[2] = -torch.inf
        return out


def test_an_illegal_draft_is_sent_and_rejected():
    """Case 11: q = (.4, .4, .2 illegal), p = (.7, .3, 0): the law is p, not the (.64, .36) of a cut draft."""
    params = SamplingParams(temperature=1.0, logits_processors=[Illegal()])
    target = torch.tensor([0.7, 0.3, 0.5], dtype=torch.float64).log()
    drafter = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64).log()
    got = law(lambda draws: one_round(draws, lambda _: target, lambda _: drafter, params, 1, lambda _: 1, 3))
    first = {}
    for output, mass in got.items():
        first[output[0]] = first.get(output[0], 0.0) + mass
    assert first == pytest.approx({0: 0.7, 1: 0.3}, abs=1e-12)


def test_equal_laws_accept_everything():
    """Case 9's kind: draft == target. Rounding that leaves no residual mass must not break the draw."""
    params = SamplingParams(temperature=0.9, top_k=4)
    target = table(6, 2, 8, torch.float32)
    for seed in range(200):
        draws = CounterDraws()
        sampler = RoundSampler(BatchView((view(seed, params),), 2), draws, 6)
        prefix = [int(sampler.sample(target([])[None], 0)[0])]
        prefix.append(int(sampler.sample(target(prefix)[None], 1)[0]))
        block = sampler.finish()
        logits = torch.stack([target(prefix[:k]) for k in range(3)])
        scores = process(logits, [ProcessEntry(RequestSampling(params, [0], 6), 0, prefix)])
        result = VERIFIER.verify(verify_input(scores, block.token_ids, [2], block.q, draws))
        assert result.num_accepted.tolist() == [2]


def tuples(keys):
    parts = keys.request.tolist(), keys.anchor.tolist(), keys.offset.tolist()
    return [(*key, int(keys.purpose)) for key in zip(*parts, strict=True)]


class Scripted:
    """Golden uniforms; notes probabilities and keys."""

    def __init__(self, uniforms):
        self.uniforms, self.accepts, self.final, self.keys = uniforms, {}, None, []

    def accept(self, keys, probs):
        rows = keys.request.astype(int) - 100
        self.keys += tuples(keys)
        for row, k, p in zip(rows, keys.offset, probs.tolist(), strict=True):
            self.accepts[row, k] = p
        return self.uniforms[rows, keys.offset] < probs.numpy()

    def categorical(self, keys, probs):
        self.keys += tuples(keys)
        self.final, self.final_keys = probs, keys
        return probs.argmax(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_golden_rounds(temperature):
    io = {k.split(".", 2)[-1]: v for k, v in load_file(GOLDEN).items() if k.startswith(f"T{temperature}.")}
    rounds, gamma, vocab = io["draft_logits"].shape
    params = SamplingParams(temperature=temperature)
    requests = tuple(view(r, params) for r in range(rounds))
    sampler = RoundSampler(BatchView(requests, gamma), CounterDraws(), vocab)
    for k in range(gamma):
        sampler.sample(io["draft_logits"][:, k], k)
    q = sampler.finish().q
    # the golden tokens were drawn by another generator: q at them, from the same laws
    q._token_probs = torch.stack(
        [
            q.probs(np.arange(rounds), np.full(rounds, k)).gather(1, io["draft_tokens"][:, k : k + 1])[:, 0]
            for k in range(gamma)
        ],
        dim=1,
    )
    entries = [
        ProcessEntry(RequestSampling(params, [0], vocab), r * (gamma + 1), io["draft_tokens"][r].tolist())
        for r in range(rounds)
    ]
    scores = process(io["target_logits"].reshape(-1, vocab), entries)
    draws = Scripted(io["uniforms"].numpy())
    result = VERIFIER.verify(verify_input(scores, io["draft_tokens"], [gamma] * rounds, q, draws))
    assert result.num_accepted.tolist() == io["accepted"].tolist()
    for (row, k), p in draws.accepts.items():
        assert p == pytest.approx(io["accept_prob"][row, k].item(), abs=1e-5)
    assert set(draws.accepts) == {(r, k) for r in range(rounds) for k in range(min(int(io["accepted"][r]) + 1, gamma))}
    assert torch.allclose(draws.final, io["next_token_probs"], atol=1e-5)
    assert draws.final_keys.purpose is Purpose.RESIDUAL
    assert draws.final_keys.offset.tolist() == result.num_accepted.tolist()
    assert len(set(draws.keys)) == len(draws.keys)


def test_rows_in_any_order_and_place_decide_the_same():
    """Requests of one mode may lie anywhere in the scores; lazily read, in one call or alone."""
    vocab, gamma = 300, 4
    params = SamplingParams(temperature=1.0)
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(vocab, generator=generator) * 2
    lens, starts = [4, 0, 2, 3], [12, 2, 7, 20]
    scores = torch.full((25, vocab), torch.nan)
    for start, length in zip(starts, lens, strict=True):
        noise = torch.randn(length + 1, vocab, generator=generator)
        scores[start : start + length + 1] = base + 0.1 * noise
    requests = tuple(view(r, params) for r in range(4))
    sampler = RoundSampler(BatchView(requests, gamma), CounterDraws(), vocab)
    for k in range(gamma):
        sampler.sample(base.expand(4, -1), k)
    block = sampler.finish()
    together = VERIFIER.verify(
        verify_input(scores, block.token_ids, lens, block.q, CounterDraws(), row_starts=starts, anchors=[0, 1, 2, 3])
    )
    assert together.num_accepted.sum() > 5
    for order in ([3, 1, 0, 2], [0], [1], [2], [3]):
        moved = VERIFIER.verify(
            verify_input(
                scores,
                block.token_ids[order],
                [lens[i] for i in order],
                block.q,
                CounterDraws(),
                row_starts=[starts[i] for i in order],
                draft_rows=order,
                keys=[100 + i for i in order],
                anchors=order,
            )
        )
        assert moved.num_accepted.tolist() == together.num_accepted[order].tolist()
        assert moved.next_ids.tolist() == together.next_ids[order].tolist()


def test_keys_never_repeat_over_200_rounds():
    """Case 8: request key, anchor, offset and purpose of every draw of 200 rounds of three requests."""
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=1.0)
    seen, lengths = [], [1, 4, 9]

    class Noting(CounterDraws):
        def note(self, keys):
            seen.extend(tuples(keys))

        def categorical(self, keys, probs):
            self.note(keys)
            return super().categorical(keys, probs)

        def accept(self, keys, probs):
            self.note(keys)
            return super().accept(keys, probs)

    draws = Noting()
    for _ in range(200):
        requests = tuple(view(r, params, range(lengths[r])) for r in range(3))
        sampler = RoundSampler(BatchView(requests, 3), draws, 8)
        base = torch.from_numpy(rng.normal(size=(3, 8)))
        for k in range(3):
            sampler.sample(base, k)
        block = sampler.finish()
        lens = rng.integers(0, 4, size=3)
        scores = torch.cat([base[r].expand(lens[r] + 1, -1) for r in range(3)])
        scores = scores + torch.from_numpy(rng.normal(size=scores.shape))
        anchors = [n - 1 for n in lengths]
        result = VERIFIER.verify(verify_input(scores, block.token_ids, lens, block.q, draws, anchors=anchors))
        lengths = [n + int(a) + 1 for n, a in zip(lengths, result.num_accepted, strict=True)]
    assert len(seen) > 2000
    assert len(set(seen)) == len(seen)


def test_no_drafts_and_no_requests():
    q = PointMass(torch.zeros(2, 0, dtype=torch.int64), 3)
    scores = torch.tensor([[-torch.inf, 0.0, -torch.inf], [5.0, -torch.inf, -torch.inf]])
    result = VERIFIER.verify(verify_input(scores, torch.zeros(2, 0), [0, 0], q, CounterDraws()))
    assert result.num_accepted.tolist() == [0, 0]
    assert result.next_ids.tolist() == [1, 0]
    empty = VERIFIER.verify(verify_input(scores[:0], torch.zeros(0, 2), [], q, CounterDraws()))
    assert len(empty.next_ids) == 0


def test_faults_name_their_rows():
    q = PointMass(torch.tensor([[0], [1], [0]]), 3)
    scores = torch.zeros(6, 3)
    scores[2] = -torch.inf
    with pytest.raises(RowFault, match="finite") as caught:
        VERIFIER.verify(verify_input(scores, q.token_ids, [1, 1, 1], q, CounterDraws()))
    assert caught.value.rows == (1,)
    drafts = torch.tensor([[0], [1], [2]])
    dishonest = PointMass(torch.tensor([[0], [1], [0]]), 3)
    dishonest.token_probs = lambda: torch.tensor([[1.0], [1.0], [0.0]])
    with pytest.raises(RowFault, match="q is not positive") as caught:
        VERIFIER.verify(verify_input(torch.zeros(6, 3), drafts, [1, 1, 1], dishonest, CounterDraws()))
    assert caught.value.rows == (2,)


def test_it_declares_itself():
    made = build(RejectionConfig(), BuildContext())
    assert isinstance(made, Verifier)
    assert made.capabilities is CAPABILITIES
    assert VerifierCapabilities("non-anticipating", False) == CAPABILITIES
