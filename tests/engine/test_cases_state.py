"""Faults of the field in what the engine keeps: seeds, stops, budgets, metrics, slots, against plain decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from dspark.config import SamplingParams
from dspark.engine.build import read_cost
from dspark.engine.engine import Engine
from dspark.errors import ConfigError, CostTableError, DSparkWarning, RequestError
from dspark.sampling.draws import CounterDraws
from dspark.scheduling.cost import ContextBucket, CostProfile
from dspark.testing import TableDrafter, TableEstimator, TableTarget, target_law
from dspark.testing.cheats import LengthTable, schedule_input
from dspark.testing.oracle import next_scores
from dspark.testing.toys import random_table
from dspark.types import RoundRecord, VerifyPlan
from tests.exactness.harness import build, decode, engine, make_parts, sps_table

V = 8
GREEDY = SamplingParams(max_tokens=12)


def make_target(**settings: Any) -> TableTarget:
    return TableTarget(random_table(V + 1, V, V, seed=21), mix=0.6, **settings)


def close_drafter(gamma: int = 3, seed: int = 22) -> TableDrafter:
    """Right about half of the time: the target's mean table and some noise."""
    mean = make_target().table.mean(dim=0)
    return TableDrafter(mean + random_table(V, V, seed=seed, scale=0.6), gamma=gamma)


class Oracle(TableDrafter):
    """Drafts what the target will say, with mistakes at chosen absolute positions."""

    def __init__(self, wrong: Sequence[int] = (), gamma: int = 3) -> None:
        super().__init__(torch.zeros(V, V), gamma=gamma, argmax=True)
        self.wrong = set(wrong)

    def propose(self, batch: Any, sampler: Any) -> Any:
        target = make_target()
        rows = []
        for request in batch.requests:
            ids = list(request.ids)
            for _ in range(batch.gamma):
                token = int(target.next_logits(ids).argmax())
                ids.append((token + 1) % V if len(ids) in self.wrong else token)
            rows.append(ids[len(request.ids) :])
        lens = np.array([min(batch.gamma, r.max_draft) for r in batch.requests])
        return sampler.point_mass(torch.tensor(rows), lens)


def make(
    drafter: Any = None,
    *,
    lens: Sequence[int] = (99,),
    gamma: int = 3,
    target: Any = None,
    slots: int = 4,
    **settings: Any,
) -> Engine:
    parts = make_parts(
        CounterDraws(),
        drafter=drafter if drafter is not None else close_drafter(gamma),
        estimator=TableEstimator([[0.9] * V] * gamma),
        scheduler=settings.pop("scheduler", LengthTable(lens)),
        target=target if target is not None else make_target(),
        gamma=gamma,
        cost=settings.pop("cost", None),
    )
    return engine(parts, slots=slots, max_len=32, **settings)


def plain() -> Engine:
    return make(lens=(0,))


def one(made: Engine, prompt: Sequence[int], params: SamplingParams) -> tuple[int, ...]:
    return decode(made, [(prompt, params)])[0]


PROMPTS = ([1, 2, 3], [4], [5, 6, 7, 0, 2, 2, 1])


def test_greedy_equals_one_by_one_with_any_drafter() -> None:
    for prompt in PROMPTS:
        (wanted,) = target_law(make_target().next_logits, prompt, GREEDY)
        assert one(plain(), prompt, GREEDY) == wanted
        for drafter in (close_drafter(), Oracle(), Oracle(wrong=(5, 8)), build("drafters", "ngram", V, 3, min_n=1)):
            assert one(make(drafter), prompt, GREEDY) == wanted


# case 8 ---------------------------------------------------------------------------------------------------------------

SEEDED = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=10)


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


def test_the_budget_caps_drafts() -> None:
    """max_tokens = 2: one draft and the token after it, never more in the forward."""
    made = make(Oracle(gamma=6), gamma=6)
    one(made, [1], SamplingParams(max_tokens=2))
    assert made.parts.target.forwards == [[2]]


# cases 16, 17, 18 -----------------------------------------------------------------------------------------------------


class Recorder:
    def __init__(self) -> None:
        self.records: list[RoundRecord] = []

    def on_round(self, record: RoundRecord) -> None:
        self.records.append(record)

    def on_finish(self, request: Any, reason: str) -> None:
        pass


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


# cases 20, 24, 26 -----------------------------------------------------------------------------------------------------


def test_case_20_no_cost_table_is_a_named_state() -> None:
    made = make(scheduler=build("scheduling", "causal", V, 3))
    with pytest.warns(DSparkWarning, match="no-cost-table"):
        one(made, PROMPTS[0], GREEDY)
    assert made.stats.states["no-cost-table"] >= 1
    assert made.parts.target.forwards[0] == [3 + 3]  # verified at a fixed length


