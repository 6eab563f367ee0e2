"""The load test in small, on the tiny Llama, and the server's process under signals."""

from __future__ import annotations

import argparse
import json
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from benchmarks import serve_load
from benchmarks._common import machine
from benchmarks.serving import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # each starts a process that imports torch

ARGS = ["--dtype", "float32", "--drafter", "ngram", "--cost", "none", "--max-slots", "4", "--log-level", "warning"]


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> str:
    """A random float32 Llama with room for the benchmark's prompts."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, initializer_range=0.3, eos_token_id=0, bos_token_id=1,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).eval().save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def server(tiny_folder: str) -> Iterator[Server]:
    with Server(tiny_folder, [*ARGS, "--drain-timeout", "60"], wait=400) as running:
        yield running


def test_a_crowd_gets_what_each_gets_alone(tiny_folder: str) -> None:
    settings = argparse.Namespace(
        target=tiny_folder, requests=150, clients=12, rate=60.0, distinct=20, tokens=48, max_slots=4, cost="none",
        seed=3, scheduler="auto", drafter="draft-model", set=[f"drafter_config.model={tiny_folder}"],
    )  # fmt: skip
    result = serve_load.run(settings, lambda text: None)
    assert result["passed"], json.dumps(
        {k: result[k] for k in ("checks", "complaints", "differences", "before", "after")}
    )
    assert result["compared"] > 80
    assert result["disconnected"] == 15
    assert result["kinds_of_malformed"] >= 7
    assert result["compared"] == result["greedy"] + result["seeded"]
    shown = serve_load.report({"machine": machine(), **result})
    assert f"| left in mid-stream | {result['disconnected']} |" in shown


def body(**changes: Any) -> dict[str, Any]:
    return {
        "model": "served", "prompt": "the fox", "max_tokens": 800, "temperature": 0, "ignore_eos": True,
        "stream": True, **changes,
    }  # fmt: skip


def ask(server: Server, started: threading.Semaphore) -> str:
    """The whole text of a stream."""
    text = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body(), timeout=300) as answer:
        for part in answer.iter_text():
            if not text:
                started.release()
            text.append(part)
    return "".join(text)


def wait_for_requests(server: Server, count: int) -> None:
    ends = time.monotonic() + 60
    while server.metric("dspark_running") + server.metric("dspark_waiting") < count:
        assert time.monotonic() < ends
        time.sleep(0.01)


def last_event(text: str) -> Any:
    assert text.endswith("data: [DONE]\n\n")
    return json.loads(text.removesuffix("data: [DONE]\n\n").strip().rsplit("data: ", 1)[1])


def test_sigterm_under_load_truncates_no_stream(server: Server) -> None:
    started = threading.Semaphore(0)
    with ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(ask, server, started) for _ in range(8)]
        wait_for_requests(server, 8)  # a connection whose request has not come yet is closed without an answer
        server.send(signal.SIGTERM)
        ends = [last_event(s.result(400)) for s in streams]
    for end in ends:
        assert "error" in end or end["choices"][0]["finish_reason"] == "length"
    assert any("choices" in end for end in ends)
    assert server.process is not None
    assert server.process.wait(30) == 0
    assert "Traceback" not in server.output()


def test_a_second_signal_ends_at_once(server: Server) -> None:
    started = threading.Semaphore(0)
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(ask, server, started)
        assert started.acquire(timeout=30)
        server.send(signal.SIGTERM)
        time.sleep(0.2)
        server.send(signal.SIGTERM)
        assert server.process is not None
        server.process.wait(15)
        stream.exception(30)


def test_kill_and_restart_starts_clean(server: Server) -> None:
    expected = server.post("/v1/completions", body(stream=False, max_tokens=30)).json()["choices"]
    started = threading.Semaphore(0)
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(ask, server, started)
        assert started.acquire(timeout=30)
        server.send(signal.SIGKILL)
        assert server.process is not None
        server.process.wait(15)
        assert isinstance(stream.exception(30), httpx.HTTPError)
    server.start()
    assert server.metric("dspark_running") == server.metric("dspark_waiting") == 0
    assert server.post("/v1/completions", body(stream=False, max_tokens=30)).json()["choices"] == expected
