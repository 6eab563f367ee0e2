"""Prometheus metrics agree with the engine's figures, and with what clients did."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import APIRouter
from prometheus_client.parser import text_string_to_metric_families

from dspark import SamplingParams
from dspark._sched import CostTable
from dspark.plugins import hookimpl
from dspark.server import ServerConfig
from dspark.server.monitor import ROUNDS, Monitor
from dspark.tokens import TokenView
from dspark.types import Committed, GammaChoice, Mode, RequestView, RoundRecord
from tests.server.conftest import MODEL, Live

PROMPT = "the quick brown fox jumps over the lazy dog the quick brown fox jumps"


def read(live: Live, **more: Any) -> dict[tuple[str, str], float]:
    """(sample, value of its label) -> value."""
    answer = live.get("/metrics", **more)
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, ",".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def test_metrics_are_the_engines_figures(serving: Callable[..., Any]) -> None:
    with serving(ServerConfig(model_name=MODEL, max_queue=3)) as live:
        for path, body in (
            ("/v1/completions", {"prompt": PROMPT, "max_tokens": 60, "temperature": 0}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5, "stream": True}),
            ("/v1/completions", {"prompt": PROMPT, "max_tokens": 8, "seed": 1, "n": 2}),
        ):
            assert live.post(path, {"model": MODEL, "ignore_eos": True, **body}).status_code == 200
        live.settled()
        found, stats = read(live), live.decoder.engine.stats
    assert found["dspark_output_tokens_total", ""] == stats.acceptance.committed == 60 + 5 + 16
    assert found["dspark_steps_total", ""] == stats.steps
    assert found["dspark_verified_tokens_total", ""] == stats.verified > 0
    assert found["dspark_accepted_length", ""] == pytest.approx(stats.acceptance.accepted_length)
    assert found["dspark_verify_budget", ""] == pytest.approx(stats.verify_budget)
    assert found["dspark_finished_total", "length"] == 4
    assert found["dspark_http_requests_total", "/v1/completions,200"] == 2
    assert found["dspark_http_requests_total", "/v1/chat/completions,200"] == 1
    assert found["dspark_time_to_first_token_seconds_count", ""] == 4
    assert 81 - 4 * 8 <= found["dspark_inter_token_latency_seconds_count", ""] <= 81 - 4  # all but first chunks
    assert found["dspark_request_seconds_count", ""] == 3
    assert found["dspark_slots", ""] == 4
    assert found["dspark_running", ""] == found["dspark_waiting", ""] == 0
    assert found["dspark_guard", "drafting-off"] == 0
    for k, (offered, accepted) in enumerate(zip(stats.acceptance.offered, stats.acceptance.accepted, strict=True), 1):
        assert found["dspark_position_offered_total", str(k)] == offered
        assert found["dspark_position_accepted_total", str(k)] == accepted


def test_a_fault_shows(serving: Callable[..., Any]) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("x")

    with serving() as live, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        live.decoder.engine.parts.drafter.propose = broken
        live.post("/v1/completions", {"model": MODEL, "prompt": PROMPT, "max_tokens": 10, "temperature": 0})
        found = read(live)
        assert found["dspark_faults_total", "dspark/ngram:draft"] == 1
        assert found["dspark_guard", "drafting-off"] == 1
        assert live.get("/status").json()["guard"]["drafting-off"] is True


def test_every_family_says_what_it_is(live: Live) -> None:
    """Help and type; histograms reach as far as the limits that the server has unless told otherwise."""
    limit = ServerConfig().request_timeout
    families = list(text_string_to_metric_families(live.get("/metrics").text))
    bounds = {
        family.name: [float(s.labels["le"]) for s in family.samples if s.name.endswith("_bucket")]
        for family in families
        if family.type == "histogram"
    }
    assert all(family.documentation and family.type in ("counter", "gauge", "histogram") for family in families)
    for name in ("dspark_time_to_first_token_seconds", "dspark_request_seconds"):
        assert bounds[name][-2] >= limit
    assert bounds["dspark_inter_token_latency_seconds"][0] < 0.001  # a step of 5 ms may commit eight


def round_of(seconds: dict[str, float], *, why: str = "drafting", tokens: int = 3) -> RoundRecord:
    """A plain step of one request."""
    view = RequestView("one", 0, 1, TokenView([5] * 40, 40), 8, 39, 0, SamplingParams(), Mode.GREEDY, 0)
    done = Committed(view, -1, (7,) * tokens, 0, 0, 40 + tokens)
    choice: Any = (None, GammaChoice(np.zeros(1, dtype=np.int64), why))
    return RoundRecord(0, None, None, None, None, (done,), 1, seconds, choice=choice)


def test_the_guard_shows_while_it_holds(serving: Callable[..., Any]) -> None:
    with serving() as live:
        monitor = live.service.monitor
        assert read(live)["dspark_guard", "gamma-guard"] == 0
        monitor.on_round(round_of({"target": 0.01}, why="guard"))
        assert read(live)["dspark_guard", "gamma-guard"] == 1
        assert live.get("/status").json()["rounds"][-1]["why"] == "guard"
        monitor.on_round(round_of({"target": 0.01}))
        assert read(live)["dspark_guard", "gamma-guard"] == 0


def test_a_cost_that_is_flat_no_more_is_not_said_to_be(serving: Callable[..., Any]) -> None:
    """The table is exchanged while the engine runs; the page's curve is the one that holds, at the context of now."""
    with serving() as live:
        parts = live.decoder.engine.parts
        assert live.get("/status").json()["cost"] == {"state": "no-cost-table", "points": []}
        live.decoder.engine.stats.states["flat-cost"] = 3
        parts.cost = CostTable([(1, 0.010), (64, 0.010)])
        assert read(live)["dspark_guard", "flat-cost"] == 1
        parts.cost = CostTable.from_buckets([(32, [(1, 0.010), (64, 0.020)]), (None, [(1, 0.030), (64, 0.040)])])
        assert read(live)["dspark_guard", "flat-cost"] == 0
        assert live.get("/status").json()["cost"]["points"][0] == [1, pytest.approx(0.010)]
        live.service.monitor.on_round(round_of({"target": 0.01}))  # 40 tokens of context
        assert live.get("/status").json()["cost"]["points"][0] == [1, pytest.approx(0.030)]