def test_case_20_a_flat_cost_table_is_a_named_state_and_said_once() -> None:
    made = make(scheduler=build("scheduling", "causal", V, 3), cost=sps_table((10.0,) * 8))
    with pytest.warns(DSparkWarning, match="flat-cost") as said:
        one(made, PROMPTS[0], GREEDY)
    assert len([w for w in said if "flat-cost" in str(w.message)]) == 1
    assert made.stats.states["flat-cost"] >= 1


class ByRow:
    """Verifies a length of its own for each row, by slot."""

    from dspark.testing.cheats import HONEST as capabilities

    def __init__(self, lens: Sequence[int]) -> None:
        self.lens = np.array(lens)

    def plan(self, batch: Any, cost: Any = None) -> VerifyPlan:
        return VerifyPlan(np.minimum(self.lens[batch.slots], batch.max_lens), 1.0, float("nan"), "by row")

    def release(self, slot: int, generation: int) -> None:
        pass


def test_case_24_the_target_sees_anchors_and_scheduled_drafts_alone() -> None:
    made = make(close_drafter(), scheduler=ByRow([2, 0, 1]))
    for prompt in PROMPTS:
        made.submit(prompt, GREEDY)
    made.step()
    assert made.parts.target.forwards == [[3 + 2, 1 + 0, 7 + 1]]
    made.step()
    assert made.parts.target.forwards[1] == [1 + 2, 1 + 0, 1 + 1]
    assert made.parts.target.executed == [14, 6]
    assert made.stats.executed_tokens == 20


def test_case_26_without_ragged_batches_the_longest_is_verified_for_all() -> None:
    target = make_target(ragged=False)
    made = make(close_drafter(), scheduler=ByRow([2, 0, 1]), target=target)
    params = [GREEDY, GREEDY, dataclasses.replace(GREEDY, max_tokens=2)]
    for i, p in enumerate(params):
        made.submit([i + 1], p)
    with pytest.warns(DSparkWarning, match="ragged"):
        made.step()
    assert target.forwards == [[3, 3, 2]]  # the third may commit two tokens: one draft
    assert target.executed == [9]
    assert made.stats.executed_tokens == 9
    assert made.stats.states["ragged-padding"] == 1


def test_case_25_a_cost_table_measured_elsewhere_is_refused_with_what_differs() -> None:
    parts = make().parts
    here = parts.target.fingerprint()
    buckets = (ContextBucket(((1, 0.1), (2, 0.11))),)
    fitting = CostProfile(buckets, fingerprint=here)
    assert read_cost(fitting, parts).verify_seconds(2) == pytest.approx(0.11)
    for key in ("model", "device", "dtype"):
        other = CostProfile(buckets, fingerprint={**here, key: "other"})
        with pytest.raises(CostTableError, match=f"{key}: measured on 'other'"):
            read_cost(other, parts)


def test_case_27_a_gamma_beyond_the_drafters_block_is_refused_with_both_numbers() -> None:
    drafter = close_drafter(gamma=5)
    drafter.max_gamma = 5
    with pytest.raises(ConfigError, match=r"7.*5"):
        make(drafter, gamma=7)
    one(make(drafter, gamma=3), [1], GREEDY)


@pytest.mark.parametrize("name", ["causal", "lookahead", "lagged"])
def test_case_28_where_no_draft_pays_none_is_verified(name: str) -> None:
    """A curve so steep that two tokens take three times as long: every forward is plain decoding's."""
    steep = sps_table([1.0 / 3.0**n for n in range(8)])
    made = make(Oracle(), scheduler=build("scheduling", name, V, 3), cost=steep)
    assert one(made, [1], GREEDY) == one(plain(), [1], GREEDY)
    assert made.parts.target.forwards == [[1]] * 12


# cases 30, 31, 32 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lens", [(3, 0, 2, 0, 1), (0, 3, 0), (1, 0), (2, 3, 0, 0, 3)])
@pytest.mark.parametrize("params", [GREEDY, dataclasses.replace(SEEDED, max_tokens=12)], ids=["greedy", "seeded"])
def test_case_30_schedules_with_empty_steps_equal_plain_decoding(lens: Sequence[int], params: SamplingParams) -> None:
    wanted = one(plain(), PROMPTS[0], params)
    for drafter in (Oracle(), Oracle(wrong=(4, 7, 8)), close_drafter()):
        assert one(make(drafter, lens=lens), PROMPTS[0], params) == wanted


