"""The instruments themselves: enumeration finds exact laws, and sees every cheat that METHOD section 4 names."""

import math

import numpy as np
import pytest
import torch

from dspark.testing import EnumerationError, ScriptedDraws, TableNoise, TableTarget, law, total_variation
from dspark.testing.cheats import (
    BucketDown,
    CausalReference,
    MinOverRequests,
    RetreatingLookahead,
    Retrospective,
    VetoingGuard,
    non_anticipating,
    sps,
)
from dspark.testing.toys import random_table
from dspark.types import DrawKeys, Purpose, VerifyLayout

from .model import Model, draw, oracle

APPENDIX_SPS = sps(1.0, 0.5, 0.45)


def appendix(scheduler, second=(0.9, 0.0), tokens=3):
    """Appendix A: p_t = (.7, .3), p_d = (.5, .5), c_1 = .8, c_2 = ``second`` by x_1."""
    return Model(
        target=lambda ids: [0.7, 0.3],
        drafter=lambda ids: [0.5, 0.5],
        confidence=lambda k, prev: 0.8 if k == 0 else second[prev],
        scheduler=scheduler,
        gamma=2,
        tokens=tokens,
    )


def first_token(joint):
    out = {}
    for (tokens,), mass in joint.items():
        out[tokens[0]] = out.get(tokens[0], 0.0) + mass
    return out


def test_appendix_a_by_hand():
    honest = first_token(law(appendix(CausalReference(APPENDIX_SPS)).run))
    assert honest == pytest.approx({0: 0.7, 1: 0.3}, abs=1e-12)
    biased = first_token(law(appendix(Retrospective(APPENDIX_SPS)).run))
    assert biased == pytest.approx({0: 0.85, 1: 0.15}, abs=1e-12)


def test_a_lookahead_that_retreats_is_biased():
    cheat = RetreatingLookahead(APPENDIX_SPS, averages=(0.8, 0.9))
    biased = first_token(law(appendix(cheat).run))
    assert biased == pytest.approx({0: 0.85, 1: 0.15}, abs=1e-12)


GUARD_SPS = sps(1.0, 1.02 / 1.8, 0.44)


def test_a_guard_that_vetoes_is_biased():
    """Theta 1, 1.02, then 1.10 after A or .79 after B: the inner scheduler goes on, the guard looks back."""
    inner = CausalReference(GUARD_SPS)
    honest = first_token(law(appendix(inner).run))
    assert honest == pytest.approx({0: 0.7, 1: 0.3}, abs=1e-12)
    guard = VetoingGuard(inner, GUARD_SPS, gain=1.05)
    biased = first_token(law(appendix(guard).run))
    assert abs(biased[0] - 0.7) > 0.05


def product(first, second):
    return {(a, b): p * q for a, p in first.items() for b, q in second.items()}


# With c as below, the walk stops at l = (1, 0) after x_1 = B in row 0, and reaches (2, 1) after A.
EDGE = sps(*(1 / seconds for seconds in (0.7, 0.8, 1.0, 1.285, 1.5, 3.0)))


@pytest.mark.parametrize("kind", ["honest", "minimum", "bucket"])
def test_two_requests_keep_their_joint_law_unless_a_plan_is_edited(kind):
    target = lambda ids: [0.7, 0.3] if ids[-1] == 0 else [0.2, 0.8]  # noqa: E731
    inner = CausalReference(EDGE)
    scheduler = {"honest": inner, "minimum": MinOverRequests(inner), "bucket": BucketDown(inner, (2, 4, 8))}[kind]
    model = Model(
        target=target,
        drafter=lambda ids: [0.5, 0.5] if ids[-1] == 0 else [0.6, 0.4],
        confidence=lambda k, prev: ((0.9, 0.8), (0.95, 0.02))[k][prev],
        scheduler=scheduler,
        gamma=2,
        tokens=3,
        prompts=[[0], [1]],
    )
    joint = law(model.run)
    tv = total_variation(joint, product(oracle(target, [0], 3), oracle(target, [1], 3)))
    assert tv < 1e-12 if kind == "honest" else tv > 1e-3


@pytest.mark.parametrize(
    ("scheduler", "honest"),
    [
        (CausalReference(APPENDIX_SPS), True),
        (CausalReference(EDGE), True),
        (Retrospective(APPENDIX_SPS), False),
        (RetreatingLookahead(APPENDIX_SPS, (0.8, 0.9)), False),
        (VetoingGuard(CausalReference(GUARD_SPS), GUARD_SPS, 1.05), False),
    ],
    ids=["causal", "causal-rising", "retrospective", "retreating", "guard"],
)
def test_the_non_anticipation_property_tells_cheats(scheduler, honest):
    rng = np.random.default_rng(1)
    cases = [np.array([[0.8, c]]) for c in (0.0, 0.2, 0.9, 1.0)] + [rng.random((1, 2)) for _ in range(50)]
    verdicts = [non_anticipating(lambda b: scheduler.plan(b, None).verify_lens, c, rng) for c in cases]
    assert all(verdicts) is honest


def keys(count=1, request=1, anchor=0, offset=0, purpose=Purpose.DRAFT):
    return DrawKeys(
        np.full(count, request, dtype=np.uint64), np.full(count, anchor), offset + np.arange(count), purpose
    )


