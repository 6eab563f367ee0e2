"""A real server in a thread: uvicorn, the application, and an engine on the tiny Llama."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest

from dspark.api import SpeculativeDecoder
from dspark.server import ServerConfig, create_app
from dspark.server.run import GracefulServer, make_server

MODEL = "tiny"


@dataclass
class Live:
    """A server that runs.

    Attributes:
        url: its root.
        decoder, server: what runs, for looking inside.
    """

    url: str
    decoder: SpeculativeDecoder
    server: GracefulServer
    thread: threading.Thread

    @property
    def service(self) -> Any:
        return self.server._service

    def client(self, key: str = "none", **more: Any) -> Any:
        """The official client. It does not retry, so that every answer is seen."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, **more)

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        # Without verify=False, every call reads the system's certificates, which takes longer than most answers.
        return httpx.post(f"{self.url}{path}", json=body, timeout=60, verify=False, **more)

    def get(self, path: str, **more: Any) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=60, verify=False, **more)

    def settled(self, seconds: float = 10) -> None:
        """Wait until the engine holds nothing, and check that it does not.

        Slots are freed at the next step, which is another thread's.
        """
        ends = time.monotonic() + seconds
        engine = self.decoder.engine
        while time.monotonic() < ends and (engine.has_work or engine.live() or self.service.live):
            time.sleep(0.01)
        assert not engine.live()
        assert self.service.live == 0
        assert len(engine.batcher.pool) == engine.config.max_slots
        assert engine._admission._live_keys == set()

    def stop(self) -> None:
        self.server.stop()
        self.thread.join(30)
        assert not self.thread.is_alive()
        self.decoder.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(decoder: SpeculativeDecoder, config: ServerConfig | None = None, **more: Any) -> Live:
    config = config if config is not None else ServerConfig(model_name=MODEL)
    port = free_port()
    server = make_server(create_app(decoder, config, **more), "127.0.0.1", port, log_level="error")
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    ends = time.monotonic() + 30
    while not server.started:
        assert thread.is_alive(), "the server ended"
        assert time.monotonic() < ends, "the server did not start"
        time.sleep(0.01)
    return Live(f"http://127.0.0.1:{port}", decoder, server, thread)


@pytest.fixture(scope="session")
def make_decoder(tiny_model: Any, tiny_tokenizer: Any) -> Callable[..., SpeculativeDecoder]:
    """A decoder on the tiny Llama that drafts by prompt lookup."""

    def make(**settings: Any) -> SpeculativeDecoder:
        settings = {"drafter": "ngram", "cost": None, "max_slots": 4, "max_len": 256, **settings}
        return SpeculativeDecoder.from_pretrained(tiny_model, tokenizer=tiny_tokenizer, **settings)

    return make


@pytest.fixture(scope="session")
def serving(make_decoder: Callable[..., SpeculativeDecoder]) -> Callable[..., Any]:
    """``with serving(ServerConfig(...), drafter=..., ...) as live``."""

    @contextmanager
    def one(config: ServerConfig | None = None, decoder: Any = None, **settings: Any) -> Iterator[Live]:
        live = start(decoder if decoder is not None else make_decoder(**settings), config)
        try:
            yield live
        finally:
            live.stop()

    return one


@pytest.fixture(scope="session")
def shared_server(make_decoder: Callable[..., SpeculativeDecoder]) -> Iterator[Live]:
    """One server for all tests that leave it as it was."""
    live = start(make_decoder())
    yield live
    live.stop()


@pytest.fixture
def live(shared_server: Live) -> Iterator[Live]:
    """The shared server; afterwards it must hold nothing."""
    yield shared_server
    shared_server.settled()


@pytest.fixture(scope="session")
def alone(make_decoder: Callable[..., SpeculativeDecoder]) -> Iterator[SpeculativeDecoder]:
    """Plain decoding of one request at a time: what every exact answer is compared with."""
    decoder = make_decoder(drafter="none", max_slots=1)
    yield decoder
    decoder.close()
