"""The prefix cache: what is taken over, from where, what gives way, and what is never used again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from dspark import EngineConfig, SamplingParams
from dspark.engine.build import build_engine
from dspark.engine.engine import Engine
from dspark.errors import DSparkWarning, RowFault
from dspark.targets.hf import HFTarget
from dspark.testing import TableDrafter
from dspark.testing.suites.target import layout
from dspark.testing.toys import random_table
from tests.engine.cases import GREEDY, SEEDED, Oracle, V, close_drafter, make, make_target
from tests.exactness.harness import decode

SHORT = SamplingParams(max_tokens=4)


def toy(drafter: Any = None, **settings: Any) -> Engine:
    return make(drafter, **{"prefix_min_tokens": 2, **settings})


def run(engine: Engine, prompt: Sequence[int], params: SamplingParams = SHORT) -> tuple[tuple[int, ...], int]:
    """A request's tokens, and how many of its prompt it did not read."""
    before = engine.stats.cached_tokens
    out = decode(engine, [(prompt, params)])[0]
    return out, engine.stats.cached_tokens - before


def alone(prompt: Sequence[int], params: SamplingParams = SHORT) -> tuple[int, ...]:
    return decode(make(lens=(0,), prefix_cache=False), [(prompt, params)])[0]


# what is taken over -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_turns_of_a_conversation_read_what_is_new(tiny_model: Any, drafter: str, params: SamplingParams) -> None:
    def build(kept: bool) -> Engine:
        settings = {"drafter": drafter, "scheduler": "fixed", "max_len": 256, "max_slots": 4, "prefix_cache": kept}
        return build_engine(EngineConfig(**settings), target=HFTarget(tiny_model))

    engine, fresh = build(True), build(False)
    ids, read = [5, 9, 11, 17, 3] * 5, 0
    for turn in range(4):
        (out, cached), (expected, none) = (run(one, ids, params) for one in (engine, fresh))
        assert out == expected
        assert none == 0
        if turn:
            assert cached in (read - 1, read), "all but the last token, or that too where it was a draft"
            assert drafter == "ngram" or cached == read - 1
        read = len(ids) + len(out)
        ids = [*ids, *out, 40 + turn, 41, 42]
    assert engine.stats.prefix_hits == 3
    assert fresh.stats.executed_tokens - engine.stats.executed_tokens == engine.stats.cached_tokens


@pytest.mark.parametrize("step_tokens", [16, 512])
def test_requests_that_come_together_read_their_common_prefix_once(tiny_model: Any, step_tokens: int) -> None:
    system = list(range(2, 62))
    prompts = [[*system, 100 + i, 3, 4 + i] for i in range(7)]

    def build(kept: bool) -> Engine:
        settings = {"drafter": "ngram", "scheduler": "fixed", "max_len": 128, "max_slots": 4, "prefix_cache": kept}
        return build_engine(EngineConfig(step_tokens=step_tokens, **settings), target=HFTarget(tiny_model))

    engine, fresh = build(True), build(False)
    requests = [(prompt, SamplingParams(max_tokens=5 + i)) for i, prompt in enumerate(prompts)]
    assert decode(engine, requests) == decode(fresh, requests)
    assert engine.stats.prefix_hits == 6
    assert engine.stats.cached_tokens > 6 * (len(system) - 16), "what is less than 16 tokens is not waited for"
    assert step_tokens < 60 or engine.stats.cached_tokens == 6 * len(system)
    assert fresh.stats.executed_tokens - engine.stats.executed_tokens == engine.stats.cached_tokens
    assert engine.stats.steps <= fresh.stats.steps + 1


def test_samples_of_one_prompt_read_it_once() -> None:
    engine = toy(slots=4)
    prompt = [1, 2, 3, 4, 5, 6]
    outputs = decode(engine, [(prompt, SEEDED)] * 3)
    assert outputs == (alone(prompt, SEEDED),) * 3
    assert engine.stats.cached_tokens == 2 * 5