def test_case_31_requests_that_accept_different_lengths_and_swap_slots() -> None:
    """Accepting 0, 2 and 5 in one round; one ends, a fourth takes its slot: each equals its solo run."""
    prompts = [[1, 2], [3, 4, 5], [6, 0, 1, 2, 3, 4, 5, 6, 7], [7, 7, 7]]
    budgets = [9, 3, 12, 8]  # drafts of row 0 begin at 2, of row 1 at 3, of row 2 at 9
    requests = [(p, dataclasses.replace(GREEDY, max_tokens=n)) for p, n in zip(prompts, budgets, strict=True)]
    recorder = Recorder()
    made = make(Oracle(wrong=(2, 5), gamma=5), gamma=5, slots=3, observers=[recorder])
    together_ = decode(made, requests)
    assert [c.accepted for c in recorder.records[0].committed] == [0, 2, 5]
    assert recorder.records[0].committed[1].finish_reason == "length"
    views = {c.request.request_id: c.request for r in recorder.records for c in r.committed}
    assert sorted((v.slot, v.generation) for v in views.values()) == [(0, 1), (1, 1), (1, 2), (2, 1)]
    assert together_ == tuple(one(plain(), p, params) for p, params in requests)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_case_32_a_client_leaves_in_mid_flight(params: SamplingParams) -> None:
    wanted = [one(plain(), p, dataclasses.replace(params, max_tokens=10)) for p in PROMPTS]
    made = make(slots=2)
    names = [made.submit(p, dataclasses.replace(params, max_tokens=10)) for p in PROMPTS]
    tokens: dict[str, tuple[int, ...]] = dict.fromkeys(names, ())
    for chunk in made.step():
        tokens[chunk.request_id] += chunk.ids
    assert made.abort(names[0])
    assert not made.abort(names[0])
    chunks = made.step()
    assert [c.finish_reason for c in chunks if c.request_id == names[0]] == ["abort"]
    assert {r.request_id for r in made.batcher.active} >= {names[2]} - {n for n in names if len(tokens[n]) == 10}
    for chunk in [*chunks, *made.run()]:
        tokens[chunk.request_id] += chunk.ids
    assert [tokens[n] for n in names[1:]] == wanted[1:]
    assert tokens[names[0]] == wanted[0][: len(tokens[names[0]])]
    assert len(made.batcher.pool) == 2
    assert set(made.parts.drafter.released) == {(0, 1), (1, 1), (0, 2)}


def test_leaving_a_stream_early_aborts_it() -> None:
    made = make()
    stream = made.stream(PROMPTS[0], GREEDY)
    next(stream)
    stream.close()
    made.step()
    assert made.live() == ()
    assert len(made.batcher.pool) == 4


def test_the_drafter_is_told_every_committed_token_once_and_no_rejected_one() -> None:
    made = make(Oracle(wrong=(4, 6, 9)), slots=2, step_tokens=4)
    outs = decode(made, [(p, GREEDY) for p in PROMPTS])
    seen: dict[tuple[int, int], tuple[int, ...]] = {}
    for slot, generation, ids in made.parts.drafter.committed:
        seen[slot, generation] = seen.get((slot, generation), ()) + ids
    assert sorted(seen.values()) == sorted(outs)


def test_chunked_prefill_changes_nothing() -> None:
    long = [int(t) for t in np.random.default_rng(4).integers(0, V, size=17)]
    params = dataclasses.replace(GREEDY, max_tokens=8)
    wanted = [one(plain(), p, params) for p in (long, PROMPTS[0], long[::-1])]
    for chunk in (1, 3, 5, 16):
        made = make(close_drafter(), step_tokens=chunk, slots=3)
        assert decode(made, [(p, params) for p in (long, PROMPTS[0], long[::-1])]) == tuple(wanted)
        assert max(sum(lens) for lens in made.parts.target.forwards) <= chunk + 3 * 4
        assert made.stats.prefill_tokens == 16 + 2 + 16


def test_schedule_inputs_are_well_formed() -> None:
    """What the engine hands to a scheduler is what the kit hands to one."""
    seen: list[Any] = []

    class Spy(ByRow):
        def plan(self, batch: Any, cost: Any = None) -> VerifyPlan:
            seen.append(batch)
            return super().plan(batch, cost)

    made = make(close_drafter(), scheduler=Spy([3, 3]), slots=2)
    decode(made, [([1], GREEDY), ([2], dataclasses.replace(GREEDY, max_tokens=3))])
    for batch in seen:
        like = schedule_input(batch.probs, max_lens=batch.max_lens)
        assert np.array_equal(batch.survival, like.survival)
        assert (batch.survival[np.arange(3)[None, :] >= batch.max_lens[:, None]] == 0).all()
    assert seen[0].base_tokens == 2
    assert seen[0].max_lens.tolist() == [3, 2]
