"""Faults that were found by attacking the engine's promises: each test failed before its fix."""

from __future__ import annotations

import dataclasses
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from dspark.config import EngineConfig, SamplingParams
from dspark.engine.engine import Engine
from dspark.errors import ComponentError, ConfigError, DSparkError, DSparkWarning, RequestError, RowFault
from dspark.sampling.draws import CounterDraws
from dspark.testing import TableDrafter, TableEstimator, TableTarget
from dspark.testing.cheats import LengthTable
from dspark.testing.toys import random_table
from dspark.types import Mode, ScheduleInput, VerifyPlan
from tests.exactness.harness import decode, engine, make_parts

V = 6
GREEDY = SamplingParams(max_tokens=9)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=6)
PROMPTS = ([1, 2], [3], [4, 5, 0])


def make(
    *,
    target: TableTarget | None = None,
    drafter: Any = None,
    scheduler: Any = None,
    estimator: Any = None,
    slots: int = 3,
    **settings: Any,
) -> Engine:
    table = random_table(V, V, seed=2)
    parts = make_parts(
        CounterDraws(),
        drafter=drafter if drafter is not None else TableDrafter(table, gamma=2),
        estimator=estimator if estimator is not None else TableEstimator([[0.9] * V] * 2),
        scheduler=scheduler if scheduler is not None else LengthTable([99]),
        target=target if target is not None else TableTarget(random_table(V + 1, V, V, seed=1), mix=0.5),
        gamma=2,
    )
    return engine(parts, slots=slots, max_len=32, **settings)