def test_a_first_round_is_no_burst() -> None:
    """Its tokens took the time that it took, however soon after it somebody looks; forwards are told from steps."""
    monitor = Monitor()
    monitor.on_round(round_of({"target": 1.5, "draft": 0.5}, tokens=4))
    seen = monitor.recent()
    assert 0 < seen["tokens_per_second"] <= 2
    assert (seen["rounds"][-1]["forward"], seen["rounds"][-1]["seconds"]) == (1.5, 2.0)
    assert seen["recent"]["accepted_length"] == 4
    for _ in range(ROUNDS):
        monitor.on_round(round_of({"target": 0.01}, tokens=1))
    assert monitor.recent()["recent"]["accepted_length"] == 1  # of the last rounds alone


def test_errors_and_refusals_are_counted(live: Live) -> None:
    before = read(live).get(("dspark_http_requests_total", "/v1/completions,400"), 0)
    body = {"model": MODEL, "prompt": "a", "max_tokens": 2, "logit_bias": {"9999": 1}}
    assert live.post("/v1/completions", body).status_code == 400
    assert read(live)["dspark_http_requests_total", "/v1/completions,400"] == before + 1


def test_every_response_is_counted_by_its_route(serving: Callable[..., Any]) -> None:
    """Whoever gives it: the gate, the limits, the router, the reader of bodies, the queue, or a handler that fails."""
    config = ServerConfig(model_name=MODEL, api_keys=["k"], max_body_bytes=1000, max_queue=0, max_watchers=0)
    key = {"authorization": "Bearer k"}
    text = {"model": MODEL, "prompt": "a", "max_tokens": 2}
    asked: list[tuple[str, str, int, dict[str, Any]]] = [
        ("POST", "/v1/completions", 401, {"json": text}),
        ("POST", "/v1/completions", 413, {"headers": key, "content": b"x" * 1001}),
        ("POST", "/v1/completions", 413, {"headers": key, "content": iter([b"x" * 600] * 2)}),
        ("POST", "/v1/completions", 400, {"headers": {**key, "content-type": "application/json"}, "content": b"{"}),
        ("POST", "/v1/completions", 404, {"headers": key, "json": {**text, "model": "other"}}),
        ("POST", "/v1/completions", 200, {"headers": key, "json": text}),
        ("POST", "/v1/completions", 200, {"headers": key, "json": {**text, "stream": True}}),
        ("GET", "/v1/completions", 405, {"headers": key}),
        ("GET", f"/v1/models/{MODEL}", 200, {"headers": key}),
        ("GET", "/v1/models/a/b", 404, {"headers": key}),
        ("GET", "/nothing/here", 404, {"headers": key}),
        ("GET", "/nothing/there", 401, {}),
        ("GET", "/status/stream", 503, {"headers": key}),
        ("GET", "/openapi.json", 200, {"headers": key}),
        ("GET", "/health", 200, {}),
    ]
    templates = {f"/v1/models/{MODEL}": "/v1/models/{model:path}", "/v1/models/a/b": "/v1/models/{model:path}"}
    expected = Counter(
        (templates.get(path, "other" if "/nothing" in path else path), status) for _, path, status, _ in asked
    )
    with serving(config, max_slots=1) as live:
        for method, path, status, more in asked:
            assert httpx.request(method, live.url + path, timeout=60, **more).status_code == status
        live.service._live += 1  # as if a request held the slot
        assert live.post("/v1/completions", text, headers=key).status_code == 429
        live.service._live -= 1
        live.service.read = None  # a fault of the server's own
        assert live.post("/v1/completions", text, headers=key).status_code == 500
        found = {name: value for name, value in read(live, headers=key).items() if "http_requests_total" in name[0]}
    expected.update({("/v1/completions", 429): 1, ("/v1/completions", 500): 1})
    assert found == {("dspark_http_requests_total", f"{r},{s}"): n for (r, s), n in expected.items()}


