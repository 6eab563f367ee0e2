"""Who may ask: API keys, as bearer tokens or, for the page, as the password of basic authentication."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from dspark.server.errors import ApiError

OPEN = frozenset({"/health"})
"""Paths that need no key: a probe learns no more than that the server is up."""
PAGE = frozenset({"/", "/page.css", "/page.js", "/status", "/status/stream"})
"""Paths that a browser asks for, which can send a password but no bearer token."""


class KeyGate:
    """ASGI middleware that lets only requests with a key pass.

    Args:
        app: what comes behind it.
        keys: those that open; without any, everything is open.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket" and self._digests:
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http" or not self._digests or scope["path"] in OPEN:
            await self._app(scope, receive, send)
            return
        page = scope["path"] in PAGE
        key = presented(Headers(scope=scope).get("authorization", ""), basic=page)
        if key is not None and self._known(key):
            await self._app(scope, receive, send)
            return
        said = "no API key" if key is None else "unknown API key"
        challenge = 'Basic realm="dspark", charset="UTF-8"' if page else "Bearer"
        error = ApiError(
            401,
            f"{said}: send one as 'Authorization: Bearer KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": challenge},
        )
        await error.response()(scope, receive, send)

    def _known(self, key: str) -> bool:
        """Compares with every key, each in constant time, so that time tells neither which nor how much of one fits."""
        digest, found = _digest(key), False
        for known in self._digests:
            found |= hmac.compare_digest(known, digest)
        return found


def presented(header: str, *, basic: bool) -> str | None:
    """The key in an ``Authorization`` header; a password, whatever the user's name, where ``basic`` allows it."""
    scheme, _, value = header.partition(" ")
    if scheme.lower() == "bearer" and value.strip():
        return value.strip()
    if basic and scheme.lower() == "basic":
        try:
            _, colon, password = base64.b64decode(value.strip(), validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            return None
        return password if colon else None
    return None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