def expected(prompt: Sequence[int], params: SamplingParams = GREEDY) -> tuple[int, ...]:
    return decode(make(), [(prompt, params)])[0]


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """The result of a call that must not hang."""
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(call()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert done, "it hangs"
    return done[0]


class Watcher:
    """An observer that calls something after each round."""

    def __init__(self, call: Callable[[Any], Any]) -> None:
        self.call = call

    def on_round(self, record: Any) -> None:
        self.call(record)

    def on_finish(self, request: Any, reason: str) -> None:
        pass


# streams --------------------------------------------------------------------------------------------------------------


def test_streams_that_take_turns_lose_nothing() -> None:
    made = make()
    streams = [made.stream(p, GREEDY) for p in PROMPTS]
    got: list[list[int]] = [[], [], []]

    def drain() -> list[list[int]]:
        left = set(range(3))
        while left:
            for i in tuple(left):
                chunk = next(streams[i], None)
                if chunk is None:
                    left.discard(i)
                else:
                    got[i] += chunk.ids
        return got

    assert [tuple(ids) for ids in within(20, drain)] == [expected(p) for p in PROMPTS]
    assert not made.live()


def test_what_was_put_aside_can_be_taken_after_the_end() -> None:
    made = make()
    other = made.submit(PROMPTS[1], dataclasses.replace(GREEDY, max_tokens=3))
    assert tuple(i for c in made.stream(PROMPTS[0], GREEDY) for i in c.ids) == expected(PROMPTS[0])
    chunks = made.take(other)
    assert tuple(i for c in chunks for i in c.ids) == expected(PROMPTS[1])[:3]
    assert chunks[-1].finish_reason == "length"
    assert made.take(other) == []


def test_a_late_follower_gets_what_was_put_aside() -> None:
    made = make()
    other = made.submit(PROMPTS[1], GREEDY)
    stream = made.stream(PROMPTS[0], GREEDY)
    first = next(stream)
    late = made.follow()
    late.add(other)
    assert tuple(i for c in late for i in c.ids) == expected(PROMPTS[1])
    assert (*first.ids, *(i for c in stream for i in c.ids)) == expected(PROMPTS[0])


def test_a_stream_of_a_closed_engine_ends() -> None:
    made = make(scheduler=LengthTable([0]))
    stream = made.stream(PROMPTS[0], GREEDY)
    next(stream)
    made.close()
    assert [c.finish_reason for c in within(5, lambda: list(stream))] == ["abort"]


def test_a_stream_whose_chunks_went_to_another_caller_ends() -> None:
    made = make()
    stream = made.stream(PROMPTS[0], GREEDY)
    assert tuple(i for c in made.run() for i in c.ids) == expected(PROMPTS[0])
    assert within(5, lambda: list(stream)) == []


def test_a_refused_stream_says_so_at_once() -> None:
    with pytest.raises(RequestError, match="99"):
        make().stream([99], GREEDY)


@pytest.mark.parametrize("how", ["closed", "forgotten", "never begun"])
def test_a_stream_that_is_left_frees_slot_and_key(how: str) -> None:
    made = make(scheduler=LengthTable([0]), slots=1)
    params = dataclasses.replace(SAMPLED, request_key=5)
    stream: Any = made.stream(PROMPTS[0], params)
    if how != "never begun":
        next(stream)
    if how == "closed":
        stream.close()
        assert not made.live(), "free at once"
    stream = None
    assert [i for c in made.stream(PROMPTS[1], GREEDY) for i in c.ids] == list(expected(PROMPTS[1]))
    assert not made.live()
    assert len(made.batcher.pool) == 1
    assert len(decode(made, [(PROMPTS[0], params)])[0]) == 6
    assert made._readers == {}
    assert made._aside == {}


# aborts ---------------------------------------------------------------------------------------------------------------


def test_an_abort_from_an_observer_ends_one_request_once() -> None:
    made = make(scheduler=LengthTable([0]))
    made._observers.append(("watcher", Watcher(lambda record: made.abort("x"))))
    made.submit(PROMPTS[0], GREEDY, request_id="x")
    made.submit(PROMPTS[1], GREEDY, request_id="y")
    chunks = list(made.run())
    assert [c.finish_reason for c in chunks if c.request_id == "x"] == [None, "abort"]
    assert tuple(i for c in chunks if c.request_id == "y" for i in c.ids) == expected(PROMPTS[1])
    assert made.stats.finished == {"abort": 1, "length": 1}
    assert len(made.batcher.pool) == 3


def test_an_abort_in_the_middle_of_a_round_is_not_forgotten() -> None:
    class Aborts:
        def fork(self) -> Aborts:
            return self

        def advance(self, token_id: int) -> None:
            pass

        def process(self, logits: torch.Tensor) -> torch.Tensor:
            made.abort("x")
            return logits

    made = make(scheduler=LengthTable([0]))
    made.submit(PROMPTS[0], dataclasses.replace(GREEDY, logits_processors=(Aborts(),)), request_id="x")
    assert [c.finish_reason for c in made.run()] == [None, "abort"]
    assert made.stats.finished == {"abort": 1}


def test_an_abort_of_a_request_that_ends_in_the_same_step() -> None:
    made = make(scheduler=LengthTable([0]))
    answers: list[bool] = []
    made._observers.append(("watcher", Watcher(lambda record: answers.append(made.abort("x")))))
    made.submit(PROMPTS[0], dataclasses.replace(GREEDY, max_tokens=1), request_id="x")
    assert [c.finish_reason for c in made.run()] == ["length"]
    assert answers == [False]
    made.submit(PROMPTS[0], GREEDY, request_id="x")  # the name is free, and its abort is not left over
    assert made.step()[0].finish_reason is None


@pytest.mark.parametrize("prefilled", [False, True])
def test_an_abort_in_the_queue_and_in_the_middle_of_a_prompt(prefilled: bool) -> None:
    made = make(slots=1, step_tokens=2)
    params = dataclasses.replace(SAMPLED, request_key=9)
    first = made.submit([1, 2, 3, 4, 5], params)
    queued = [made.submit(p, GREEDY) for p in PROMPTS]
    if prefilled:
        made.step()
    assert made.abort(first)
    assert made.abort(queued[0])
    assert not made.abort(queued[0])
    outputs: dict[str, tuple[int, ...]] = dict.fromkeys(queued, ())
    for chunk in made.run():
        outputs[chunk.request_id] = (*outputs.get(chunk.request_id, ()), *chunk.ids)
    assert [outputs[n] for n in queued] == [(), expected(PROMPTS[1]), expected(PROMPTS[2])]
    assert len(made.batcher.pool) == 1
    made.submit([1], params)  # its key is free


def test_what_escapes_a_step_ends_its_requests_since_a_round_is_never_retried() -> None:
    """METHOD section 4, rule 6: the same keys would be drawn again, and some tokens could be lost."""
    made = make(slots=2)
    forward, calls = made.parts.target.forward, []

    def interrupted(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return forward(*args)

    made.parts.target.forward = interrupted  # type: ignore[method-assign]
    names = [made.submit(p, SAMPLED) for p in PROMPTS]
    with pytest.raises(KeyboardInterrupt):
        list(made.run())
    rest = list(made.run())
    assert [c.finish_reason for c in rest if c.request_id in names[:2]] == ["abort", "abort"]
    assert sum(len(c.ids) for c in rest if c.request_id == names[2]) == 6
    assert len(made.batcher.pool) == 2


# admission ------------------------------------------------------------------------------------------------------------


def test_a_name_that_the_caller_took_is_not_given_again() -> None:
    made = make()
    made.submit([1], GREEDY, request_id="request-1")
    assert len({made.submit([1], GREEDY) for _ in range(3)} | {"request-1"}) == 4


@pytest.mark.parametrize("bad", [["x"], 5, b"x"])
def test_a_name_that_is_no_string_is_refused_and_holds_no_key(bad: Any) -> None:
    made = make()
    params = dataclasses.replace(SAMPLED, request_key=5)
    with pytest.raises(RequestError, match="request_id"):
        made.submit([1], params, request_id=bad)
    made.submit([1], params)


@pytest.mark.parametrize("ids", [[1.7], ["1"], [None], 5, [[1]]])
def test_token_ids_are_integers(ids: Any) -> None:
    with pytest.raises(RequestError, match="prompt"):
        make().submit(ids, GREEDY)


def test_numpy_and_torch_ids_are_taken() -> None:
    for ids in (np.array(PROMPTS[0]), torch.tensor(PROMPTS[0])):
        assert decode(make(), [(ids, GREEDY)])[0] == expected(PROMPTS[0])


def test_parameters_of_another_type_are_refused() -> None:
    with pytest.raises(RequestError, match="dict"):
        make().submit([1], {"max_tokens": 3})  # type: ignore[arg-type]


def test_a_processor_that_can_not_be_forked_is_refused_and_holds_no_key() -> None:
    class Broken:
        def fork(self) -> Any:
            raise ZeroDivisionError("fork")

        def advance(self, token_id: int) -> None: ...

        def process(self, logits: Any) -> Any: ...

    made = make()
    with pytest.raises(RequestError, match="ZeroDivisionError"):
        made.submit([1], dataclasses.replace(SAMPLED, request_key=5, logits_processors=(Broken(),)))
    made.submit([1], dataclasses.replace(SAMPLED, request_key=5))


def test_a_closed_engine_refuses_requests() -> None:
    made = make()
    made.close()
    made.close()
    with pytest.raises(DSparkError, match="closed"):
        made.submit([1], GREEDY)


def test_queues_of_thousands_cost_the_same_a_request() -> None:
    """Names, aborts and admission do not look at every live request: the work a request is constant."""
    import sys

    def lines(count: int) -> int:
        made, seen = make(), 0

        def trace(frame: Any, event: str, arg: Any) -> Any:
            nonlocal seen
            seen += event == "line" and "/dspark/engine/" in frame.f_code.co_filename
            return trace

        sys.settrace(trace)
        try:
            names = [made.submit([1], GREEDY) for _ in range(count)]
            for name in names:
                made.abort(name)
            made.leave()
        finally:
            sys.settrace(None)
        assert not made.live()
        return seen

    assert lines(400) < 4.5 * lines(100)


# faults ---------------------------------------------------------------------------------------------------------------


class Strays(TableDrafter):
    """Row 0 drafts a token that the target does not have."""

    def propose(self, batch: Any, sampler: Any) -> Any:
        block = super().propose(batch, sampler)
        tokens = block.token_ids.clone()
        for row, request in enumerate(batch.requests):
            if request.request_id == "bad":
                tokens[row, 0] = V + 3
        return dataclasses.replace(block, token_ids=tokens)


def test_a_draft_outside_the_vocabulary_ends_its_own_request_alone() -> None:
    made = make(drafter=Strays(random_table(V, V, seed=2)))
    made.submit(PROMPTS[0], GREEDY, request_id="bad")
    made.submit(PROMPTS[1], GREEDY, request_id="good")
    chunks = list(made.run())
    (error,) = [c.error for c in chunks if c.error is not None]
    assert isinstance(error, ComponentError)
    assert (error.phase, error.request_ids) == ("draft", ("bad",))
    assert tuple(i for c in chunks if c.request_id == "good" for i in c.ids) == expected(PROMPTS[1])


def test_a_target_that_returns_other_rows_is_loud() -> None:
    class AllRows(TableTarget):
        def forward(self, layout: Any, taps: Any = ()) -> Any:
            every = dataclasses.replace(layout, logit_rows=np.arange(layout.num_tokens))
            return super().forward(every, taps)

    made = make(target=AllRows(random_table(V + 1, V, V, seed=1)))
    made.submit(PROMPTS[0], GREEDY)
    (chunk,) = made.run()
    assert isinstance(chunk.error, ComponentError)
    assert chunk.error.phase == "target"


def test_a_target_that_can_not_count_ends_requests_not_the_engine() -> None:
    class Miscounts(TableTarget):
        def forward(self, layout: Any, taps: Any = ()) -> Any:
            self.inside = True
            try:
                return super().forward(layout, taps)
            finally:
                self.inside = False

        def executed_tokens(self, layout: Any) -> int:
            if not getattr(self, "inside", False):
                raise RuntimeError("no idea")
            return super().executed_tokens(layout)

    made = make(target=Miscounts(random_table(V + 1, V, V, seed=1)))
    made.submit(PROMPTS[0], GREEDY)
    assert [c.finish_reason for c in made.run()] == ["error"]
    assert len(made.batcher.pool) == 3


@pytest.mark.parametrize("rows", [[], [7], [-1]])
def test_a_fault_that_names_no_row_of_the_batch_is_the_whole_batchs(rows: list[int]) -> None:
    """Else both rows would verify everything because of what was drawn, and nothing would say so."""

    class Nameless(LengthTable):
        def plan(self, batch: ScheduleInput, cost: Any = None) -> VerifyPlan:
            raise RowFault("somewhere", rows)

    made = make(scheduler=Nameless([0]))
    with pytest.warns(DSparkWarning, match="somewhere"):
        decode(made, [(p, SAMPLED) for p in PROMPTS[:2]])
    assert made.stats.unproven_rounds == 1
    assert not made.parts.planning


@pytest.mark.parametrize("lens", [np.full(1, np.nan), np.full(1, 0.5)])
def test_verify_lengths_that_are_no_integers_are_a_fault_of_the_scheduler(lens: Any) -> None:
    class Floats(LengthTable):
        def plan(self, batch: ScheduleInput, cost: Any = None) -> VerifyPlan:
            return VerifyPlan(lens, 1.0, 1.0, "floats")

    made = make(scheduler=Floats([0]))
    with pytest.warns(DSparkWarning, match="schedule"):
        assert decode(made, [(PROMPTS[0], GREEDY)])[0] == expected(PROMPTS[0])
    assert made.stats.faults["scheduler:schedule"] == 1


def test_a_fault_of_the_calibrator_names_the_calibrator() -> None:
    made = make()
    made.parts.calibrator = type("Half", (), {"calibrate": lambda self, probs, batch: probs[:, :1]})()
    with pytest.warns(DSparkWarning, match="calibrator failed"):
        decode(made, [(PROMPTS[0], GREEDY)])
    assert made.stats.faults == {"calibrator:confidence": 1}


def test_a_component_that_was_switched_off_is_left_alone() -> None:
    drafter = TableDrafter(random_table(V, V, seed=2))
    calls: list[tuple[int, int]] = []

    def release(slot: int, generation: int) -> None:
        calls.append((slot, generation))
        raise KeyError((slot, generation))

    drafter.release = release  # type: ignore[method-assign]
    made = make(drafter=drafter)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(4):
            decode(made, [(PROMPTS[0], GREEDY)])
    assert len(calls) == len(said) == 1


def test_schedulers_are_told_whose_averages_a_row_shares() -> None:
    """METHOD section 4: running averages are those of one verifier and temperature."""
    seen: list[list[int]] = []

    class Spy(LengthTable):
        def plan(self, batch: ScheduleInput, cost: Any = None) -> VerifyPlan:
            assert batch.groups is not None
            seen.append(batch.groups.tolist())
            return super().plan(batch, cost)

    made = make(scheduler=Spy([0]), slots=5)
    warm = dataclasses.replace(SAMPLED, temperature=0.5)
    for params in (GREEDY, SAMPLED, warm, dataclasses.replace(SAMPLED, seed=3), SAMPLED):
        made.submit([1], dataclasses.replace(params, max_tokens=3))
    list(made.run())
    assert seen == [[0, 1, 2, 3, 1]] * 2
    assert made.parts.verifiers[Mode.REJECTION] is not None


def test_the_last_chunk_has_text_where_there_is_a_tokenizer(tiny_model: Any, tiny_tokenizer: Any) -> None:
    from dspark.api import SpeculativeDecoder

    made = SpeculativeDecoder.from_pretrained(tiny_model, "none", tokenizer=tiny_tokenizer, max_len=64).engine
    stream = made.stream([5, 6], SamplingParams(max_tokens=20, ignore_eos=True))
    text = [next(stream).text]
    made.abort("request-0")
    text += [c.text for c in stream]
    assert all(isinstance(t, str) for t in text)


# configuration --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": "no"},
        {"ignore_eos": None},
        {"stop": None},
        {"stop": [5]},
        {"stop_token_ids": 5},
        {"stop_token_ids": [True]},
        {"stop_token_ids": [-1]},
        {"logit_bias": {"a": 1.0}},
        {"logit_bias": {1.7: 1.0}},
        {"logit_bias": {1: "much"}},
        {"logit_bias": {1: float("nan")}},
        {"logit_bias": 5},
        {"logits_processors": 5},
        {"max_tokens": True},
        {"max_tokens": np.float64(3.0)},
    ],
    ids=str,
)
def test_bad_parameters_are_config_errors_that_name_the_field(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        SamplingParams(**settings)


def test_numpys_numbers_are_numbers() -> None:
    params = SamplingParams(
        max_tokens=np.int64(3), temperature=np.float32(0.5), seed=np.uint64(2**63), top_k=np.int32(2)
    )
    assert [type(getattr(params, n)) for n in ("max_tokens", "temperature", "seed", "top_k")] == [int, float, int, int]
    assert SamplingParams(stop_token_ids=np.array([3]), logit_bias={np.int64(2): 1}).stop_token_ids == (3,)
    assert EngineConfig(max_slots=np.int64(4)).max_slots == 4


@pytest.mark.parametrize(
    "settings",
    [
        {"drafter": None},
        {"verifier": 3},
        {"seed": "abc"},
        {"seed": -1},
        {"seed": True},
        {"drafter_config": "x"},
        {"overrides": 5},
    ],
    ids=str,
)
def test_bad_engine_settings_are_config_errors_that_name_the_field(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        EngineConfig(**settings)


# rows that no decision reaches ----------------------------------------------------------------------------------------

EOS = V - 1


class EndsAtEos:
    """A grammar that allows anything until EOS, and nothing after it."""

    def __init__(self, ended: bool = False) -> None:
        self.ended = ended

    def fork(self) -> EndsAtEos:
        return EndsAtEos(self.ended)

    def advance(self, token_id: int) -> None:
        assert not self.ended
        self.ended = token_id == EOS

    def process(self, logits: torch.Tensor) -> torch.Tensor:
        if self.ended:
            raise RuntimeError("asked after the end")
        return logits


def cycle() -> torch.Tensor:
    """Logits [V, V] that count upwards."""
    table = torch.zeros(V, V, dtype=torch.float64)
    table[torch.arange(V), (torch.arange(V) + 1) % V] = 9.0
    return table


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 1}, {"temperature": 1.0, "top_p": 0.9}], ids=str)
def test_a_processor_is_not_asked_for_what_follows_a_drafted_eos(params: dict[str, Any]) -> None:
    """EOS is drafted in the middle of a block: the output ends there, as it does without a drafter."""
    made = make(target=TableTarget(cycle(), eos_token_ids=(EOS,)), drafter=TableDrafter(cycle(), gamma=2))
    made.submit([V - 3], SamplingParams(max_tokens=9, logits_processors=(EndsAtEos(),), **params))
    made.submit([V - 2], SamplingParams(max_tokens=9, logits_processors=(EndsAtEos(),), **params))
    chunks = list(made.run())
    assert [c.error for c in chunks if c.error] == []
    assert made.stats.finished["stop"] == 2


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 1}, {"temperature": 1.0}], ids=str)
def test_logits_after_a_rejected_draft_may_be_anything(params: dict[str, Any]) -> None:
    """The target is broken after token 5, which is drafted but never right: nothing depends on what was drafted."""
    broken = cycle()
    broken[:, 5] = -torch.inf
    broken[5] = torch.nan
    wrong = torch.full((V, V), -torch.inf, dtype=torch.float64)
    wrong[:, 5] = 0.0
    made = make(target=TableTarget(broken), drafter=TableDrafter(wrong, gamma=2))
    made.submit([0], SamplingParams(max_tokens=3, **params))
    chunks = list(made.run())
    assert [c.error for c in chunks if c.error] == []
    assert sum(len(c.ids) for c in chunks) == 3


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 1}, {"temperature": 1.0}], ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_without_a_finite_score_ends_its_own_request_alone(value: float, params: dict[str, Any]) -> None:
    table = cycle()
    table[5] = value
    made = make(target=TableTarget(table), drafter=TableDrafter(cycle(), gamma=2))
    made.submit([4], SamplingParams(max_tokens=5, **params), request_id="bad")
    made.submit([0], SamplingParams(max_tokens=4, **params), request_id="good")
    chunks = list(made.run())
    assert [c.finish_reason for c in chunks if c.request_id == "bad"][-1] == "error"
    assert sum(len(c.ids) for c in chunks if c.request_id == "good") == 4
