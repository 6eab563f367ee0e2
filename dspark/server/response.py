"""The ASGI answers: decode while the client is there, as one object or as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dspark.api import Generation
from dspark.engine.state import Chunk
from dspark.errors import DSparkError
from dspark.server.answers import Writer
from dspark.server.errors import ApiError, as_api_error
from dspark.server.metrics import OUTCOME
from dspark.server.prompts import Work
from dspark.server.service import Service

T = TypeVar("T")
log = logging.getLogger("dspark.server")

DONE = b"data: [DONE]\n\n"
EVENT_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]
LAST_WORD = 5.0
"""Seconds that a client has to take the event that says why its stream ends."""


class ClientGoneError(Exception):
    """The client closed its connection."""


class Answer(Response):
    """Decodes ``work`` when it is sent, and stops where the client leaves.

    An error before the first byte is an answer of its own; one after it is the stream's last event.

    Args:
        service: decodes.
        work: what.
        writer: writes the answer.
        arrived: when the request came, by ``time.perf_counter``.
        stream: send events as tokens come.
        with_usage: send an event with the usage before the end.
    """

    def __init__(
        self,
        service: Service,
        work: Work,
        writer: Writer,
        arrived: float,
        *,
        stream: bool = False,
        with_usage: bool = False,
    ) -> None:
        super().__init__()
        self._service, self._work, self._writer = service, work, writer
        self._arrived, self._stream, self._with_usage = arrived, stream, with_usage
        self._sending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        try:
            await while_connected(receive, self._events(send) if self._stream else self._object(scope, receive, send))
        except ClientGoneError:
            self._service.metrics.disconnects.inc()
            scope[OUTCOME] = 499
        except Exception as error:
            if not isinstance(error, (ApiError, DSparkError)):
                log.exception("a request to %s failed", scope["path"])
            shown = as_api_error(error)
            scope[OUTCOME] = shown.status
            await self._say(shown, scope, receive, send)

    async def _say(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._sending:
            await error.response()(scope, receive, send)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORD):
                await send({"type": "http.response.body", "body": error.event() + DONE})

    async def _object(self, scope: Scope, receive: Receive, send: Send) -> None:
        results = [Generation(prompt_ids=ids) for ids, _ in self._work.choices]

        async def add(index: int, chunk: Chunk) -> None:
            results[index].add(chunk)

        await self._service.decode(self._work, list(self._writer.stats), add, self._arrived)
        body = json.dumps(self._writer.whole(results), ensure_ascii=False).encode()
        headers = {"content-type": "application/json"}
        await Response(body, headers=headers)(scope, receive, send)

    async def _events(self, send: Send) -> None:
        async def write(index: int, chunk: Chunk) -> None:
            data = self._writer.event(index, chunk)
            if not data:
                return
            if not self._sending:
                self._sending = True
                await send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})
            await send({"type": "http.response.body", "body": data, "more_body": True})

        await self._service.decode(self._work, list(self._writer.stats), write, self._arrived)
        tail = self._writer.last_event() if self._with_usage else b""
        await send({"type": "http.response.body", "body": tail + DONE})


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` returns; it is cancelled when the client leaves.

    Raises:
        ClientGoneError: it left.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        for other in (task, watcher):
            if not other.done():
                other.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await other


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
