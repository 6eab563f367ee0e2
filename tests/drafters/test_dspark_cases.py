"""Cases 1 to 18 of the field with block drafters: the same faults, where they would come through these drafters.

Case 4 (schedules that anticipate) is the matrix of ``test_dspark_exact``. Case 36, vocabularies, is here for its law.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from dspark.config import SamplingParams
from dspark.sampling.draws import CounterDraws
from dspark.testing import TableEstimator, target_law
from dspark.testing.cheats import LengthTable
from dspark.testing.toys import AutomatonProcessor, CountingProcessor, random_table
from dspark.types import Mode
from tests.drafters.exact import Draws
from tests.drafters.golden import commit, make_drafter, propose, request
from tests.drafters.toys import FeatureTarget, drafter_of_vocabulary, toy_checkpoint, toy_drafter
from tests.engine import test_cases_law
from tests.engine.cases import Recorder
from tests.engine.test_cases_law import GRAMMAR, grammar_rule, sampled
from tests.exactness.harness import decode, engine, make_parts
from tests.exactness.test_draws import Recording

torch.set_num_threads(1)

HEADS = ("markov", "gated", "rnn", "none")
V, GAMMA = 4, 3
PROMPT = (0, 1, 2)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def three() -> FeatureTarget:
    return FeatureTarget(random_table(4, 3, 3, seed=1, scale=1.0), mix=0.4)


def four(**settings: Any) -> FeatureTarget:
    return FeatureTarget(random_table(V + 1, V, V, seed=21), mix=0.6, **settings)


def of(head: str, **settings: Any) -> Any:
    """A factory of toy drafters of three tokens; the layout goes with the head."""
    made = toy_drafter(head, three(), anchor_first=head != "none", **settings)
    return lambda: made


def make(
    head: str,
    *,
    lens: Sequence[int] = (99,),
    target: Any = None,
    seed: int = 0,
    draws: Any = None,
    tokenizer: Any = None,
    **settings: Any,
) -> Any:
    shown = target if target is not None else four()
    drafter = toy_drafter(head, shown, vocab=V, gamma=settings.pop("gamma", GAMMA), seed=seed)
    gamma = drafter.max_gamma
    parts = make_parts(
        draws if draws is not None else CounterDraws(),
        drafter=drafter,
        estimator=TableEstimator([[0.9] * V] * gamma),
        scheduler=LengthTable(lens),
        target=shown,
        gamma=gamma,
    )
    return engine(parts, slots=4, max_len=40, tokenizer=tokenizer, **settings)


def exact(target: Any, drafter: Any, params: SamplingParams, **settings: Any) -> float:
    """The law's distance where drafting begins with the first token: the prompt's context is read one step before."""
    prompt = (0, 1)
    end = len(prompt) + params.max_tokens
    wrap = lambda draws: Draws(draws, end)  # noqa: E731
    return test_cases_law.exact(target, drafter, params, prompt=prompt, wrap=wrap, step_tokens=1, **settings)


def greedy_of(prompt: Sequence[int], params: SamplingParams = GREEDY) -> tuple[int, ...]:
    (wanted,) = target_law(four().next_logits, prompt, params)
    return wanted


# the law, by enumeration ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", HEADS)
def test_case_1_logits_in_bfloat16(head: str) -> None:
    """The drafter runs in bfloat16, where logits round together; q is what was drawn from."""
    checkpoint = toy_checkpoint(head, std=0.6)
    made = make_drafter(checkpoint, three(), dtype=torch.bfloat16)
    assert made.backbone.dtype == torch.bfloat16
    assert exact(three, lambda: made, sampled()) <= 1e-9


@pytest.mark.parametrize("head", HEADS)
def test_case_2_a_greedy_row_is_a_point_mass_and_a_sampled_one_is_not(head: str) -> None:
    drafter = toy_drafter(head, three())
    commit(drafter, torch.ones(2, 6).double(), start=0, end=2)
    commit(drafter, torch.ones(2, 6).double(), start=0, end=2, slot=1)
    rows = [request([0, 1, 2], mode=Mode.GREEDY), request([0, 1, 2], slot=1, mode=Mode.REJECTION)]
    block, _ = propose(drafter, rows, vocab_size=3)
    q = block.q.token_probs()
    assert (q[0] == 1).all()
    assert (q[1] < 1).all()


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("candidates", [None, 2])
def test_case_3_warpers_before_both_laws(head: str, candidates: int | None) -> None:
    for settings in ({"top_k": 2}, {"temperature": 0.6, "top_p": 0.7}):
        assert exact(three, of(head, candidates=candidates), sampled(2, **settings)) <= 1e-9


@pytest.mark.parametrize("head", HEADS)
def test_case_5_processors_reach_every_verified_row(head: str) -> None:
    for settings in ({"min_p": 0.3}, {"logit_bias": {0: 1.5}, "repetition_penalty": 1.8}, {"presence_penalty": 1.2}):
        assert exact(three, of(head), sampled(2, **settings)) <= 1e-9


@pytest.mark.parametrize("head", HEADS)
def test_case_7_rejected_tokens_never_reach_a_stateful_processor(head: str) -> None:
    def rule(output: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        return logits - 0.8 * torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=3).double()

    for params in (sampled(), dataclasses.replace(GREEDY, max_tokens=6)):
        distance = exact(three, of(head), params, rule=rule, processors=lambda: [CountingProcessor(0.8)])
        assert distance <= 1e-9


@pytest.mark.parametrize("head", HEADS)
def test_case_11_illegal_drafts_are_sent_and_rejected(head: str) -> None:
    distance = exact(three, of(head), sampled(), rule=grammar_rule, processors=lambda: [AutomatonProcessor(GRAMMAR)])
    assert distance <= 1e-9


@pytest.mark.parametrize("head", HEADS)
def test_case_15_a_rejected_draft_eos_does_not_end_the_sequence(head: str) -> None:
    def ends() -> FeatureTarget:
        return FeatureTarget(random_table(4, 3, 3, seed=1, scale=1.0), mix=0.4, eos_token_ids=(2,))

    assert exact(ends, of(head), sampled()) <= 1e-9
    assert exact(ends, of(head), sampled(min_tokens=2)) <= 1e-9


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(("rows", "drafted"), [(4, 4), (3, 3), (3, 2)], ids=["padded", "equal", "pruned"])
def test_case_36_draft_vocabularies_decode_exactly(head: str, rows: int, drafted: int) -> None:
    """The pruned one drafts the target's tokens 0 and 2."""
    made = drafter_of_vocabulary(head, three(), rows, drafted)
    assert (made.token_map is not None) == (drafted < rows)
    assert exact(three, lambda: made, sampled(top_k=2)) <= 1e-9


