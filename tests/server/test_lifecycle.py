"""Who is served when, and what becomes of requests that end early: queue, times, disconnects, shutdown."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from dspark.server import ServerConfig
from tests.server.conftest import MODEL, Live

SLOW = 0.01
"""Seconds that each forward takes here, so that requests overlap."""


def slow(live: Live, seconds: float = SLOW) -> None:
    """Make every forward of the target take its time."""
    target: Any = live.decoder.engine.parts.target
    forward = target.forward

    def late(*args: Any) -> Any:
        time.sleep(seconds)
        return forward(*args)

    target.forward = late


def body(**changes: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "the fox", "max_tokens": 100, "temperature": 0, "ignore_eos": True, **changes}


def wait_until(true: Callable[[], bool], seconds: float = 10) -> None:
    ends = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < ends, "it did not happen"
        time.sleep(0.005)


def events(text: str) -> Iterator[Any]:
    for block in text.split("\n\n"):
        if block.startswith("data: ") and block != "data: [DONE]":
            yield json.loads(block.removeprefix("data: "))


class Background:
    """A request in a thread."""

    def __init__(self, live: Live, **changes: Any) -> None:
        self.answer: httpx.Response | None = None

        def ask() -> None:
            self.answer = live.post("/v1/completions", body(**changes))

        self.thread = threading.Thread(target=ask)
        self.thread.start()

    def join(self) -> httpx.Response:
        self.thread.join(60)
        assert self.answer is not None
        return self.answer


def test_a_disconnect_frees_the_slot_at_the_next_step(serving: Callable[..., Any]) -> None:
    with serving(max_slots=1) as live:
        slow(live)
        with httpx.stream("POST", f"{live.url}/v1/completions", json=body(stream=True, max_tokens=200)) as answer:
            next(answer.iter_lines())
            assert live.decoder.engine.live()
        left = live.decoder.engine.stats.steps
        wait_until(lambda: not live.decoder.engine.live())
        assert live.decoder.engine.stats.steps - left < 50  # of the 200 that it would have taken
        live.settled()
        assert live.decoder.engine.stats.finished["abort"] == 1
        wait_until(lambda: "dspark_disconnects_total 1.0" in live.get("/metrics").text)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_the_queue_takes_no_slot(serving: Callable[..., Any], stream: bool) -> None:
    with serving(max_slots=1) as live:
        slow(live)
        first = Background(live, max_tokens=60)
        wait_until(lambda: live.service.queue()[0] == 1)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{live.url}/v1/completions", json=body(stream=stream), timeout=0.1)
        wait_until(lambda: live.service.live == 1)
        assert first.join().json()["usage"]["completion_tokens"] == 60
        live.settled()
        assert live.decoder.engine.stats.finished == {"length": 1, "abort": 1}


def test_a_full_queue_says_when_to_come_back(serving: Callable[..., Any]) -> None:
    with serving(ServerConfig(model_name=MODEL, max_queue=1), max_slots=1) as live:
        slow(live)
        two = [Background(live, max_tokens=40) for _ in range(2)]
        wait_until(lambda: live.service.live == 2)
        answer = live.post("/v1/completions", body())
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "queue_full"
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert [b.join().status_code for b in two] == [200, 200]
        assert live.post("/v1/completions", body(max_tokens=2)).status_code == 200
        assert "dspark_refused_total 1.0" in live.get("/metrics").text


def test_choices_count_as_many_as_they_are(serving: Callable[..., Any]) -> None:
    with serving(ServerConfig(model_name=MODEL, max_queue=2), max_slots=1) as live:
        slow(live)
        first = Background(live, max_tokens=30)
        wait_until(lambda: live.service.live == 1)
        assert live.post("/v1/completions", body(n=3, max_tokens=2)).status_code == 429
        assert live.post("/v1/completions", body(n=2, max_tokens=2)).status_code == 200
        assert live.post("/v1/completions", body(n=4, max_tokens=2)).status_code == 400
        first.join()


def test_a_request_that_gets_no_slot_is_given_up(serving: Callable[..., Any]) -> None:
    with serving(ServerConfig(model_name=MODEL, queue_timeout=0.2), max_slots=1) as live:
        slow(live)
        first = Background(live, max_tokens=100)
        wait_until(lambda: live.service.queue()[0] == 1)
        answer = live.post("/v1/completions", body(stream=True))
        given_up_waiting(answer, "0.2 s, the server's queue_timeout")
        assert first.join().status_code == 200
        live.settled()


def given_up_waiting(answer: httpx.Response, limit: str) -> None:
    assert answer.status_code == 503
    error = answer.json()["error"]
    assert error["code"] == "queue_timeout"
    assert f"waited for a slot and its first token for {limit}" in error["message"]
    assert "nothing was decoded" in error["message"]
    assert f"try again in {answer.headers['retry-after']} s" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_limit_of_a_whole_request_ends_waiting_too(serving: Callable[..., Any], stream: bool) -> None:
    """The one that ran out is named, not the longer one of the queue, and that it ran out in waiting."""
    with serving(ServerConfig(model_name=MODEL, request_timeout=0.3), max_slots=1) as live:
        target, free = live.decoder.engine.parts.target, threading.Event()
        forward = target.forward
        target.forward = lambda *args: free.wait(60) and forward(*args)
        answer = live.post("/v1/completions", body(stream=stream, max_tokens=2))
        given_up_waiting(answer, "0.3 s, the server's request_timeout")
        free.set()
        live.settled()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_is_ended(serving: Callable[..., Any], stream: bool) -> None:
    with serving(ServerConfig(model_name=MODEL, request_timeout=0.4), max_slots=1) as live:
        slow(live)
        answer = live.post("/v1/completions", body(stream=stream, max_tokens=200))
        if stream:
            assert answer.status_code == 200
            assert answer.text.endswith("data: [DONE]\n\n")
            *before, last = events(answer.text)
            assert before
            assert last["error"]["code"] == "request_timeout"
            assert last["error"]["message"] == "decoding was not finished within 0.4 s"
        else:
            assert answer.status_code == 504
        live.settled()


def test_stopping_lets_requests_finish_and_takes_none(serving: Callable[..., Any]) -> None:
    with serving(max_slots=1) as live:
        slow(live)
        keep = httpx.Client()
        assert keep.get(f"{live.url}/health").status_code == 200
        running = Background(live, max_tokens=60, stream=True)
        waiting = Background(live, max_tokens=20)
        wait_until(lambda: live.service.live == 2)
        live.server.stop()
        wait_until(lambda: live.service.draining)
        with pytest.raises(httpx.HTTPError):  # it takes no connections, and closes idle ones
            httpx.get(f"{live.url}/health", timeout=5).raise_for_status()
        assert list(events(running.join().text))[-1]["choices"][0]["finish_reason"] == "length"
        assert waiting.join().json()["usage"]["completion_tokens"] == 20
        live.thread.join(20)
        assert not live.thread.is_alive()


def test_what_does_not_finish_in_time_is_told(serving: Callable[..., Any]) -> None:
    with serving(ServerConfig(model_name=MODEL, drain_timeout=0.3), max_slots=2) as live:
        slow(live)
        streams = [Background(live, max_tokens=240, stream=True) for _ in range(2)]
        wait_until(lambda: sum(r.started for r in tuple(live.service._runs)) == 2)  # else the other takes a slot
        whole = Background(live, max_tokens=240)
        wait_until(lambda: live.service.live == 3)
        live.server.stop()
        for background in streams:
            text = background.join().text
            assert text.endswith("data: [DONE]\n\n")
            assert list(events(text))[-1]["error"]["code"] == "shutting_down"
        assert whole.join().status_code == 503
        live.thread.join(20)
        assert not live.thread.is_alive()
        live.settled()


def test_an_engine_that_ends_is_reported(serving: Callable[..., Any], recwarn: Any) -> None:
    with serving() as live:
        engine: Any = live.decoder.engine
        step = engine.step

        def broken() -> Any:
            if engine.live():
                raise RuntimeError("out of memory")
            return step()

        engine.step = broken
        answer = live.post("/v1/completions", body())
        assert answer.status_code == 503
        assert "out of memory" in answer.json()["error"]["message"]
        assert live.get("/health").status_code == 503
        assert live.post("/v1/completions", body()).status_code == 503
        assert live.get("/status").json()["guard"]["engine-ended"] is True
        engine.step = step
