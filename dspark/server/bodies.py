"""Request bodies as JSON: what Python reads from it and nothing behind can take is refused here, by its place."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from dspark.server.errors import BodyError, location

MOST_DIGITS = 300
"""Longest integer that is read as one; a double has 309 digits at most, and Python refuses 4,301."""


class JsonRoute(APIRoute):
    """A route whose body is read by :func:`read_json`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, on a request of the own kind."""
        handle = super().get_route_handler()

        async def own(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return own


class _JsonRequest(Request):
    async def json(self) -> Any:
        return read_json(await self.body())


def read_json(raw: bytes) -> Any:
    """The value of a body.

    Raises:
        json.JSONDecodeError: it is no JSON.
        BodyError: it is no text, is nested too deeply, or holds half a character, NaN, or a number beyond all bounds;
            of the last three the place is named.
    """
    try:
        text = raw.decode(json.detect_encoding(raw))
    except UnicodeDecodeError as err:
        raise BodyError(400, f"body: it is no text: {err}", code="invalid_json") from err
    numbers = _Numbers()
    try:
        value = json.loads(
            text, parse_int=numbers.integer, parse_float=numbers.real, parse_constant=numbers.constant
        )  # fmt: skip
    except RecursionError as err:
        raise BodyError(400, "body: nested too deeply", code="invalid_json") from err
    if numbers.odd or "\\ud" in text or "\\uD" in text:  # only an escape can say half a character
        _refuse(value)
    return value


class _Numbers:
    """Reads numbers; those that are too large become infinite, which ``odd`` tells."""

    def __init__(self) -> None:
        self.odd = False

    def integer(self, text: str) -> int | float:
        if len(text) <= MOST_DIGITS:
            return int(text)
        self.odd = True
        return -math.inf if text.startswith("-") else math.inf

    def real(self, text: str) -> float:
        number = float(text)
        self.odd |= math.isinf(number)
        return number

    def constant(self, text: str) -> float:
        self.odd = True
        return float(text.replace("Infinity", "inf"))


def _refuse(body: Any) -> None:
    """Raises:
    BodyError: naming the first place that holds what :func:`read_json` refuses.
    """
    left: list[tuple[Any, Any]] = [(None, body)]  # paths as (path of what is around, key or index)
    while left:  # not by recursion: bodies nest deeply
        path, value = left.pop()
        wrong = None
        if isinstance(value, dict):
            left += [((path, key), inner) for key, inner in reversed(value.items())]
            if not all(map(_whole, value)):
                wrong = "a name has half a surrogate pair, which is no character"
        elif isinstance(value, list):
            left += [((path, i), inner) for i, inner in reversed(list(enumerate(value)))]
        elif isinstance(value, str) and not _whole(value):
            wrong = "half a surrogate pair is no character"
        elif isinstance(value, float) and not math.isfinite(value):
            wrong = f"no finite number, or one of more than {MOST_DIGITS} digits"
        if wrong is not None:
            name = _name(path)
            raise BodyError(400, f"{name}: {wrong}", param=name, code="invalid_value")


def _name(path: Any) -> str:
    parts: list[str | int] = []
    while path is not None:
        path, part = path
        parts.append(part)
    return location(("body", *reversed(parts))) or "body"


def _whole(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