def test_those_who_wait_go_on_when_the_one_they_wait_for_leaves() -> None:
    engine = toy(slots=3, step_tokens=2)
    prompt = [1, 2, 3, 4, 5, 6, 7, 0, 1]
    first = engine.submit(prompt, SHORT)
    second = engine.submit([*prompt, 3], SHORT)
    engine.step()
    assert [r.held for r in engine.batcher.active] == [False, True]
    engine.abort(first)
    tokens = [i for chunk in engine.run() if chunk.request_id == second for i in chunk.ids]
    assert tuple(tokens) == alone([*prompt, 3])
    assert engine.stats.cached_tokens == 0, "what the first had read was not proven"


def test_short_prefixes_are_read() -> None:
    engine = toy(prefix_min_tokens=4)
    run(engine, [1, 2, 3, 4, 5])
    assert run(engine, [1, 2, 3, 6])[1] == 0
    assert run(engine, [1, 2, 3, 4, 6])[1] == 4


def test_random_texts_of_one_tree_with_leavers_and_few_slots() -> None:
    """Prompts that go on from each other, or part, beside rejected drafts, ends within a block, and aborts."""
    expected: dict[tuple[Any, ...], tuple[int, ...]] = {}
    hits = 0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        drafter = Oracle(wrong=rng.integers(3, 30, size=8).tolist()) if seed % 2 else close_drafter()
        engine = toy(drafter, slots=3, step_tokens=5, target=make_target(eos_token_ids=[int(rng.integers(V))]))
        eos = engine.parts.target.eos_token_ids
        known: list[list[int]] = [rng.integers(0, V, size=6).tolist() for _ in range(2)]
        asked: dict[str, tuple[tuple[int, ...], SamplingParams]] = {}
        out: dict[str, list[int]] = {}
        for _ in range(10):
            base = known[int(rng.integers(len(known)))]
            cut = base[: int(rng.integers(2, len(base) + 1))]
            prompt = [*cut, *rng.integers(0, V, size=int(rng.integers(0, 3))).tolist()][:20]
            params = SamplingParams(max_tokens=int(rng.integers(1, 9)), seed=seed, temperature=float(rng.integers(2)))
            name = engine.submit(prompt, params)
            asked[name], out[name] = (tuple(prompt), params), []
            for _ in range(int(rng.integers(0, 4))):
                for chunk in engine.step():
                    out[chunk.request_id] += chunk.ids
                    if chunk.finish_reason in ("stop", "length"):
                        known.append([*asked[chunk.request_id][0], *out[chunk.request_id]])
            if rng.random() < 0.2 and engine.live():
                leaver = engine.live()[int(rng.integers(len(engine.live())))].request_id
                engine.abort(leaver)
                del asked[leaver]
        for chunk in engine.run():
            out[chunk.request_id] += chunk.ids
        for name, (prompt, params) in asked.items():
            key = (prompt, eos, str(params))
            if key not in expected:
                plain = make(lens=(0,), prefix_cache=False, target=make_target(eos_token_ids=eos))
                expected[key] = decode(plain, [(prompt, params)])[0]
            assert tuple(out[name]) == expected[key], (seed, prompt, params)
        hits += engine.stats.prefix_hits
    assert hits > 40


# where requests and prefixes are ------------------------------------------------------------------------------------


def parked(engine: Engine) -> dict[int, tuple[int, ...]]:
    assert engine.prefixes is not None
    return {slot: tuple(p.ids[: p.length]) for slot, p in engine.prefixes.parked.items()}


def test_active_requests_stay_low_and_what_they_displace_moves_up() -> None:
    engine = toy(slots=4)
    a, b = [1, 1, 2, 3, 1], [2, 4, 5, 6, 2]
    first = run(engine, a)[0]
    assert list(parked(engine)) == [0]
    second = run(engine, b)[0]
    assert set(parked(engine)) == {0, 3}
    assert parked(engine)[3][:5] == tuple(a)
    out, cached = run(engine, [*a, *first, 4])
    assert (out, cached) == (alone([*a, *first, 4]), len(a) + len(first) - 1)
    assert [slot for slot, ids in parked(engine).items() if ids[:5] == tuple(a)] == [0], "it continues in the lowest"
    out, cached = run(engine, [*b, *second, 4])
    assert (out, cached) == (alone([*b, *second, 4]), len(b) + len(second) - 1)


