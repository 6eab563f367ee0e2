"""Faults of the field in what comes out: seeds, ties, logprobs, stops, budgets and the figures of acceptance."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from dspark.config import SamplingParams
from dspark.engine.engine import Engine
from dspark.errors import RequestError
from dspark.testing import TableDrafter, TableTarget, target_law
from dspark.testing.oracle import next_scores
from dspark.testing.toys import random_table
from tests.engine.cases import (
    GREEDY,
    PROMPTS,
    SEEDED,
    Oracle,
    Recorder,
    V,
    close_drafter,
    make,
    make_target,
    one,
    plain,
)
from tests.exactness.harness import build, decode


def test_greedy_equals_one_by_one_with_any_drafter() -> None:
    for prompt in PROMPTS:
        (wanted,) = target_law(make_target().next_logits, prompt, GREEDY)
        assert one(plain(), prompt, GREEDY) == wanted
        for drafter in (close_drafter(), Oracle(), Oracle(wrong=(5, 8)), build("drafters", "ngram", V, 3, min_n=1)):
            assert one(make(drafter), prompt, GREEDY) == wanted


# case 8 ---------------------------------------------------------------------------------------------------------------


def together(made: Engine, requests: Sequence[tuple[Sequence[int], SamplingParams]], which: int) -> tuple[int, ...]:
    return decode(made, requests)[which]


def test_case_8_a_seeded_request_is_the_same_alone_and_in_any_batch() -> None:
    prompt = PROMPTS[0]
    alone = one(plain(), prompt, SEEDED)
    others = [(PROMPTS[1], SamplingParams(temperature=1.0, max_tokens=3)), (PROMPTS[2], GREEDY)]
    mine = (prompt, SEEDED)
    assert together(make(), [mine, *others], 0) == alone
    assert together(make(), [*others, mine], 2) == alone
    assert together(make(slots=2), [others[0], mine, others[1]], 1) == alone  # a neighbour ends, another takes its slot
    assert together(make(Oracle()), [others[0], mine, others[1]], 1) == alone
    assert together(make(build("drafters", "ngram", V, 3, min_n=1)), [others[1], mine], 1) == alone
    assert together(make(close_drafter(seed=99), lens=(3, 0, 1)), [mine, others[1]], 0) == alone
    assert len({one(plain(), prompt, dataclasses.replace(SEEDED, seed=s)) for s in range(5)}) > 1


def test_case_8_rejection_with_fixed_lengths_and_one_key_is_the_same_in_any_batch() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=10, request_key=5)
    alone = one(make(), PROMPTS[0], params)
    others = [(PROMPTS[1], SamplingParams(temperature=1.0, max_tokens=4)), (PROMPTS[2], GREEDY)]
    assert together(make(), [*others, (PROMPTS[0], params)], 2) == alone


def test_case_8_a_second_live_request_with_the_same_key_is_refused() -> None:
    made = make()
    params = SamplingParams(temperature=1.0, max_tokens=4, request_key=5)
    made.submit([1], params)
    with pytest.raises(RequestError, match="key"):
        made.submit([2], params)
    list(made.run())
    made.submit([2], params)  # the first one is gone


# cases 9, 10, 12 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params", [{"do_sample": False, "temperature": 0.7, "top_k": 2}, {"temperature": 0.0, "top_k": 3}]
)
def test_case_9_greedy_ignores_warpers_and_accepts_an_equal_drafter(params: dict[str, Any]) -> None:
    table = random_table(V, V, seed=31)
    made = make(TableDrafter(table, gamma=3), target=TableTarget(table))
    tokens = one(made, [1], SamplingParams(max_tokens=12, **params))
    (wanted,) = target_law(TableTarget(table).next_logits, [1], GREEDY)
    assert tokens == wanted
    assert made.stats.acceptance.accepted == made.stats.acceptance.offered
    assert made.stats.acceptance.accepted_length == 4.0


def test_case_10_an_exact_tie_goes_to_the_lowest_id() -> None:
    table = torch.zeros(V, V, dtype=torch.float64)
    table[:, [2, 5, 6]] = 3.0
    for drafts in (table, table.flip(1)):
        made = make(TableDrafter(drafts), target=TableTarget(table))
        assert one(made, [0], GREEDY) == (2,) * 12


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_case_12_logprobs_are_the_targets_for_every_token(mode: str) -> None:
    params = SamplingParams(
        temperature=0.8, frequency_penalty=0.5, seed=3, max_tokens=10, logprobs=3, logprobs_mode=mode
    )
    made = make()
    made.submit([5], SEEDED)
    name = made.submit([1, 2], params)
    ids: list[int] = []
    logprobs: list[Any] = []
    accepted = 0
    for chunk in made.run():
        if chunk.request_id != name:
            continue
        ids += chunk.ids
        logprobs += chunk.logprobs
        accepted += chunk.accepted
    assert len(ids) == len(logprobs) == 10
    assert 0 < accepted < 10
    for i, entry in enumerate(logprobs):
        logits = make_target().next_logits([1, 2, *ids[:i]])
        if mode == "processed":
            logits = next_scores(logits, [1, 2], ids[:i], params)
        law = torch.log_softmax(logits, dim=-1)
        assert entry.token_id == ids[i]
        assert entry.logprob == pytest.approx(law[ids[i]].item(), abs=1e-9)
        assert [t for t, _ in entry.top] == law.topk(3).indices.tolist()


# cases 13, 14 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["eos", "stop id"])
def test_case_13_each_of_the_first_tokens_as_eos(how: str) -> None:
    free = one(plain(), PROMPTS[0], GREEDY)
    for token in dict.fromkeys(free[:8]):
        end = free.index(token) + 1
        target = make_target(eos_token_ids=(token,) if how == "eos" else ())
        params = dataclasses.replace(GREEDY, stop_token_ids=() if how == "eos" else (token,))
        for drafter in (Oracle(gamma=3), Oracle(wrong=(4, 6)), close_drafter()):
            made = make(drafter, target=target)
            name = made.submit(PROMPTS[0], params)
            chunks = list(made.run())
            assert tuple(t for c in chunks for t in c.ids) == free[:end]
            assert [c.finish_reason for c in chunks if c.finish_reason] == ["stop"]
            assert made.live() == ()
            assert name


def test_case_14_stop_before_the_budget_and_budget_before_the_stop() -> None:
    free = one(plain(), PROMPTS[0], GREEDY)
    stop = next(t for t in free if free.index(t) == 2)
    for budget, kept, reason in ((5, 3, "stop"), (2, 2, "length"), (3, 3, "stop")):
        made = make(Oracle(gamma=6), gamma=6)
        made.submit(PROMPTS[0], SamplingParams(max_tokens=budget, stop_token_ids=(stop,)))
        (state,) = made.live()
        chunks = list(made.run())
        assert tuple(t for c in chunks for t in c.ids) == free[:kept]
        assert chunks[-1].finish_reason == reason
        assert made.stats.acceptance.committed == kept  # nothing after the cut is counted
        assert state.stats.output_tokens == kept
        assert sum(made.stats.acceptance.accepted) == sum(made.stats.acceptance.offered) == min(kept, budget - 1)


def test_the_budget_caps_drafts() -> None:
    """max_tokens = 2: one draft and the token after it, never more in the forward."""
    made = make(Oracle(gamma=6), gamma=6)
    one(made, [1], SamplingParams(max_tokens=2))
    assert made.parts.target.forwards == [[2]]


# cases 16, 17, 18 -----------------------------------------------------------------------------------------------------


def test_case_16_a_draft_after_a_rejected_one_never_counts() -> None:
    """Row 0 is wrong at its second draft and right at its third: 1 accepted. Row 1 is right three times."""
    recorder = Recorder()  # prompt of 3: drafts stand at 3, 4, 5
    made = make(Oracle(wrong=(4,)), observers=[recorder])
    made.submit(PROMPTS[0], GREEDY)
    made.submit([4, 0, 0, 0, 0, 0], GREEDY)
    made.step()
    first, second = recorder.records[0].committed
    assert (first.accepted, len(first.new_ids)) == (1, 2)
    assert (second.accepted, len(second.new_ids)) == (3, 4)
    assert made.stats.acceptance.accepted == [2, 1, 1]
    assert made.stats.acceptance.reached == [2, 2, 1]
    assert made.stats.acceptance.offered == [2, 2, 2]


def test_case_17_accepted_length_is_the_mean_over_rounds_of_committed_tokens() -> None:
    recorder = Recorder()
    made = make(Oracle(wrong=(5, 9, 10)), observers=[recorder])
    tokens = one(made, PROMPTS[0], GREEDY)
    rounds = [len(c.new_ids) for r in recorder.records for c in r.committed]
    assert sum(rounds) == len(tokens)
    assert made.stats.acceptance.accepted_length == sum(rounds) / len(rounds)
    assert len(set(rounds)) > 1


def test_case_18_rates_divide_by_what_was_offered() -> None:
    """Widths 1, 3, 5 in three rounds, all right: rate 1 at every position, offered 3, 2, 2, 1, 1."""
    made = make(Oracle(gamma=5), lens=(1, 3, 5), gamma=5)
    one(made, PROMPTS[0], dataclasses.replace(GREEDY, max_tokens=2 + 4 + 6))
    assert made.stats.acceptance.offered == [3, 2, 2, 1, 1]
    assert made.stats.acceptance.rates == [1.0] * 5
