"""What is refused: by which status, in which shape, and naming what."""

from __future__ import annotations

import hmac
import json
import socket
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from benchmarks.serve_cases import Malformed, malformed
from dspark.config import SamplingParams
from dspark.errors import ConfigError
from dspark.server import ServerConfig
from dspark.server.auth import KeyGate
from dspark.server.errors import field_of, location
from tests.server.conftest import MODEL, Live

CASES = malformed(MODEL, 256)
KEYS = ("first-key", "second-key")


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error, its shape checked."""
    body = answer.json()
    assert set(body) == {"error"}
    assert {"message", "type", "param", "code"} <= set(body["error"])
    assert body["error"]["message"]
    error: dict[str, Any] = body["error"]
    return error


def test_there_are_fifty_kinds() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 50


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_malformed_requests_are_refused_by_name(live: Live, case: Malformed) -> None:
    before = live.decoder.engine.stats.steps
    answer = httpx.post(live.url + case.path, content=case.content, headers=dict(case.headers), timeout=30)
    error = error_of(answer)
    assert 400 <= answer.status_code < 500
    assert case.field in error["message"]
    assert error["param"] is None or error["param"].startswith(case.field.partition("[")[0].partition(".")[0])
    assert live.decoder.engine.stats.steps == before


def test_official_client_reads_the_errors(live: Live) -> None:
    client = live.client()
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt="a", max_tokens=4, extra_body={"min_p": 7})
    assert refused.value.param == "min_p"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=[{"role": "user", "content": "a"}])
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_unknown_paths_and_methods_have_the_shape(live: Live) -> None:
    assert live.get("/v1/nothing").status_code == 404
    assert "/v1/nothing" in error_of(live.get("/v1/nothing"))["message"]
    assert live.get("/v1/completions").status_code == 405
    error_of(live.get("/v1/completions"))


def test_a_chunked_body_is_counted_too(serving: Callable[..., Any]) -> None:
    def parts() -> Any:
        for _ in range(40):
            yield b"x" * 100

    with serving(ServerConfig(model_name=MODEL, max_body_bytes=1000)) as live:
        answer = httpx.post(f"{live.url}/v1/completions", content=parts(), headers={"content-type": "application/json"})
        assert answer.status_code == 413
        assert "1000 bytes" in error_of(answer)["message"]


def test_a_body_that_does_not_arrive_is_given_up(serving: Callable[..., Any]) -> None:
    with serving(ServerConfig(model_name=MODEL, body_timeout=0.2)) as live:
        host, port = live.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"content-length: 100\r\n\r\n{"
            )
            head = connection.recv(4096).split(b"\r\n", 1)[0]
        assert b" 408 " in head


# keys


@pytest.fixture(scope="module")
def guarded(serving: Callable[..., Any]) -> Any:
    with serving(ServerConfig(model_name=MODEL, api_keys=KEYS)) as live:
        yield live


@pytest.mark.parametrize(
    "path",
    ["/", "/page.js", "/page.css", "/status", "/status/stream", "/metrics", "/v1/models", "/openapi.json", "/nothing"],
)
def test_everything_needs_a_key(guarded: Live, path: str) -> None:
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Bearer {KEYS[0]}x"}):
        answer = guarded.get(path, headers=headers)
        assert answer.status_code == 401
        assert "www-authenticate" in answer.headers
        assert error_of(answer)["code"] == "invalid_api_key"


def test_any_key_opens(guarded: Live) -> None:
    for key in KEYS:
        assert guarded.client(key).models.list().data[0].id == MODEL
        assert guarded.get("/", headers={"authorization": f"Bearer {key}"}).status_code == 200
        assert guarded.get("/status", auth=("anyone", key)).status_code == 200


def test_every_key_is_compared_in_constant_time(monkeypatch: Any) -> None:
    """All of them, whichever fits, and digests of one length whatever is presented."""
    real, seen = hmac.compare_digest, []

    def compare(one: bytes, other: bytes) -> bool:
        seen.append((len(one), len(other)))
        return real(one, other)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    gate = KeyGate(lambda *_: None, KEYS)  # type: ignore[arg-type,return-value]
    for key, known in ((KEYS[0], True), (KEYS[1], True), ("f", False), (KEYS[0] * 999, False)):
        seen.clear()
        assert gate._known(key) is known
        assert seen == [(32, 32)] * len(KEYS)


def test_health_needs_none(guarded: Live) -> None:
    assert guarded.get("/health").json() == {"status": "ok"}


def test_a_password_opens_the_page_alone(guarded: Live) -> None:
    """A browser sends it to other sites' forms as well, so it must not decode."""
    assert guarded.get("/", auth=("me", KEYS[0])).status_code == 200
    assert guarded.get("/", auth=("me", "wrong")).status_code == 401
    assert guarded.get("/v1/models", auth=("me", KEYS[0])).status_code == 401
    for broken in ("Basic", "Basic !!", "Basic bm9jb2xvbg==", "Digest x", "Bearer"):
        assert guarded.get("/", headers={"authorization": broken}).status_code == 401


# parts


def test_locations() -> None:
    assert location(("body", "messages", 0, "content", "list[TextPart]", 1, "text")) == "messages[0].content[1].text"
    assert location(("body",)) is None
    assert location(("body", "stop", "str")) == "stop"


def test_field_of_the_librarys_messages() -> None:
    assert field_of("SamplingParams.top_p: must be above 0") == "top_p"
    assert field_of("prompt of 3 tokens") == "prompt"
    assert field_of("a slot has") == "a" or field_of("a slot has") is None
    with pytest.raises(ConfigError) as refused:
        SamplingParams(top_p=7)
    assert field_of(str(refused.value)) == "top_p"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_queue": -1}, "max_queue"),
        ({"request_timeout": 0}, "request_timeout"),
        ({"max_body_bytes": 1.5}, "max_body_bytes"),
        ({"max_choices": 0}, "max_choices"),
        ({"api_keys": "one"}, "api_keys"),
        ({"api_keys": ["", "x"]}, "api_keys"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerConfig(**settings)


def test_keys_are_not_shown() -> None:
    assert "secret" not in repr(ServerConfig(api_keys=["secret"]))


def test_answers_are_json_even_for_a_failure_of_our_own(serving: Callable[..., Any], monkeypatch: Any) -> None:
    with serving() as live:
        monkeypatch.setattr(live.decoder.front, "stream_many", lambda *a, **k: 1 / 0)
        answer = live.post("/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": 2})
        assert answer.status_code == 500
        assert error_of(answer)["message"] == "internal error: ZeroDivisionError"
        assert json.loads(answer.text)["error"]["type"] == "server_error"
