"""Faults of the field in what the engine keeps and plans: cost tables, ragged batches, slots, rollbacks, leavers."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from dspark.config import SamplingParams
from dspark.engine.build import read_cost
from dspark.errors import ConfigError, CostTableError, DSparkWarning
from dspark.scheduling.cost import ContextBucket, CostProfile
from dspark.testing.cheats import schedule_input
from dspark.types import VerifyPlan
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
from tests.exactness.harness import build, decode, sps_table

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


@pytest.mark.parametrize("first_right", [None, 2])
def test_drafts_that_are_never_accepted_are_said_once(first_right: int | None) -> None:
    """Every draft is wrong, or all but the one at position 2, which the second round offers."""
    wrong = [p for p in range(32) if p != first_right]
    made = make(Oracle(wrong=wrong), zero_accept_rounds=3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            one(made, [1], GREEDY)
    said = [str(w.message) for w in caught if "no draft accepted" in str(w.message)]
    if first_right is None:
        assert len(said) == 1
        assert "in 3 rounds" in said[0]
        for cause in ("layout", "tap layers", "target", "tokenizer"):
            assert cause in said[0]
    else:
        assert said == [], "a draft was accepted in the first rounds"