def test_a_client_that_leaves_is_counted_as_one(serving: Callable[..., Any]) -> None:
    with serving(max_slots=1) as live:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "stream": True}
        gate = hold(live)
        with httpx.stream("POST", f"{live.url}/v1/completions", json=body) as answer:
            next(answer.iter_lines())
        gate.release(1000)
        live.settled()
        assert read(live)["dspark_http_requests_total", "/v1/completions,499"] == 1


def hold(live: Live, free: int = 3) -> threading.Semaphore:
    """Let the target run so many forwards, and further ones as the semaphore is released."""
    gate = threading.Semaphore(free)
    target: Any = live.decoder.engine.parts.target
    forward = target.forward

    def late(*args: Any) -> Any:
        assert gate.acquire(timeout=60)
        return forward(*args)

    target.forward = late
    return gate


def test_routes_of_plugins_have_their_templates(make_decoder: Callable[..., Any], serving: Callable[..., Any]) -> None:
    class Routes:
        DSPARK_API = 1

        @hookimpl
        def dspark_register_routes(self, app: Any) -> None:
            async def one(name: str) -> str:
                return name

            router = APIRouter()
            router.add_api_route("/inside/{name}", one)
            app.include_router(router)
            app.add_api_route("/direct/{name}", one)

    with serving(decoder=make_decoder(extra_plugins={"routes": Routes()})) as live:
        for path in ("/inside/a", "/inside/b", "/direct/a", "/direct/b"):
            assert live.get(path).status_code == 200
        found = read(live)
    for template in ("/inside/{name}", "/direct/{name}"):
        assert found["dspark_http_requests_total", f"{template},200"] == 2


def test_a_scrape_makes_no_tasks(live: Live) -> None:
    first = read(live)["dspark_tasks", ""]
    for _ in range(5):
        last = read(live)["dspark_tasks", ""]
    assert last == first > 0
