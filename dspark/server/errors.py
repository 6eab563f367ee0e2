"""Errors in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from dspark.errors import ComponentError, ConfigError, DSparkError, RequestError

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_UNION_MEMBERS = frozenset({"str", "int", "float", "bool", "constrained-str"})
"""Pydantic names the member of a union that it tried; ``list[...]`` and the like are no identifiers anyway."""
_LONGEST = 64
"""Characters of a client's own words that an error repeats."""
_FIELD = re.compile(r"^(?:SamplingParams\.)?([a-z_]+)(?:$|[:. \[])")


class ApiError(Exception):
    """What a client gets to see.

    Attributes:
        status: HTTP status.
        message, param, code: of the error object; ``param`` is the field that is wrong.
        headers: further headers.
        extra: further members of the error object.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.message = message.encode("utf-8", "backslashreplace").decode()  # half a character can't be sent
        self.headers = dict(headers or {})
        self.extra = dict(extra or {})

    @property
    def body(self) -> dict[str, Any]:
        """The JSON that is sent."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code, **self.extra}}

    def response(self) -> Response:
        """As an answer."""
        return JSONResponse(self.body, status_code=self.status, headers=self.headers)

    def event(self) -> bytes:
        """As a server-sent event, where the answer has begun."""
        return b"data: " + json.dumps(self.body).encode() + b"\n\n"


class BodyError(HTTPException):
    """A body that can't be read. FastAPI hides other kinds of errors in its reading of bodies behind a text of its own.

    Attributes:
        param, code: as an :class:`ApiError` has them.
    """

    def __init__(self, status: int, message: str, *, param: str = "body", code: str | None = None) -> None:
        super().__init__(status, message)
        self.param, self.code = param, code


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that can't be served as it is."""
    return ApiError(400, message, param=param, code=code)


def as_api_error(error: BaseException) -> ApiError:
    """What a client is told of an error. Only dspark's own messages are passed on."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ComponentError):
        where = {"component": error.component, "phase": error.phase}
        return ApiError(500, str(error), code="component_error", extra={"dspark": where})
    if isinstance(error, (RequestError, ConfigError)):
        message = str(error).removeprefix("SamplingParams.")
        return invalid(message, field_of(message))
    if isinstance(error, DSparkError):
        return ApiError(503, str(error), code="engine_unavailable", headers={"Retry-After": "5"})
    return ApiError(500, f"internal error: {type(error).__name__}", code="internal_error")


def field_of(message: str) -> str | None:
    """The field that an error of the library names in front."""
    found = _FIELD.match(message)
    return found.group(1) if found else None


def location(parts: Sequence[str | int]) -> str | None:
    """``("body", "messages", 0, "role")`` -> ``messages[0].role``."""
    out = ""
    for part in parts[1:] if parts and parts[0] in ("body", "query", "path", "header") else parts:
        if isinstance(part, int):
            out += f"[{part}]"
        elif part not in _UNION_MEMBERS and re.fullmatch(r"[A-Za-z_][\w-]*", part):
            out += f".{part}" if out else part
    return out or None


def add_handlers(app: FastAPI) -> None:
    """Let every error that leaves a route have the shape."""

    async def own(request: Request, error: Exception) -> Response:
        return as_api_error(error).response()

    async def http(request: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            return await own(request, error)
        message = str(error.detail)
        if isinstance(error, BodyError):
            return ApiError(error.status_code, message, param=error.param, code=error.code).response()
        if error.status_code == 404:
            message = f"no such path: {request.url.path}"
        elif error.status_code == 405:
            message = f"{request.method} is not allowed at {request.url.path}"
        return ApiError(error.status_code, message, headers=error.headers).response()

    async def validation(request: Request, error: Exception) -> Response:
        details = error.errors() if isinstance(error, RequestValidationError) else []
        kind = request.headers.get("content-type", "")
        if (
            details
            and tuple(details[0]["loc"]) == ("body",)
            and details[0]["type"] != "json_invalid"
            and not _json(kind)
        ):
            sent = f"not as {kind[:_LONGEST]!r}" if kind else "and say so in content-type"
            return invalid(f"body: send it as application/json, {sent}", "body", "unsupported_media_type").response()
        return _validation_error(details).response()

    app.add_exception_handler(RequestValidationError, validation)
    app.add_exception_handler(HTTPException, http)
    for kind in (ApiError, DSparkError, Exception):
        app.add_exception_handler(kind, own)


def _validation_error(details: Sequence[Mapping[str, Any]]) -> ApiError:
    """The most telling of the details: an unknown field, else what lies deepest (of a union, the member that fits)."""
    if not details:
        return invalid("the request can't be read")
    first = min(details, key=lambda d: (d["type"] != "extra_forbidden", -len(d["loc"])))
    if first["type"] == "json_invalid":
        reason = (first.get("ctx") or {}).get("error", "")
        return invalid(f"body: it is no JSON: {reason}".rstrip(": "), "body", "invalid_json")
    if first["type"] == "extra_forbidden":
        field = _unknown(first["loc"])
        return invalid(f"{field}: unknown field", field, "unknown_field")
    name = location(first["loc"])
    if name is None:
        return invalid(f"body: {first['msg']}", "body")
    message = first["msg"].removeprefix("Value error, ")
    return invalid(f"{name}: {message}", name, first["type"])


def _unknown(parts: Sequence[str | int]) -> str:
    """The place of an unknown field, whose name may be no name at all."""
    *before, last = parts
    around, own = location(before), str(last)
    own = own if len(own) <= _LONGEST else own[:_LONGEST] + "..."
    if re.fullmatch(r"[A-Za-z_][\w-]*", own):
        return f"{around}.{own}" if around else own
    return f"{around or 'body'}[{json.dumps(own, ensure_ascii=False)}]"


def _json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
