"""Real loads on a tiny target: what is counted, that systems agree, and what the report says."""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dspark.bench.generate import GenerateBackend
from dspark.bench.load import Backend, Closed, EngineBackend, Event, Job, Poisson, run_load
from dspark.bench.prompts import check_real, jobs_of, prompts_of
from dspark.bench.report import sweep_page, sweep_rows
from dspark.bench.sweep import Plan, Sweep, ratio
from dspark.bench.systems import System, choose, known_systems, left_out
from dspark.bench.vllm import ServerBackend, find_vllm
from dspark.config import SamplingParams
from dspark.errors import ConfigError, EvaluationError
from dspark.evaluation.collect import Item, Sampling
from tests.bench.conftest import prompts

PARAMS = SamplingParams(max_tokens=10, ignore_eos=True)


def jobs(count: int, turn: int = 0) -> list[Job]:
    made = prompts(6)
    return [Job(str((i + turn) % 6), tuple(made[(i + turn) % 6]), PARAMS) for i in range(count)]


class Script:
    """A backend whose events are written down: a token a job and step, ten in all, and a step takes a moment."""

    def __init__(self, moment: float = 0.001) -> None:
        self.moment, self.live, self.most = moment, {}, 0  # type: ignore[var-annotated]

    def begin(self) -> None:
        self.most = 0

    def figures(self) -> dict[str, Any]:
        return {"most": self.most}

    def submit(self, number: int, job: Job) -> None:
        self.live[number] = 0
        self.most = max(self.most, len(self.live))

    def step(self) -> list[Event]:
        time.sleep(self.moment)
        events = []
        for number in list(self.live):
            self.live[number] += 1
            done = self.live[number] == 5 + number
            events.append(Event(number, (self.live[number],), 1, time.perf_counter(), done))
            if done:
                del self.live[number]
        return events


def test_few_users_are_not_few_prompts() -> None:
    plan = Plan([], [], jobs, requests_per_user=1, least_requests=8, open_requests=5)
    assert [plan.count(load) for load in (Closed(1), Closed(8), Closed(32), Poisson(2.0))] == [8, 8, 32, 5]


def test_a_closed_loop_keeps_its_users_and_its_window_ends_with_the_first_gap() -> None:
    run = run_load(Script(), jobs(7), Closed(3))
    assert run.figures == {"most": 3}
    assert [r.tokens for r in run.requests] == [5, 6, 7, 8, 9, 10, 11]
    assert run.tokens == sum(range(5, 12))
    assert run.window_tokens < run.tokens
    assert run.window_seconds < run.seconds
    assert all(r.arrival <= r.first <= r.finish for r in run.requests)
    assert run.requests[3].arrival >= run.requests[0].finish
    figures = run.as_dict()
    assert figures["throughput"] == run.window_tokens / run.window_seconds
    assert 0 < figures["user_speed_p10"] <= figures["user_speed"]


def test_a_run_with_one_job_a_user_is_judged_as_a_whole() -> None:
    """Its window would end as the first request does, and be the shorter the better drafts are."""
    run = run_load(Script(), jobs(5), Closed(3))
    assert run.window_tokens == run.tokens
    assert run.window_seconds == run.seconds


def test_an_open_loop_submits_at_its_times_whatever_is_running() -> None:
    load = Poisson(300.0, seed=2)
    run = run_load(Script(0.004), jobs(12), load)
    assert [r.arrival for r in run.requests] == load.times(12)
    assert run.figures["most"] > 3
    assert load.times(12) == load.times(12) != Poisson(300.0, seed=3).times(12)
    with pytest.raises(EvaluationError, match="at least one"):
        run_load(Script(), [], load)


def test_ratios_have_intervals_that_hold_them() -> None:
    value, low, high = ratio([2.0, 2.2, 2.1], [1.0, 1.1, 1.05])
    assert value == pytest.approx(2.0)
    assert low <= value <= high
    assert low == pytest.approx(2.0), "paired repetitions that are slow together have no spread"
    assert all(math.isnan(v) for v in ratio([], [1.0]))


def test_systems_are_found_by_name() -> None:
    known = known_systems("ngram", 3)
    assert [s for s in known if s.startswith("gamma")] == ["gamma-1", "gamma-2", "gamma-3"]
    assert [s.name for s in choose(known, ["gamma-2", "plain"])] == ["plain", "gamma-2"]
    assert len(choose(known, [])) == len(known)
    with pytest.raises(ConfigError, match="did you mean 'plain'"):
        choose(known, ["plian"])
    assert "one request at a time" in left_out(known["lookup"], Closed(2), greedy=True)
    assert left_out(known["lookup"], Closed(1), greedy=True) == ""
    assert "admits no request" in left_out(known["generate"], Poisson(1.0), greedy=True)
    assert "retrospective" in left_out(known["global"], Closed(1), greedy=False)


@pytest.fixture(scope="module")
def swept(target: Any) -> Iterator[dict[str, Any]]:
    """One sweep over systems of every kind."""
    from dspark import SpeculativeDecoder, _sched
    from dspark.targets.load import load_model
    from tests.bench.conftest import GOLDEN

    model, _ = load_model(str(GOLDEN / "target_qwen3_tiny"), dtype="float32", device="cpu")
    cost = _sched.CostTable([(1, 1.0), (8, 1.0), (200, 20.0)], draft=[(1, 1, 0.01), (1, 3, 0.02)])
    made: list[SpeculativeDecoder] = []

    def backend(system: System) -> Backend | str:
        if system.name == "vllm":
            return "not here"
        if system.external:
            return GenerateBackend(model, 0, lookup=system.name == "lookup")
        decoder = SpeculativeDecoder.from_pretrained(
            target, max_slots=3, max_len=96, cost=cost, refine_cost=False, **{"gamma": None, **system.settings}
        )
        made.append(decoder)
        return EngineBackend(decoder.engine)

    names = ["plain", "auto", "lookahead", "gamma-2", "generate", "lookup", "vllm"]
    plan = Plan(choose(known_systems("ngram", 3), names), [Closed(1), Closed(3), Poisson(50.0)], jobs, 2, 2, 5)
    result = Sweep(plan, backend).run().result({"title": "a test", "settings": {"why": "to see"}})
    yield result
    for decoder in made:
        decoder.close()


