"""Cases 1 to 18 of the field with drafters that draft a token a forward; the block drafters' are beside this file.

Case 4 (schedules that anticipate) is the matrix of ``test_stepwise_exact``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch

from dspark.config import SamplingParams
from dspark.drafters.draft_model import ModelDraft
from dspark.sampling.draws import CounterDraws
from dspark.testing import TableEstimator
from dspark.testing.cheats import LengthTable
from dspark.testing.toys import AutomatonProcessor, CountingProcessor
from dspark.types import BatchView, Mode, TargetOutput, VerifyLayout
from tests.drafters.eagle import commit_text, make_eagle, toy_eagle_checkpoint
from tests.drafters.golden import Recorder as LogitsRecorder
from tests.drafters.golden import request
from tests.drafters.stepwise import KINDS, toy_model, toy_stepwise
from tests.drafters.test_dspark_cases import GAMMA, GREEDY, PROMPT, V, exact, four, greedy_of, three
from tests.drafters.toys import FeatureTarget
from tests.engine.cases import Recorder
from tests.engine.test_cases_law import GRAMMAR, grammar_rule, sampled
from tests.exactness.harness import decode, engine, make_parts

torch.set_num_threads(1)
every = pytest.mark.parametrize("kind", KINDS)


class Bfloat16(FeatureTarget):
    """A draft model whose logits round together."""

    def forward(self, layout: VerifyLayout, taps: Any = ()) -> TargetOutput:
        return TargetOutput(super().forward(layout, taps).logits.bfloat16())


class Alike(FeatureTarget):
    """A draft model that holds all tokens equally likely."""

    def forward(self, layout: VerifyLayout, taps: Any = ()) -> TargetOutput:
        return TargetOutput(super().forward(layout, taps).logits * 0)


@cache
def rounded(kind: str) -> Any:
    if kind == "model":
        model = toy_model()
        return ModelDraft(Bfloat16(model.table, mix=model.mix), three(), slots=4)
    return make_eagle(toy_eagle_checkpoint(kind), three(), dtype=torch.bfloat16)


def of(kind: str) -> Callable[[], Any]:
    """A factory of drafters of three tokens; the factory gives the same one again, in the slot that was left."""
    made = toy_stepwise(kind, three())
    return lambda: made


def make(kind: str, *, lens: Sequence[int] = (99,), target: Any = None, seed: int = 0, **settings: Any) -> Any:
    shown = target if target is not None else four()
    parts = make_parts(
        CounterDraws(),
        drafter=toy_stepwise(kind, shown, vocab=V, gamma=GAMMA, seed=seed),
        estimator=TableEstimator([[0.9] * V] * GAMMA),
        scheduler=LengthTable(lens),
        target=shown,
        gamma=GAMMA,
    )
    return engine(parts, slots=4, max_len=40, **settings)


def propose(drafter: Any, rows: Sequence[Any], gamma: int = 2, vocab: int = 3) -> Any:
    from dspark.sampling.draft import RoundSampler

    batch = BatchView(tuple(rows), gamma)
    return drafter.propose(batch, LogitsRecorder(RoundSampler(batch, CounterDraws(), vocab), []))


def read(drafter: Any, ids: Sequence[int], slot: int = 0) -> None:
    """Let the target have read all but the anchor."""
    if not isinstance(drafter, ModelDraft):
        commit_text(drafter, ids, torch.ones(len(ids) - 1, 6).double(), start=0, slot=slot)


# the law, by enumeration ----------------------------------------------------------------------------------------------


@every
def test_case_1_logits_in_bfloat16(kind: str) -> None:
    """The drafter's logits round together; q is what was drawn from."""
    assert exact(three, lambda: rounded(kind), sampled()) <= 1e-9


