"""Traces of the real engine, and replays that give its rounds back."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark import _sched
from dspark.bench.load import Closed, EngineBackend, Job, run_load
from dspark.bench.simulation import Policy, World, replay
from dspark.bench.trace import AcceptanceTrace, TraceRecorder, record_trace, recording_settings
from dspark.config import SamplingParams
from dspark.errors import EvaluationError
from tests.bench.conftest import DSPARK, prompts

GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
COST = _sched.CostTable([(1, 1.0), (2, 1.1), (201, 21.0)])


def record(build: Callable[..., Any], drafter: str, params: SamplingParams, **settings: Any) -> AcceptanceTrace:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        decoder = build(drafter, **recording_settings(params), **settings)
        return record_trace(decoder, prompts(), lambda i: params)


@pytest.mark.parametrize("drafter", ["ngram", DSPARK], ids=["ngram", "dspark"])
@pytest.mark.parametrize("length", [None, 1], ids=["full", "one"])
def test_a_replay_gives_the_rounds_of_the_engine(build: Callable[..., Any], drafter: str, length: int | None) -> None:
    """Whatever is verified, a dense trace knows the outcome: steps, rounds and acceptance are the engine's own."""
    trace = record(build, drafter, GREEDY, gamma=4)
    assert trace.dense
    assert trace.taps == (drafter == DSPARK)
    assert trace.learned == (drafter == "ngram")
    settings = {"scheduler": "fixed", "gamma_policy": "static", "gamma": 4}
    if length is not None:
        settings["scheduler_config"] = {"length": length}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        decoder = build(drafter, **settings)
        jobs = [Job(str(i), tuple(ids), GREEDY) for i, ids in enumerate(prompts())]
        run_load(EngineBackend(decoder.engine), jobs, Closed(2))
    real = decoder.stats
    found = _sched.simulate(
        trace.native(), COST, requests=4, concurrency=2, scheduler="fixed", length=length, step_tokens=512
    )
    assert found["steps"] == real.steps
    assert found["tokens"] == real.acceptance.committed == 4 * 24
    assert found["rounds"] == real.acceptance.rounds
    assert found["accepted"] == sum(real.acceptance.accepted)
    assert found["verified"] == real.verified
    assert found["executed_tokens"] == real.executed_tokens
    assert found["prompt_tokens"] == sum(len(p) for p in prompts())


def test_a_dense_trace_knows_every_place(build: Callable[..., Any]) -> None:
    trace = record(build, DSPARK, GREEDY)
    for request in trace.requests:
        assert request.at == tuple(range(1, 23)), "all but the prompt's step, and the last place, which has no room"
        assert all(0 <= a <= d for a, d in zip(request.accepted, request.drafted, strict=True))
        assert [len(p) for p in request.probs] == list(request.drafted)
        assert {c for row in request.probs for c in row} != {0.0}
    assert trace.about["drafter"] == "dspark/dspark"


def test_sampled_requests_are_recorded_at_full_length(build: Callable[..., Any]) -> None:
    params = SamplingParams(max_tokens=24, temperature=1.0, ignore_eos=True)
    trace = record(build, DSPARK, params)
    assert not trace.dense
    for request in trace.requests:
        ends = [at + accepted + 1 for at, accepted in zip(request.at, request.accepted, strict=True)]
        assert list(request.at[1:]) == ends[: len(request.at) - 1], "a round begins where the one before ended"
        assert request.output_tokens == 24
    full = replay(World(trace, COST, least_requests=4, requests_per_user=1), Policy("fixed"), Closed(1))
    rounds = sum(len(r.at) + 1 for r in trace.requests)  # one of each reads the prompt
    assert abs(full.figures["rounds"] - rounds) <= 4, "a draft that was cut at the end may have had no room"


def test_a_trace_survives_its_file(build: Callable[..., Any], tmp_path: Path) -> None:
    trace = record(build, "ngram", GREEDY)
    path = tmp_path / "deep" / "trace.jsonl"
    trace.save(path)
    assert AcceptanceTrace.load(path) == trace
    lines = path.read_text(encoding="utf-8").splitlines()
    broken = json.loads(lines[2])
    broken["accepted"] = "many"
    for bad, why in (
        ([], "line 1"),
        (["{}"], "line 1.*no dspark-trace"),
        ([*lines[:2], json.dumps(broken)], "line 3"),
        ([lines[0]], "at least one request"),
    ):
        path.write_text("\n".join(bad), encoding="utf-8")
        with pytest.raises(EvaluationError, match=why):
            AcceptanceTrace.load(path)
    with pytest.raises(EvaluationError, match="can't read"):
        AcceptanceTrace.load(tmp_path / "none")


def test_contradictions_are_refused(build: Callable[..., Any]) -> None:
    trace = record(build, "ngram", GREEDY)
    request = trace.requests[0]
    wrong = dataclasses.replace(request, accepted=tuple(n + 9 for n in request.accepted))
    with pytest.raises(EvaluationError, match="accepted"):
        dataclasses.replace(trace, requests=(wrong,)).native()


def test_an_engine_that_verifies_records_no_greedy_trace(build: Callable[..., Any]) -> None:
    with pytest.raises(EvaluationError, match=r"dspark/off, not dspark/causal"):
        record_trace(build("ngram"), prompts(), lambda i: GREEDY)


def test_an_aborted_request_leaves_nothing(build: Callable[..., Any]) -> None:
    decoder = build("ngram", **recording_settings(GREEDY))
    recorder = TraceRecorder()
    decoder.engine.observe("trace", recorder)
    name = decoder.engine.submit(prompts()[0], GREEDY)
    for _ in range(3):
        decoder.engine.step()
    decoder.engine.abort(name)
    decoder.engine.leave()
    assert recorder.finished == {}
    assert recorder._places == {}


def test_the_binding_checks_its_arrays() -> None:
    one = np.ones(1, dtype=np.int64)
    empty = np.zeros(0, dtype=np.int64)
    trace = _sched.Trace(one, one, one, np.zeros(2, dtype=np.int64), empty, empty, empty, np.zeros((0, 3)))
    assert (len(trace), trace.rounds, trace.gamma, trace.taps, trace.rates) == (1, 0, 3, False, [0.0, 0.0, 0.0])
    with pytest.raises(TypeError, match="dtype"):
        _sched.Trace(one.astype(np.int32), one, one, one, empty, empty, empty, np.zeros((0, 3)))
    with pytest.raises(ValueError, match="one of concurrency"):
        _sched.simulate(trace, COST, requests=1)
    with pytest.raises(ValueError, match="scheduler: expected off"):
        _sched.simulate(trace, COST, requests=1, concurrency=1, scheduler="best")
    with pytest.raises(ValueError, match="confidence: expected"):
        _sched.simulate(trace, COST, requests=1, concurrency=1, confidence="high")
    with pytest.raises(ValueError, match="bandwidth"):
        _sched.Roofline(1e9, 0.0, 1e12)