def cell(result: dict[str, Any], load: str, system: str) -> dict[str, Any]:
    return next(r for r in result["rows"] if (r["load"], r["system"]) == (load, system))


def test_all_systems_write_the_tokens_of_plain_decoding(swept: dict[str, Any]) -> None:
    for row in swept["rows"]:
        count = {"1": 2, "3": 6, "50/s": 5}[row["load"]]
        assert row["same_as_plain"] == [2 * count, 2 * count], row["system"]
        assert all(run["tokens"] == 10 * count for run in row["runs"])
        assert len(row["runs"]) == 2


def test_figures_are_those_of_the_engine(swept: dict[str, Any]) -> None:
    plain, drafted = cell(swept, "3", "plain"), cell(swept, "3", "gamma-2")
    assert (plain["accepted_length"], plain["verify_budget"]) == (1.0, 0.0)
    assert plain["over_plain"] == (1.0, 1.0, 1.0)
    assert 1.0 <= drafted["accepted_length"] <= 3.0
    assert 0.0 < drafted["verify_budget"] <= 2.0
    best = max(cell(swept, "3", name)["throughput"] for name in ("plain", "gamma-2"))
    assert cell(swept, "3", "auto")["over_static"][0] == pytest.approx(cell(swept, "3", "auto")["throughput"] / best)
    external = cell(swept, "3", "generate")
    assert external["over_external"][0] == 1.0
    assert math.isnan(external["accepted_length"])
    assert external["user_speed"] > 0


def test_what_has_no_run_is_said(swept: dict[str, Any]) -> None:
    text = "\n".join(swept["skipped"])
    assert "vllm: not here" in text
    assert "lookup at 3: " in text
    assert "generate at 50/s: " in text
    assert [s["name"] for s in swept["systems"]] == ["plain", "auto", "lookahead", "gamma-2", "generate", "lookup"]


def test_the_page_holds_both_figures(swept: dict[str, Any]) -> None:
    page = sweep_page(swept)
    for text in ("figure 7", "drafts verified a round against concurrency", "Arrivals at random", "vllm: not here"):
        assert text in page
    assert page.count("<svg") == 6
    head, rows = sweep_rows(swept)
    assert {len(row) for row in rows} == {len(head)}
    assert len(rows) == len(swept["rows"]) == 6 + 5 + 4


class _One:
    todo: tuple[str, ...] = ()

    def __init__(self, prompt: Any) -> None:
        self.prompt = prompt

    def next_prompt(self) -> Any:
        return self.prompt


def test_prompts_of_token_ids_are_refused(tiny_tokenizer: Any) -> None:
    def item(name: str, prompt: Any) -> Item:
        return Item("d", name, "", lambda: _One(prompt))  # type: ignore[arg-type,return-value]

    text = item("1", "the quick brown fox")
    assert prompts_of([text], tiny_tokenizer)[0][0] == "d:1"
    with pytest.raises(EvaluationError, match="d:2: a prompt of token ids"):
        prompts_of([text, item("2", [5, 6, 7])], tiny_tokenizer)


def test_jobs_repeat_prompts_with_other_draws() -> None:
    item = Item("d", "1", "", lambda: _One("x"))  # type: ignore[arg-type,return-value]
    sampling = Sampling(dataclasses.replace(PARAMS, temperature=1.0), seed=4)
    made = jobs_of([("d:1", [3, 4])], [item], sampling, 3)
    assert len({job.params.request_key for job in made}) == 3
    assert jobs_of([("d:1", [3, 4])], [item], sampling, 3) == made
    again = jobs_of([("d:1", [3, 4])], [item], sampling, 3, turn=1)
    assert {j.params.request_key for j in again}.isdisjoint(j.params.request_key for j in made)


@pytest.mark.real
def test_random_tokens_are_refused_and_text_is_not() -> None:
    import random

    from dspark.targets.hf import HFTarget

    target = HFTarget.from_pretrained("smollm2", dtype="bfloat16", device="cpu")
    text = "Write a short story about a lighthouse keeper who finds a letter in a bottle, and say what it tells."
    ids = target.tokenizer(text)["input_ids"]
    assert "1 prompts judged" in check_real([("a", ids)], target, target.tokenizer)
    rng = random.Random(1)
    noise = [rng.randrange(100, target.vocab_size) for _ in range(64)]
    with pytest.raises(EvaluationError, match="b: to the target"):
        check_real([("b", noise)], target, target.tokenizer)


def test_an_untrained_target_judges_nothing(tiny_model: Any, tiny_tokenizer: Any) -> None:
    class Small:
        @staticmethod
        def plain_logits(ids: list[int]) -> Any:
            return tiny_model(torch.tensor([ids])).logits[0]

    assert check_real([("a", list(range(20)))], Small(), tiny_tokenizer).startswith("not judged")


def test_a_server_that_does_not_start_is_said_with_its_last_words() -> None:
    assert find_vllm("/no/such/python") is None
    with pytest.raises(EvaluationError, match=r"ended with code 3: out of order"):
        ServerBackend([sys.executable, "-c", "print('out of order'); raise SystemExit(3)"], 1)