@pytest.fixture(scope="module")
def speech() -> Any:
    """A tokenizer of the four tokens."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"tick": 0, " to": 1, "ck ": 2, "-ti": 3}, unk_token="tick"))
    words.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=words)


@pytest.mark.parametrize("head", HEADS)
def test_case_15_a_stop_string_over_several_tokens_ends_the_text_before_it(head: str, speech: Any) -> None:
    """Wherever it falls: inside a token, over two of a block, or begun rounds before an accepted draft completes it."""
    free = greedy_of(PROMPT)
    text = speech.decode(free)
    ends = [len(speech.decode(free[: i + 1])) for i in range(len(free))]
    split = begun_before = 0
    for size in (2, 4, 7):
        for at in range(1, len(text) - size, 2):
            stop = text[at : at + size]
            found = text.index(stop)
            last = next(i for i, end in enumerate(ends) if end >= found + size)
            made = make(head, seed=at % 3, tokenizer=speech)
            made.submit(PROMPT, dataclasses.replace(GREEDY, stop=(stop,)))
            chunks = list(made.run())
            assert "".join(c.text for c in chunks) == text[:found], stop
            assert tuple(t for c in chunks for t in c.ids) == free[: last + 1]
            assert chunks[-1].finish_reason == "stop"
            drafted = len(chunks[-1].ids) == chunks[-1].accepted  # the token that completes it was one
            first = last + 1 - len(chunks[-1].ids)
            split += drafted and found < ends[last - 1]
            begun_before += drafted and found < ends[first - 1]
    assert split > begun_before > 0


# greedy and seeds -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", HEADS)
def test_case_6_each_accepted_token_is_penalised_at_its_own_position(head: str) -> None:
    accepted = 0
    for penalty in (0.0, 0.7, 2.0):
        params = dataclasses.replace(GREEDY, frequency_penalty=penalty)
        for seed in range(3):
            made = make(head, seed=seed)
            assert decode(made, [(PROMPT, params)])[0] == greedy_of(PROMPT, params)
            accepted += sum(made.stats.acceptance.accepted)
    assert accepted > 0


@pytest.mark.parametrize("head", HEADS)
def test_case_8_a_seeded_request_is_the_same_with_any_neighbours_and_any_drafter(head: str) -> None:
    seeded = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=10)
    mine = (PROMPT, seeded)
    others = [((3,), SamplingParams(temperature=1.0, max_tokens=3)), ((1, 1, 0, 2), GREEDY)]
    plain = decode(make(head, lens=(0,)), [mine])[0]
    assert decode(make(head), [mine])[0] == plain
    assert decode(make(head), [*others, mine])[2] == plain
    assert decode(make(head), [mine, *others])[0] == plain
    assert decode(make(head, lens=(3, 0, 1), seed=5), [others[0], mine, others[1]])[1] == plain


@pytest.mark.parametrize("head", HEADS)
def test_case_8_no_key_is_drawn_with_twice(head: str) -> None:
    """200 rounds of *rejection* in which lengths, neighbours and slots change."""
    draws = Recording()
    made = make(head, lens=(3, 0, 1, 2), draws=draws)
    while made.stats.acceptance.rounds < 200:
        while len(made.live()) < 6:
            made.submit(PROMPT[: 1 + len(draws.seen) % 3], SamplingParams(temperature=1.0, max_tokens=9))
        made.step()
    assert len(set(draws.seen)) == len(draws.seen) > 800
    assert {purpose for *_, purpose in draws.seen} == {1, 2, 3}


@pytest.mark.parametrize("head", HEADS)
def test_case_9_an_equal_drafter_is_always_accepted_in_greedy_whatever_the_warpers_say(head: str) -> None:
    """The target is the drafter's own argmax: a table that follows what it would draft."""
    made = toy_drafter(head, four(), vocab=V, gamma=2, std=0.0)
    # without weights all logits are equal: the lowest id, which this target always says
    table = torch.zeros(V, V, dtype=torch.float64)
    table[:, 0] = 5.0
    target = FeatureTarget(table)
    for params in ({"do_sample": False, "temperature": 0.7, "top_k": 2}, {"temperature": 0.0, "top_k": 3}):
        parts = make_parts(
            CounterDraws(), drafter=made, estimator=TableEstimator([[0.9] * V] * 2), scheduler=LengthTable([99]),
            target=target, gamma=2,
        )  # fmt: skip
        run = engine(parts, slots=1, max_len=32)
        assert decode(run, [((1, 2), SamplingParams(max_tokens=12, **params))])[0] == (0,) * 12
        assert run.stats.acceptance.accepted == run.stats.acceptance.offered
        assert sum(run.stats.acceptance.accepted) > 0


