"""Attention plans: every sequence once, and no more padding than it is worth."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.targets.plan import LONG_QUERY, AttentionCost, Group, plan_groups

COST = AttentionCost.of("cpu", kv_heads=3, fold=3, head_dim=64)


def price(groups: tuple[Group, ...]) -> float:
    return sum(COST.group(g.batch, g.q_len, g.k_len, g.gathered) for g in groups)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4000), st.sampled_from([1, 1, 1, 2, 5, 8, 33, 200])), min_size=1, max_size=40),
    st.randoms(use_true_random=False),
)
def test_plans_cover_every_sequence_once(lengths: list[tuple[int, int]], random: object) -> None:
    slots = random.sample(range(64), len(lengths))  # type: ignore[attr-defined]
    starts, queries = [s for s, _ in lengths], [q for _, q in lengths]
    groups = plan_groups(slots, starts, queries, COST)
    assert sorted(seq for g in groups for seq in g.seqs) == list(range(len(lengths)))
    for g in groups:
        assert g.q_len == max(queries[s] for s in g.seqs)
        assert g.k_len == max(starts[s] + queries[s] for s in g.seqs)
        assert [slots[s] for s in g.seqs] == sorted(slots[s] for s in g.seqs)
        if not g.gathered:
            assert all(g.first_slot <= slots[s] < g.first_slot + g.num_slots for s in g.seqs)
        if g.q_len > LONG_QUERY:
            assert len(g.seqs) == 1
    short = [i for i, q in enumerate(queries) if q <= LONG_QUERY]
    if short:
        batched = tuple(g for g in groups if g.q_len <= LONG_QUERY)
        low, high = min(slots[s] for s in short), max(slots[s] for s in short) + 1
        whole = COST.group(high - low, max(queries[s] for s in short), max(starts[s] + queries[s] for s in short))
        assert price(batched) <= 1.1 * whole


def test_equal_decoding_rows_are_one_view() -> None:
    (group,) = plan_groups(list(range(32)), [64] * 32, [1] * 32, COST)
    assert (group.num_slots, group.q_len, group.k_len, group.gathered) == (32, 1, 65, False)


@pytest.mark.parametrize("order", ["blocks", "alternating"])
def test_unequal_contexts_do_not_all_cost_the_longest(order: str) -> None:
    starts = [40] * 16 + [4000] * 16 if order == "blocks" else [40, 4000] * 16
    groups = plan_groups(list(range(32)), starts, [1] * 32, COST)
    assert price(groups) < 0.9 * COST.group(32, 1, 4001)
    if order == "blocks":
        assert [(g.num_slots, g.k_len) for g in groups] == [(16, 41), (16, 4001)]


def test_one_long_context_does_not_burden_the_rest() -> None:
    groups = plan_groups(list(range(32)), [40] * 15 + [4000] + [40] * 16, [1] * 32, COST)
    assert sorted((len(g.seqs), g.k_len) for g in groups if g.k_len > 1000) == [(1, 4001)]


def test_a_plan_is_a_function_of_the_layout() -> None:
    arguments = (list(range(20)), [37 * i % 400 for i in range(20)], [1 + i % 5 for i in range(20)], COST)
    assert plan_groups(*arguments) == plan_groups(*arguments)
