"""A client that stops reading: its connection ends, and whoever writes to it learns of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dspark.errors import DSparkWarning
from dspark.server import protocol
from dspark.server.protocol import GuardedProtocol, guarded

CHUNK = b"x" * 65536


class Endless:
    """An application whose answer never ends; it says how it learnt that its client was gone."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.gone.set()

        watching = asyncio.create_task(watch())
        while not self.gone.is_set():
            await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
            await asyncio.sleep(0)
        await watching


async def exchange(write_timeout: float, *, reads: bool) -> tuple[Endless, uvicorn.Server]:
    """Ask for the endless answer and read it, or not, until the server has closed it or 4 MiB were read."""
    app = Endless()
    config = uvicorn.Config(
        app, port=0, http=guarded(30.0, write_timeout), lifespan="off", log_level="error", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    if reads:
        for _ in range(64):
            await reader.readexactly(65536)
        assert not app.gone.is_set()
        writer.close()
    await asyncio.wait_for(app.gone.wait(), 60)
    writer.close()
    server.should_exit = True
    await asyncio.wait_for(serving, 60)
    return app, server


def test_a_client_that_reads_nothing_is_let_go() -> None:
    app, server = asyncio.run(exchange(0.2, reads=False))
    assert app.gone.is_set()
    assert not server.server_state.connections


def test_one_that_reads_is_not() -> None:
    asyncio.run(exchange(30.0, reads=True))


def test_a_uvicorn_of_other_insides_serves_without_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_NEEDS", ("_should_upgrade", "_of_another_time"))
    with pytest.warns(DSparkWarning, match="this uvicorn has no _of_another_time"):
        assert guarded(1.0, 1.0) is HttpToolsProtocol
    monkeypatch.undo()
    assert issubclass(guarded(1.0, 2.0), GuardedProtocol)