@pytest.mark.parametrize("head", HEADS)
def test_case_10_ties_go_to_the_lowest_id(head: str) -> None:
    """Without weights every draft logit is the same."""
    drafter = toy_drafter(head, three(), std=0.0)
    commit(drafter, torch.ones(2, 6).double(), start=0, end=2)
    block, _ = propose(drafter, [request([0, 1, 2])], vocab_size=3)
    assert (block.token_ids == 0).all()
    table = torch.zeros(V, V, dtype=torch.float64)
    table[:, [1, 3]] = 3.0
    assert decode(make(head, target=FeatureTarget(table)), [(PROMPT, GREEDY)])[0] == (1,) * 12


@pytest.mark.parametrize("head", HEADS)
def test_case_12_logprobs_are_the_targets(head: str) -> None:
    params = SamplingParams(temperature=0.8, frequency_penalty=0.5, seed=3, max_tokens=10, logprobs=3)
    made = make(head)
    made.submit(PROMPT, params)
    ids: list[int] = []
    logprobs: list[Any] = []
    for chunk in made.run():
        ids += chunk.ids
        logprobs += chunk.logprobs
    assert len(ids) == len(logprobs) == 10
    assert sum(made.stats.acceptance.accepted) > 0
    for i, entry in enumerate(logprobs):
        logits = four().next_logits([*PROMPT, *ids[:i]])
        law = torch.log_softmax(logits, dim=-1)
        assert entry.logprob == pytest.approx(float(law[ids[i]]), abs=1e-9)


# stops and figures ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", HEADS)
def test_cases_13_and_14_output_ends_at_eos_stop_or_budget(head: str) -> None:
    free = greedy_of(PROMPT)
    for token in dict.fromkeys(free[:8]):
        end = free.index(token) + 1
        made = make(head, target=four(eos_token_ids=(token,)))
        assert decode(made, [(PROMPT, GREEDY)])[0] == free[:end]
        for budget in range(1, end + 2):
            made = make(head)
            made.submit(PROMPT, dataclasses.replace(GREEDY, max_tokens=budget, stop_token_ids=(token,)))
            chunks = list(made.run())
            kept = min(budget, end)
            assert tuple(t for c in chunks for t in c.ids) == free[:kept]
            assert chunks[-1].finish_reason == ("stop" if end <= budget else "length")
            assert made.stats.acceptance.committed == kept


@pytest.mark.parametrize("head", HEADS)
def test_cases_16_to_18_figures_of_acceptance(head: str) -> None:
    """Recomputed from the rounds' drafts and what was committed; widths 1, 3, 2 in turn."""
    recorder = Recorder()
    made = make(head, lens=(1, 3, 2), observers=[recorder])
    decode(made, [(PROMPT, dataclasses.replace(GREEDY, max_tokens=24)), ((3, 3), GREEDY)])
    offered, accepted, rounds = [0] * GAMMA, [0] * GAMMA, []
    for record in recorder.records:
        for done in record.committed:
            if done.new_ids:
                rounds.append(len(done.new_ids))
            if done.row < 0 or record.draft is None:
                continue
            drafts = record.draft.token_ids[done.row, : done.offered].tolist()
            count = 0
            while count < len(drafts) and count < len(done.new_ids) and drafts[count] == done.new_ids[count]:
                count += 1
            for k in range(done.offered):
                offered[k] += 1
                accepted[k] += k < count
    figures = made.stats.acceptance
    assert figures.accepted_length == sum(rounds) / len(rounds)
    assert figures.offered == offered
    assert figures.accepted == accepted
    assert offered[0] > offered[2] > 0
    assert figures.rates == [a / o for a, o in zip(accepted, offered, strict=True)]
    assert sum(accepted) > 0