def test_what_was_used_least_recently_gives_way() -> None:
    engine = toy(slots=4)
    texts = {name: [i, i, i + 1, i, i + 2] for i, name in enumerate("abcde")}
    first, *_ = [run(engine, texts[name])[0] for name in "abc"]
    run(engine, [*texts["a"], *first, 7])  # a is used again
    for name in "de":
        run(engine, texts[name])  # and b is the one to go
    assert {ids[:5] for ids in parked(engine).values()} == {tuple(texts[name]) for name in "acde"}
    assert run(engine, [*texts["b"], 7])[1] == 0


def test_the_longest_prefix_is_taken_and_the_rest_of_it_kept() -> None:
    engine = toy(slots=4)
    short, long = [1, 2, 3, 4], [1, 2, 3, 5, 6, 7, 2, 2]
    run(engine, short)
    run(engine, long)
    out, cached = run(engine, [1, 2, 3, 5, 6, 0])
    assert (out, cached) == (alone([1, 2, 3, 5, 6, 0]), 5)
    out, cached = run(engine, [*long, 4])
    assert (out, cached) == (alone([*long, 4]), len(long)), "the text that the other one parted from is still there"


def test_a_full_house_takes_over_in_place() -> None:
    engine = toy(slots=2)
    texts = [[1, 2, 3, 4], [5, 6, 7, 0]]
    outputs = decode(engine, [(t, SHORT) for t in texts])
    later = [[*t, *out, 1] for t, out in zip(texts, outputs, strict=True)]
    before = engine.stats.cached_tokens
    got = decode(engine, [(later[1], SHORT), (later[0], SHORT)])  # the other way round: each finds its slot
    assert got == (alone(later[1]), alone(later[0]))
    assert engine.stats.cached_tokens - before == 2 * (4 + 4 - 1)


# what is in doubt ---------------------------------------------------------------------------------------------------


def test_a_prompt_that_was_given_up_half_read_is_read_again() -> None:
    engine = toy(step_tokens=3)
    prompt = [1, 2, 3, 4, 5, 6, 7, 1]
    name = engine.submit(prompt, SHORT)
    engine.step()
    assert engine.live()[0].num_cached == 3
    engine.abort(name)
    engine.leave()
    assert run(engine, prompt) == (alone(prompt), 0)


def test_one_that_was_given_up_while_it_wrote_is_kept() -> None:
    engine = toy()
    prompt = [1, 2, 3, 4, 5, 6]
    name = engine.submit(prompt, GREEDY)
    engine.step()
    engine.abort(name)
    engine.leave()
    assert run(engine, prompt) == (alone(prompt), len(prompt) - 1)


class Faulty(TableDrafter):
    """Raises in the third round, for its row or for nobody."""

    def __init__(self, fault: BaseException) -> None:
        super().__init__(random_table(V, V, seed=5), gamma=2)
        self.fault, self.rounds = fault, 0

    def propose(self, batch: Any, sampler: Any) -> Any:
        self.rounds += 1
        if self.rounds == 3:
            raise self.fault
        return super().propose(batch, sampler)


def test_a_request_that_failed_leaves_nothing() -> None:
    engine = toy(Faulty(RowFault("bad row", [0])), gamma=2)
    prompt = [1, 2, 3, 4, 5, 6]
    assert decode(engine, [(prompt, GREEDY)], faults=True) == ((-1,),)
    assert parked(engine) == {}
    assert run(engine, prompt) == (alone(prompt), 0)


def test_what_an_interrupted_step_had_read_is_not_used() -> None:
    engine = toy(Faulty(KeyboardInterrupt()), gamma=2)
    prompt = [1, 2, 3, 4, 5, 6]
    engine.submit(prompt, GREEDY)
    with pytest.raises(KeyboardInterrupt):
        list(engine.run())
    engine.leave()
    assert run(engine, prompt) == (alone(prompt), 0)


def test_who_else_writes_the_targets_cache_is_noticed() -> None:
    """Two engines on one target take turns, as the decoders of a comparison do."""
    target = make_target()
    engine = toy(target=target)
    prompt, other = [1, 2, 3, 4, 5, 6], [7, 7, 7, 7, 7, 7, 7, 7]
    run(engine, prompt)
    second = toy(target=target)
    run(second, other)
    assert run(engine, prompt) == (alone(prompt), 0)
    assert run(engine, prompt)[1] == 5, "its own forwards are known"
    engine.submit(prompt, GREEDY)
    engine.step()
    target.forward(layout(target, [(0, 0, other)]))  # in the middle of a request
    list(engine.run())
    assert run(engine, prompt) == (alone(prompt), 0)


