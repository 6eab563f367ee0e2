"""Bodies that are too large, or too slow to arrive, are refused before anything reads them."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dspark.server.errors import ApiError, BodyError

SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
)


class BodyLimits:
    """ASGI middleware around every request.

    Args:
        app: what comes behind it.
        max_bytes: largest body.
        timeout: seconds until its next part.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, timeout: float) -> None:
        self._app, self._max, self._timeout = app, max_bytes, timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "")
        if length.isascii() and length.isdigit() and int(length) > self._max:
            error = ApiError(413, self._too_large(), param="body", code="body_too_large")
            await error.response()(scope, receive, send)
            return
        seen, complete = 0, False

        async def limited() -> Message:
            nonlocal seen, complete
            if complete:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), self._timeout)
            except TimeoutError:
                raise BodyError(408, f"body: no more of it for {self._timeout:g} s", code="body_timeout") from None
            if message["type"] != "http.request":
                complete = True
                return message
            seen += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if seen > self._max:
                raise BodyError(413, self._too_large(), code="body_too_large")
            return message

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *SECURITY_HEADERS]
            await send(message)

        await self._app(scope, limited, guarded)

    def _too_large(self) -> str:
        return f"body: larger than {self._max} bytes"
