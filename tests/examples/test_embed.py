"""``embed_fastapi`` over real connections, and ``embed_asyncio``."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import httpx
import pytest
import uvicorn

from dspark import RequestError, SpeculativeDecoder

LONG = {"prompt": "the lazy dog", "max_tokens": 200, "temperature": 0.0}


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "nothing happened"
        time.sleep(0.02)


@pytest.fixture
def url(example: Callable[[str], ModuleType], decoder: SpeculativeDecoder) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    app = example("embed_fastapi").create(decoder)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(20)


def ask(url: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/generate", json=body, timeout=60)


def test_a_stream_is_what_plain_decoding_gives(url: str, tiny_model: Any, tiny_tokenizer: Any) -> None:
    plain = SpeculativeDecoder.from_pretrained(
        tiny_model, "none", tokenizer=tiny_tokenizer, cost=None, max_slots=1, max_len=256
    )
    expected = plain.generate("the quick brown fox", max_tokens=24)[0]
    answer = ask(url, prompt="the quick brown fox", max_tokens=24)
    said = [json.loads(line) for line in answer.text.splitlines()]
    assert answer.status_code == 200
    assert "".join(line["text"] for line in said) == expected.text
    assert sum(line["tokens"] for line in said) == len(expected.ids)
    assert [line["finish"] for line in said[:-1]] == [None] * (len(said) - 1)
    assert said[-1]["finish"] == expected.finish_reason


def test_what_is_wrong_is_a_4xx(url: str) -> None:
    assert ask(url, prompt="").status_code == 422
    assert ask(url, prompt="x", temprature=1).status_code == 422
    refused = ask(url, prompt="the " * 2000)  # longer than a slot: the engine refuses it
    assert refused.status_code == 422
    assert "256" in refused.json()["detail"]


def test_a_client_that_leaves_frees_its_slot(url: str, decoder: SpeculativeDecoder) -> None:
    with httpx.stream("POST", f"{url}/generate", json={**LONG, "temperature": 1.0, "seed": 3}, timeout=60) as answer:
        next(answer.iter_lines())
    wait_for(lambda: not decoder.engine.live())
    assert dict(decoder.stats.finished)["abort"] == 1
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}


@pytest.mark.asyncio
async def test_the_urgent_request_goes_first(example: Callable[[str], ModuleType], decoder: SpeculativeDecoder) -> None:
    ended = await example("embed_asyncio").show(decoder, count=6, max_tokens=12)
    assert len(ended) == 7
    assert "urgent" in ended[:3]  # two slots were taken before it came


@pytest.mark.asyncio
async def test_requests_can_be_refused_or_given_up(
    example: Callable[[str], ModuleType], decoder: SpeculativeDecoder
) -> None:
    async with example("embed_asyncio").PriorityFront(decoder) as front:
        with pytest.raises(RequestError):
            await front.ask("the " * 2000)
        more = {"max_tokens": 200, "ignore_eos": True}
        jobs = [asyncio.create_task(front.ask("the sea", temperature=1.0, seed=i, **more)) for i in range(3)]
        while len(decoder.engine.batcher.active) < 2:
            await asyncio.sleep(0.01)
        for job in (jobs[0], jobs[2]):  # one that runs, and one that waits
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        assert [job.cancelled() for job in jobs] == [True, False, True]
        assert len(jobs[1].result().ids) == 200
        left = asyncio.create_task(front.ask("the sea", **more))
        await asyncio.sleep(0)
    assert (await asyncio.gather(left, return_exceptions=True))[0].__class__ is asyncio.CancelledError
    wait_for(lambda: not decoder.engine.live())


@pytest.mark.asyncio
async def test_who_waits_for_a_place_in_the_queue_is_let_go(
    example: Callable[[str], ModuleType], decoder: SpeculativeDecoder
) -> None:
    async with example("embed_asyncio").PriorityFront(decoder, waiting=1) as front:
        more = {"max_tokens": 200, "ignore_eos": True}
        jobs = [asyncio.create_task(front.ask("the sea", **more)) for _ in range(8)]
        while len(decoder.engine.batcher.active) < 2:
            await asyncio.sleep(0.01)
    async with asyncio.timeout(20):
        await asyncio.gather(*jobs, return_exceptions=True)
    assert sum(job.cancelled() for job in jobs) >= 6
    wait_for(lambda: not decoder.engine.live())