@every
def test_case_2_a_greedy_row_is_a_point_mass_and_a_sampled_one_is_not(kind: str) -> None:
    drafter = toy_stepwise(kind, three())
    for slot in (0, 1):
        read(drafter, [0, 1, 2], slot)
    rows = [request([0, 1, 2], mode=Mode.GREEDY), request([0, 1, 2], slot=1, mode=Mode.REJECTION)]
    q = propose(drafter, rows).q.token_probs()
    assert (q[0] == 1).all()
    assert (q[1] < 1).all()


@every
def test_case_3_warpers_before_both_laws(kind: str) -> None:
    for settings in ({"top_k": 2}, {"temperature": 0.6, "top_p": 0.7}):
        assert exact(three, of(kind), sampled(2, **settings)) <= 1e-9


@every
def test_case_5_processors_reach_every_verified_row(kind: str) -> None:
    for settings in ({"min_p": 0.3}, {"logit_bias": {0: 1.5}, "repetition_penalty": 1.8}, {"presence_penalty": 1.2}):
        assert exact(three, of(kind), sampled(2, **settings)) <= 1e-9


@every
def test_case_7_rejected_tokens_never_reach_a_stateful_processor(kind: str) -> None:
    def rule(output: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        return logits - 0.8 * torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=3).double()

    for params in (sampled(), dataclasses.replace(GREEDY, max_tokens=6)):
        distance = exact(three, of(kind), params, rule=rule, processors=lambda: [CountingProcessor(0.8)])
        assert distance <= 1e-9


@every
def test_case_11_illegal_drafts_are_sent_and_rejected(kind: str) -> None:
    distance = exact(three, of(kind), sampled(), rule=grammar_rule, processors=lambda: [AutomatonProcessor(GRAMMAR)])
    assert distance <= 1e-9


@every
def test_case_15_a_rejected_draft_eos_does_not_end_the_sequence(kind: str) -> None:
    def ends() -> FeatureTarget:
        made = three()
        return FeatureTarget(made.table, mix=made.mix, eos_token_ids=(2,))

    assert exact(ends, of(kind), sampled()) <= 1e-9
    assert exact(ends, of(kind), sampled(min_tokens=2)) <= 1e-9


# greedy and seeds -----------------------------------------------------------------------------------------------------


@every
def test_case_6_each_accepted_token_is_penalised_at_its_own_position(kind: str) -> None:
    accepted = 0
    for penalty in (0.0, 0.7, 2.0):
        params = dataclasses.replace(GREEDY, frequency_penalty=penalty)
        for seed in range(3):
            made = make(kind, seed=seed)
            assert decode(made, [(PROMPT, params)])[0] == greedy_of(PROMPT, params)
            accepted += sum(made.stats.acceptance.accepted)
    assert accepted > 0


@every
def test_case_8_a_seeded_request_is_the_same_with_any_neighbours_and_any_drafter(kind: str) -> None:
    seeded = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=10)
    mine = (PROMPT, seeded)
    others = [((3,), SamplingParams(temperature=1.0, max_tokens=3)), ((1, 1, 0, 2), GREEDY)]
    plain = decode(make(kind, lens=(0,)), [mine])[0]
    assert decode(make(kind), [mine])[0] == plain
    assert decode(make(kind), [*others, mine])[2] == plain
    assert decode(make(kind, lens=(3, 0, 1), seed=5), [others[0], mine, others[1]])[1] == plain


def test_case_9_an_equal_drafter_is_always_accepted_in_greedy_whatever_the_warpers_say() -> None:
    """The draft model is the target's equal; with one seed and the same noise it is so for seeded requests too."""
    for params in ({"do_sample": False, "temperature": 0.7, "top_k": 2}, {"temperature": 0.0, "top_k": 3}, {"seed": 3}):
        shown = four()
        parts = make_parts(
            CounterDraws(), drafter=ModelDraft(four(), shown, slots=1), estimator=TableEstimator([[0.9] * V] * 2),
            scheduler=LengthTable([99]), target=shown, gamma=2,
        )  # fmt: skip
        run = engine(parts, slots=1, max_len=40)
        decode(run, [(PROMPT, SamplingParams(max_tokens=24, **params))])
        assert run.stats.acceptance.accepted == run.stats.acceptance.offered
        assert sum(run.stats.acceptance.accepted) >= 12