def test_values_that_are_not_finite_are_not_handed_on(tiny_model: Any) -> None:
    target = HFTarget(tiny_model, share=True)
    target.allocate(3, 32)
    text, bad = [5, 6, 7, 8], [5, 6, 7, 8, 9, 10]
    with torch.no_grad():
        wanted = target.forward(layout(target, [(0, 0, [*text, 3])])).logits[-1]
        target.forward(layout(target, [(1, 0, bad)]))
        assert target.copy_prefix(1, 2, 4)
        assert torch.allclose(target.forward(layout(target, [(2, 4, [3])])).logits[-1], wanted, atol=1e-5)
    cache: Any = target._cache
    last = max(cache.values)
    cache.values[last][1, :, 2] = torch.nan
    assert not target.copy_prefix(1, 2, 4), "its values are no numbers"
    assert target.copy_prefix(1, 2, 2)
    cache.values[last][1, :, 2] = 0.0
    cache.suspect = (np.array([1]), torch.tensor([torch.nan]))
    assert not target.copy_prefix(1, 2, 2), "its logits were no numbers"
    cache.suspect = (np.array([2]), torch.tensor([torch.inf]))
    cache.keys[0][2, :, 4:] = torch.nan
    assert target.copy_prefix(0, 2, 4), "the slot that is written may have been anything"
    assert torch.isfinite(cache.keys[0][2]).all()
    with torch.no_grad():
        assert torch.allclose(target.forward(layout(target, [(2, 4, [3])])).logits[-1], wanted, atol=1e-5)


# where it can't be --------------------------------------------------------------------------------------------------


class Reads(TableDrafter):
    """Reads taps, as version 1 knew drafters."""

    tap_layers = (0,)


class Plain:
    """A target as version 1 knew them."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name in ("cache_version", "copy_prefix"):
            raise AttributeError(name)
        return getattr(self.inner, name)


def test_it_is_off_where_it_is_switched_off_or_can_not_be() -> None:
    assert make(prefix_cache=False).prefixes is None
    assert make(Reads(random_table(V, V))).prefixes is None
    assert make(target=Plain(make_target())).prefixes is None
    assert make().prefixes is not None


def test_a_drafter_without_state_of_its_own_is_released_at_once() -> None:
    drafter = close_drafter()
    engine = toy(drafter)
    run(engine, [1, 2, 3, 4])
    assert drafter.released == [(0, 1)]


class Keeps(TableDrafter):
    """Keeps what it is told, and may fail to hand it on."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__(close_drafter().table, gamma=3)
        self.adopted: list[tuple[int, ...]] = []
        self.fails = fails

    def adopt(self, slot: int, generation: int, source: int, source_generation: int, length: int) -> int:
        self.adopted.append((slot, generation, source, source_generation, length))
        if self.fails:
            raise RuntimeError("lost")
        return length


def test_a_drafter_with_state_is_released_when_its_slot_is_taken() -> None:
    drafter = Keeps()
    engine = toy(drafter, slots=2)
    first = run(engine, [1, 2, 3, 4])[0]
    assert drafter.released == []
    run(engine, [1, 2, 3, 4, *first, 5])
    assert drafter.adopted == [(0, 2, 0, 1, 7)]
    assert drafter.released == [(0, 1)]
    run(engine, [6, 6, 6, 6])
    assert drafter.adopted[1:] == [(1, 1, 0, 2, 12)], "moved out of the way"
    assert drafter.released == [(0, 1), (0, 2)]
    engine.close()
    assert sorted(drafter.released[2:]) == [(0, 3), (1, 1)]


def test_a_drafter_that_fails_to_follow_is_switched_off() -> None:
    engine = toy(Keeps(fails=True))
    first = run(engine, [1, 2, 3, 4])[0]
    prompt = [1, 2, 3, 4, *first, 5]
    with pytest.warns(DSparkWarning, match="adopt"):
        assert run(engine, prompt) == (alone(prompt), 7)
    assert not engine.parts.drafting
