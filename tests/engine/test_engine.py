"""The engine on a real (tiny, random) transformers model: continuous batching, prefill, abort, streams, limits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dspark import EngineConfig, RequestError, SamplingParams
from dspark.engine.build import build_engine
from dspark.engine.engine import Engine
from dspark.targets.hf import HFTarget

PROMPTS = [list(range(2, 2 + n)) * 3 for n in (3, 11, 5, 29, 7)]
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture
def make(tiny_model: Any) -> Any:
    def build(**settings: Any) -> Engine:
        settings = {"drafter": "ngram", "scheduler": "fixed", "max_len": 256, "max_slots": 4, **settings}
        return build_engine(EngineConfig(**settings), target=HFTarget(tiny_model))

    return build


def reference(model: Any, prompt: list[int], tokens: int) -> list[int]:
    out = model.generate(
        torch.tensor([prompt]), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


def drain(engine: Engine) -> dict[str, list[int]]:
    out: dict[str, list[int]] = {}
    for chunk in engine.run():
        assert chunk.error is None
        out.setdefault(chunk.request_id, []).extend(chunk.ids)
    return out


@pytest.mark.parametrize("drafter", ["none", "ngram"])
@pytest.mark.parametrize("step_tokens", [4, 512])
def test_greedy_equals_generate_in_a_batch_with_chunked_prefill(
    tiny_model: Any, make: Any, drafter: str, step_tokens: int
) -> None:
    model = tiny_model
    engine = make(drafter=drafter, step_tokens=step_tokens, max_slots=3)
    names = [engine.submit(p, SamplingParams(max_tokens=24, min_tokens=24)) for p in PROMPTS]
    out = drain(engine)
    for name, prompt in zip(names, PROMPTS, strict=True):
        assert out[name] == reference(model, prompt, 24)
    assert engine.stats.finished["length"] == len(PROMPTS)
    assert len(engine.batcher.pool) == 3
    if drafter == "ngram":
        assert engine.stats.acceptance.accepted_length > 1.2, "a random model loops; ngram must find it"
    if step_tokens == 4:
        assert max(len(p) for p in PROMPTS) > 4
        assert engine.stats.prefill_tokens == sum(len(p) - 1 for p in PROMPTS)


def test_requests_join_and_leave_in_mid_flight(make: Any) -> None:
    alone = make()
    first = alone.submit(PROMPTS[0], GREEDY)
    expected = drain(alone)[first]
    engine = make(max_slots=2)
    late: list[str] = []
    got: list[int] = []
    name = engine.submit(PROMPTS[0], GREEDY)
    engine.submit(PROMPTS[1], GREEDY, request_id="leaver")
    for _ in range(200):
        for chunk in engine.step():
            if chunk.request_id == name:
                got += chunk.ids
        if engine.stats.steps == 3:
            assert engine.abort("leaver")
            late = [engine.submit(p, GREEDY) for p in PROMPTS[2:4]]
        if not engine.has_work:
            break
    assert late
    assert got == expected
    assert not engine.live()
    assert len(engine.batcher.pool) == 2


def test_an_abort_frees_the_slot_at_the_next_step_and_is_reported(make: Any) -> None:
    engine = make(max_slots=1)
    first = engine.submit(PROMPTS[0], GREEDY)
    second = engine.submit(PROMPTS[2], GREEDY)
    engine.step()
    assert engine.abort(first)
    assert not engine.abort(first), "it has left"
    chunks = engine.step()
    assert [c.request_id for c in chunks if c.finish_reason == "abort"] == [first]
    assert [r.request_id for r in engine.batcher.active] == [second]
    waiting = engine.submit(PROMPTS[3], GREEDY)
    assert engine.abort(waiting)
    assert drain(engine)[waiting] == []


def test_stream_keeps_what_other_requests_got(make: Any) -> None:
    engine = make()
    other = engine.submit(PROMPTS[1], GREEDY)
    ids = [i for chunk in engine.stream(PROMPTS[0], GREEDY) for i in chunk.ids]
    assert len(ids) == 24
    kept = [i for chunk in engine.take(other) for i in chunk.ids]
    rest = drain(engine).get(other, [])
    alone = make()
    name = alone.submit(PROMPTS[1], GREEDY)
    assert kept + rest == drain(alone)[name] or (len(kept) == 0 and not rest)


def test_leaving_a_stream_aborts_its_request(make: Any) -> None:
    engine = make()
    stream = engine.stream(PROMPTS[0], GREEDY)
    next(stream)
    stream.close()
    engine.step()
    assert not engine.live()


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ([], GREEDY, "prompt"),
        ([1, 300], GREEDY, "300"),
        ([1, -1], GREEDY, "-1"),
        ([1] * 250, GREEDY, "max_len"),
        ([1], SamplingParams(stop=["x"]), "stop"),
        ([1], SamplingParams(stop_token_ids=[300]), "300"),
        ([1], SamplingParams(logit_bias={300: 1.0}), "300"),
        ([1], SamplingParams(n=2), "n:"),
        ([1], SamplingParams(logits_processors=[object()]), "processor"),
    ],
)
def test_a_bad_request_is_refused_by_name_and_costs_nobody(
    make: Any, prompt: list[int], params: SamplingParams, field: str
) -> None:
    engine = make()
    name = engine.submit(PROMPTS[0], GREEDY)
    with pytest.raises(RequestError, match=field):
        engine.submit(prompt, params)
    assert len(drain(engine)[name]) == 24


def test_request_ids_and_keys_are_unique_while_live(make: Any) -> None:
    engine = make()
    engine.submit(PROMPTS[0], GREEDY, request_id="a")
    with pytest.raises(RequestError, match="'a'"):
        engine.submit(PROMPTS[0], GREEDY, request_id="a")
    sampled = SamplingParams(max_tokens=4, temperature=1.0, request_key=9)
    engine.submit(PROMPTS[0], sampled)
    with pytest.raises(RequestError, match="key 9"):
        engine.submit(PROMPTS[0], sampled)
    drain(engine)
    engine.submit(PROMPTS[0], sampled)
    assert drain(engine)


def test_seeded_sampling_is_the_same_alone_in_a_batch_and_under_any_schedule(make: Any) -> None:
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=7, ignore_eos=True)
    runs = []
    for settings in ({"drafter": "none"}, {}, {"scheduler": "threshold"}, {"scheduler": "off"}, {"gamma": 2}):
        engine = make(**settings)
        name = engine.submit(PROMPTS[0], params)
        for prompt in PROMPTS[1:] if settings else []:
            engine.submit(prompt, SamplingParams(max_tokens=9, temperature=0.8, ignore_eos=True))
        runs.append(drain(engine)[name])
    assert all(run == runs[0] for run in runs)
    assert len(set(runs[0])) > 4


def test_a_cache_that_does_not_fit_is_refused_with_both_sizes(tiny_model: Any) -> None:
    from dspark import CapacityError

    with pytest.raises(CapacityError, match=r"bytes|B"):
        build_engine(EngineConfig(max_slots=64, max_len=512, kv_budget_bytes=10_000), target=HFTarget(tiny_model))


def test_all_but_tied_greedy_tokens_are_counted_where_asked(make: Any, tiny_model: Any) -> None:
    import copy

    counts = {}
    for tied in (False, True):
        model = copy.deepcopy(tiny_model)
        if tied:  # every logit is 0
            model.model.norm.weight.data.zero_()
        engine = build_engine(
            EngineConfig(drafter="none", max_len=64, max_slots=2, count_margins=True), target=HFTarget(model)
        )
        engine.submit(PROMPTS[0], SamplingParams(max_tokens=6, ignore_eos=True))
        drain(engine)
        counts[tied] = engine.stats.low_margins
    assert counts == {False: 0, True: 6}
    engine = make(drafter="none")
    engine.submit(PROMPTS[0], GREEDY)
    drain(engine)
    assert engine.stats.low_margins == 0
