"""Prometheus metrics agree with the engine's figures, and with what clients did."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dspark.server import ServerConfig
from tests.server.conftest import MODEL, Live

PROMPT = "the quick brown fox jumps over the lazy dog the quick brown fox jumps"


def read(live: Live) -> dict[tuple[str, str], float]:
    """(sample, value of its label) -> value."""
    answer = live.get("/metrics")
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
    assert found["dspark_http_requests_total", "completion,200"] == 2
    assert found["dspark_http_requests_total", "chat,200"] == 1
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


def test_errors_and_refusals_are_counted(live: Live) -> None:
    before = read(live).get(("dspark_http_requests_total", "completion,400"), 0)
    body = {"model": MODEL, "prompt": "a", "max_tokens": 2, "logit_bias": {"9999": 1}}
    assert live.post("/v1/completions", body).status_code == 400
    assert read(live)["dspark_http_requests_total", "completion,400"] == before + 1


def test_a_scrape_makes_no_tasks(live: Live) -> None:
    first = read(live)["dspark_tasks", ""]
    for _ in range(5):
        last = read(live)["dspark_tasks", ""]
    assert last == first > 0