@every
def test_case_10_ties_go_to_the_lowest_id(kind: str) -> None:
    """All draft logits are the same; so are two of the target's."""
    model = toy_model()
    drafter = (
        ModelDraft(Alike(model.table), three(), slots=1)
        if kind == "model"
        else make_eagle(toy_eagle_checkpoint(kind, std=0.0), three(), dtype=torch.float64)
    )
    read(drafter, [0, 1, 2])
    assert (propose(drafter, [request([0, 1, 2])]).token_ids == 0).all()
    table = torch.zeros(V, V, dtype=torch.float64)
    table[:, [1, 3]] = 3.0
    assert decode(make(kind, target=FeatureTarget(table)), [(PROMPT, GREEDY)])[0] == (1,) * 12


@every
def test_case_12_logprobs_are_the_targets(kind: str) -> None:
    params = SamplingParams(temperature=0.8, frequency_penalty=0.5, seed=3, max_tokens=10, logprobs=3)
    made = make(kind)
    made.submit(PROMPT, params)
    ids: list[int] = []
    logprobs: list[Any] = []
    for chunk in made.run():
        ids += chunk.ids
        logprobs += chunk.logprobs
    assert len(ids) == len(logprobs) == 10
    assert sum(made.stats.acceptance.accepted) > 0
    for i, entry in enumerate(logprobs):
        law = torch.log_softmax(four().next_logits([*PROMPT, *ids[:i]]), dim=-1)
        assert entry.logprob == pytest.approx(float(law[ids[i]]), abs=1e-9)


# stops and figures ----------------------------------------------------------------------------------------------------


@every
def test_cases_13_and_14_output_ends_at_eos_stop_or_budget(kind: str) -> None:
    free = greedy_of(PROMPT)
    for token in dict.fromkeys(free[:8]):
        end = free.index(token) + 1
        made = make(kind, target=four(eos_token_ids=(token,)))
        assert decode(made, [(PROMPT, GREEDY)])[0] == free[:end]
        for budget in range(1, end + 2):
            made = make(kind)
            made.submit(PROMPT, dataclasses.replace(GREEDY, max_tokens=budget, stop_token_ids=(token,)))
            chunks = list(made.run())
            kept = min(budget, end)
            assert tuple(t for c in chunks for t in c.ids) == free[:kept]
            assert chunks[-1].finish_reason == ("stop" if end <= budget else "length")
            assert made.stats.acceptance.committed == kept


@every
def test_cases_16_to_18_figures_of_acceptance(kind: str) -> None:
    """Recomputed from the rounds' drafts and what was committed; widths 1, 3, 2 in turn."""
    recorder = Recorder()
    made = make(kind, lens=(1, 3, 2), observers=[recorder])
    decode(made, [(PROMPT, dataclasses.replace(GREEDY, max_tokens=24)), ((3, 3), GREEDY)])
    offered, accepted, rounds = [0] * GAMMA, [0] * GAMMA, []
    for record in recorder.records:
        for done in record.committed:
            if done.new_ids:
                rounds.append(len(done.new_ids))
            if done.row < 0 or record.draft is None:
                continue
            drafts = record.draft.token_ids[done.row, : done.offered].tolist()
            count = next((k for k, t in enumerate(drafts) if done.new_ids[k : k + 1] != (t,)), len(drafts))
            for k in range(done.offered):
                offered[k] += 1
                accepted[k] += k < count
    figures = made.stats.acceptance
    assert figures.accepted_length == sum(rounds) / len(rounds)
    assert (figures.offered, figures.accepted) == (offered, accepted)
    assert offered[0] > offered[2] > 0
    assert figures.rates == [a / o for a, o in zip(accepted, offered, strict=True)]
    assert sum(accepted) > 0