def test_law_multiplies_branches_and_skips_the_impossible():
    runs = 0

    def program(draws):
        nonlocal runs
        runs += 1
        first = draw(draws, 1, 0, 0, Purpose.DRAFT, [0.5, 0.0, 0.5])
        taken = bool(draws.accept(keys(purpose=Purpose.ACCEPT), torch.tensor([1.0 if first == 0 else 0.25]))[0])
        return first, taken

    assert law(program) == {(0, True): 0.5, (2, True): 0.125, (2, False): 0.375}
    assert runs == 3


def test_law_refuses_what_is_not_a_law():
    with pytest.raises(EnumerationError, match="not a law"):
        law(lambda d: draw(d, 1, 0, 0, Purpose.DRAFT, [0.5, 0.4]))
    with pytest.raises(EnumerationError, match="not a law"):
        law(lambda d: draw(d, 1, 0, 0, Purpose.DRAFT, [math.nan, 1.0]))
    with pytest.raises(EnumerationError, match="not a law"):
        law(lambda d: draw(d, 1, 0, 0, Purpose.DRAFT, [1.25, -0.25]))


def test_law_refuses_a_key_used_twice():
    def program(draws):
        draw(draws, 1, 0, 0, Purpose.DRAFT, [0.5, 0.5])
        return draw(draws, 1, 0, 0, Purpose.DRAFT, [0.5, 0.5])

    with pytest.raises(EnumerationError, match="used twice"):
        law(program)
    with pytest.raises(EnumerationError, match="used twice"):
        law(lambda d: tuple(d.categorical(DrawKeys(*_twice(), Purpose.DRAFT), torch.eye(2)).tolist()))


def _twice():
    return np.array([5, 5], dtype=np.uint64), np.array([1, 1]), np.array([0, 0])


def test_law_refuses_hidden_state():
    calls = []

    def program(draws):
        calls.append(1)
        return draw(draws, len(calls), 0, 0, Purpose.DRAFT, [0.5, 0.5])

    with pytest.raises(EnumerationError, match="not a function of its draws"):
        law(program)


def test_law_counts_runs_and_refuses_noise():
    with pytest.raises(EnumerationError, match="more than 3"):
        law(lambda d: draw(d, 1, 0, 0, Purpose.DRAFT, [0.25] * 4), max_runs=3)
    with pytest.raises(EnumerationError, match="noise"):
        ScriptedDraws().gumbel(np.zeros(1, np.uint64), np.zeros(1, np.int64), 4)


def test_table_noise_is_a_function_of_seed_position_and_token():
    noise = torch.arange(2 * 3 * 4, dtype=torch.float64).reshape(2, 3, 4)
    source = TableNoise(noise, first_seed=10)
    seeds, places = np.array([11, 10], dtype=np.uint64), np.array([2, 0])
    assert source.gumbel(seeds, places, 4).tolist() == [noise[1, 2].tolist(), noise[0, 0].tolist()]
    assert source.gumbel(seeds, places, 4, torch.tensor([3, 1])).tolist() == [[23, 21], [3, 1]]
    with pytest.raises(EnumerationError):
        source.categorical(keys(), torch.ones(1, 1))


def layout(sequences, wanted=None):
    """Sequences of (slot, start, ids)."""
    lens = [len(ids) for _, _, ids in sequences]
    total = sum(lens)
    return VerifyLayout(
        token_ids=torch.tensor([t for _, _, ids in sequences for t in ids]),
        positions=torch.tensor([s + i for _, s, ids in sequences for i in range(len(ids))]),
        slots=np.array([slot for slot, _, _ in sequences]),
        starts=np.array([s for _, s, _ in sequences]),
        cu_query_lens=np.cumsum([0, *lens]),
        logit_rows=np.arange(total) if wanted is None else np.array(wanted),
    )


@pytest.mark.parametrize("mix", [0.0, 0.7])
def test_table_target_reads_its_own_slots(mix):
    target = TableTarget(random_table(5, 4, 4), mix=mix, max_len=8)
    target.allocate(3, 8)
    out = target.forward(layout([(2, 0, [1, 2, 3]), (0, 0, [0, 3])])).logits
    want = [target.next_logits(p) for p in ([1], [1, 2], [1, 2, 3], [0], [0, 3])]
    assert torch.equal(out, torch.stack(want))
    rolled = target.forward(layout([(2, 2, [0, 1])], wanted=[1])).logits  # rollback: position 2 is overwritten
    assert torch.equal(rolled[0], target.next_logits([1, 2, 0, 1]))
    wrong_slot = target.forward(layout([(0, 2, [0, 1])], wanted=[0])).logits
    assert not torch.equal(wrong_slot[0], target.next_logits([1, 2, 0]))
    assert target.executed == [5, 2, 2]
    assert target.forwards[0] == [3, 2]


def test_table_target_without_ragged_batches_says_what_it_runs():
    target = TableTarget(random_table(4, 4), ragged=False)
    target.allocate(2, 8)
    batch = layout([(0, 0, [1, 2, 3]), (1, 0, [2])])
    assert target.executed_tokens(batch) == 6
    target.forward(batch, taps=[0, 1])
    assert target.executed == [6]
    assert not target.capabilities.ragged
