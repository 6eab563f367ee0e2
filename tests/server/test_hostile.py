"""A hostile client: what it sends is answered or refused, and afterwards the server is as it was before."""

from __future__ import annotations

import contextlib
import copy
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from dspark.server import ServerConfig
from dspark.server.protocol import MAX_HEAD
from dspark.server.schemas import ChatRequest, CompletionRequest, JsonSchema, Message, ResponseFormat, StreamOptions
from tests.server.conftest import MODEL, Live
from tests.server.sockets import CHATS, TEXTS, connect, raw, statuses, talk, until_closed

TEXT: dict[str, Any] = {"model": MODEL, "prompt": "the quick brown fox", "max_tokens": 12, "temperature": 0}
CHAT: dict[str, Any] = {**TEXT, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
del CHAT["prompt"]
LIMIT = 4000


@pytest.fixture(scope="module")
def hostile(serving: Callable[..., Any]) -> Iterator[Live]:
    with serving(ServerConfig(model_name=MODEL, max_body_bytes=LIMIT)) as live:
        yield live


@pytest.fixture
def unharmed(hostile: Live) -> Iterator[Live]:
    """Before and after: the same answer to a greedy request, nothing held."""
    before = hostile.post(TEXTS, TEXT).json()["choices"]
    yield hostile
    hostile.settled()
    assert hostile.get("/health").json() == {"status": "ok"}
    assert hostile.post(TEXTS, TEXT).json()["choices"] == before
    hostile.settled()
    assert [*hostile.service._runs, *hostile.decoder.front._readers] == []


def error_of(answer: httpx.Response | bytes) -> dict[str, Any]:
    error = json.loads(answer[answer.index(b"{") :] if isinstance(answer, bytes) else answer.text)["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    return dict(error)


# the connection


def test_pipelined_requests_are_answered_in_order(unharmed: Live) -> None:
    asked = [raw({**TEXT, "max_tokens": n}) for n in (3, 1, 2)]
    answers = talk(unharmed, b"".join(asked), raw(b"{"), raw({**TEXT, "max_tokens": 4}, more="connection: close\r\n"))
    assert statuses(answers) == [200, 200, 200, 400, 200]
    counts = [int(part.split(b",")[0]) for part in answers.split(b'"completion_tokens": ')[1:]]
    assert counts == [3, 1, 2, 4]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_leaving_frees_the_slot_with_requests_pipelined_behind(
    unharmed: Live, monkeypatch: Any, stream: bool, half: bool
) -> None:
    target: Any = unharmed.decoder.engine.parts.target
    forward, begun, gone = target.forward, threading.Event(), threading.Event()

    def held(*args: Any) -> Any:
        begun.set()
        assert gone.wait(60)
        return forward(*args)

    stats = unharmed.decoder.engine.stats
    before = dict(stats.finished)
    monkeypatch.setattr(target, "forward", held)
    connection = connect(unharmed)
    connection.sendall(raw({**TEXT, "max_tokens": 200, "ignore_eos": True, "stream": stream}) + raw(TEXT) * 3)
    assert begun.wait(60)
    if half:
        connection.shutdown(socket.SHUT_WR)
        until_closed(connection)
    connection.close()
    while unharmed.service.live:  # noticed while the engine is in its step
        threading.Event().wait(0.005)
    gone.set()
    unharmed.settled()
    assert stats.finished["abort"] == before.get("abort", 0) + 1
    others = [sum(n for k, n in counts.items() if k != "abort") for counts in (stats.finished, before)]
    assert others[0] == others[1]  # what was pipelined behind has not run


def test_a_body_that_is_announced_and_not_sent(unharmed: Live) -> None:
    for sent in (b"", b'{"model"', json.dumps(TEXT).encode()):
        head = raw(TEXT).partition(b"\r\n\r\n")[0].replace(b"content-length: ", b"content-length: 3")  # 3xx bytes
        assert statuses(talk(unharmed, head + b"\r\n\r\n" + sent, leave_half=True)) in ([], [400])
    assert unharmed.service.live == 0


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /health HTTP/1.1\r\nx: " + b"a" * 10 * MAX_HEAD, 431),  # goes on without an end
        (b"GET /health HTTP/1.1\r\nx: " + b"a" * (MAX_HEAD + 10) + b"\r\n\r\n", 431),
        (b"GET /health HTTP/1.1\r\n" + b"x: a\r\n" * 20_000 + b"\r\n", 431),
        (b"GET /" + b"a" * 2 * MAX_HEAD + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET /\xff\xfe HTTP/1.1\r\n\r\n", 400),
        (b"CONNECT x:1 HTTP/1.1\r\n\r\n", 400),
        (b"\x16\x03\x01\x02" + b"\0" * 200, 400),
        (b"GET /health HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (raw(b"{}").replace(b"content-length: 2", b"content-length: x"), 400),
        (raw(b"{}", more="transfer-encoding: chunked\r\n"), 400),
    ],
)
def test_what_is_no_request_is_refused(unharmed: Live, head: bytes, status: int) -> None:
    with connect(unharmed) as connection:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):  # it has heard enough
            connection.sendall(head)
        answer = until_closed(connection)
    assert statuses(answer) in ([status], [])  # of a reset, the answer may be lost
    if answer:
        assert error_of(answer)["type"] == "invalid_request_error"


def chunked(*chunks: bytes) -> bytes:
    head = f"POST {TEXTS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return head.encode() + b"transfer-encoding: chunked\r\n\r\n" + b"".join(chunks)


def chunk(content: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(content), content)


def test_chunked_bodies(unharmed: Live) -> None:
    body = json.dumps(TEXT).encode()
    small = b"".join(chunk(body[i : i + 1]) for i in range(len(body)))
    assert statuses(talk(unharmed, chunked(small, chunk(b"")))) == [200]
    assert statuses(talk(unharmed, chunked(*[chunk(b" " * 1000)] * 9, chunk(b"")))) == [413]
    for size in (b"zz", b"-1", b"ffffffffffffffffff", b" ", b"1;" + b"a" * 2 * MAX_HEAD):
        assert statuses(talk(unharmed, chunked(size + b"\r\nx\r\n0\r\n\r\n"))) in ([400], [431], [])


def test_a_client_that_says_nothing_is_not_waited_for(serving: Callable[..., Any]) -> None:
    with serving(ServerConfig(model_name=MODEL, max_body_bytes=LIMIT, body_timeout=0.2)) as live:
        assert talk(live) == b""
        assert talk(live, b"POST /v1/completions HT") == b""
        refused = raw(b"x" * (LIMIT + 1))[: -LIMIT // 2]  # the rest is not waited for
        assert statuses(talk(live, refused)) in ([413], [])  # [] where it is late itself
        live.settled()


def test_an_offer_to_upgrade_costs_no_body(unharmed: Live) -> None:
    """Java's client offers h2c with every request."""
    offer = raw(TEXT, more="connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n")
    split = offer.index(b"{") + 9
    answers = talk(unharmed, offer, offer[:split], offer[split:] + raw(TEXT, more="connection: close\r\n"))
    assert statuses(answers) == [200, 200, 200]
    assert len({part.split(b'"usage"')[0] for part in answers.split(b'"choices": ')[1:]}) == 1


# bodies


def send(live: Live, content: bytes, path: str = TEXTS, kind: str = "application/json") -> httpx.Response:
    return httpx.post(live.url + path, content=content, headers={"content-type": kind}, timeout=60, verify=False)


def with_field(body: dict[str, Any], text: str) -> bytes:
    return (json.dumps(body)[:-1] + f", {text}}}").encode()


@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data; boundary=x", "application/jsonx", ""])
def test_other_content_types_are_named(unharmed: Live, kind: str) -> None:
    answer = send(unharmed, json.dumps(TEXT).encode(), kind=kind)
    assert answer.status_code == 400
    assert error_of(answer)["message"].startswith("body: send it as application/json")
    assert send(unharmed, json.dumps(TEXT).encode(), kind="application/json; charset=utf-8").status_code == 200


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ('"top_p": NaN', "top_p"),
        ('"metadata": {"a": [-Infinity]}', "metadata.a[0]"),
        ('"seed": Infinity', "seed"),
        ('"user": "\\udc00"', "user"),
        ('"stop": ["a", "\\ud800\\u0041"]', "stop[1]"),
        ('"metadata": {"a": ' + "[" * 1500 + "]" * 1500 + "}", "body"),
        ('"8": 1', 'body["8"]'),
        ('"": 1', 'body[""]'),
        ('"str": 1', "str"),
        ('"\\u0000": 1, "b": 1', 'body["\\u0000"]'),
        ('"' + "k" * 500 + '": 1', 'body["' + "k" * 64 + '..."]'),
        ('"response_format": {"type": "text", "a b": 1}', 'response_format["a b"]'),
        ('"logit_bias": {"5": "1"}', "logit_bias"),
    ],
)
def test_odd_values_and_unknown_fields_are_named(unharmed: Live, text: str, param: str) -> None:
    answer = send(unharmed, with_field(TEXT, text))
    assert answer.status_code == 400
    error = error_of(answer)
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")


def test_of_a_name_given_twice_the_last_counts(unharmed: Live) -> None:
    twice = send(unharmed, with_field({**TEXT, "prompt": ["other", "prompts"]}, f'"prompt": "{TEXT["prompt"]}"'))
    assert twice.json()["choices"] == unharmed.post(TEXTS, TEXT).json()["choices"]
    assert error_of(send(unharmed, with_field(TEXT, '"n": 1, "n": 0')))["param"] == "n"


def test_odd_characters_are_text(unharmed: Live) -> None:
    for text in ("\0", "a\0b\x7f\x85\u2028", "\U0010ffff\ufeff", "e\u0301" * 40, "\U0001f9d1\u200d\U0001f680" * 8):
        body = {**TEXT, "prompt": text, "echo": True, "stop": [text, "\0", text * 9]}
        answer = unharmed.post(TEXTS, body)
        assert answer.status_code == 200
        whole = answer.json()["choices"][0]
        assert whole["text"].startswith(text)
        lines = unharmed.post(TEXTS, {**body, "stream": True}).text.splitlines()  # at U+0085 and U+2028, too
        parts = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert "".join(part["choices"][0]["text"] for part in parts) == whole["text"]
        if text.isprintable():
            chat = {**CHAT, "messages": [{"role": "user", "content": text}], "stop": text}
            assert unharmed.post(CHATS, chat).status_code == 200
    assert error_of(unharmed.post(TEXTS, {**TEXT, "prompt": "\U0001f9d1" * 300}))["code"] == "context_length_exceeded"


JSON = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}}}
NULLS: list[Any] = [
    (TEXTS, TEXT, (), CompletionRequest),
    (CHATS, CHAT, (), ChatRequest),
    (CHATS, CHAT, ("messages", 0), Message),
    (TEXTS, {**TEXT, "prompt": "a", "stream": True, "stream_options": {}}, ("stream_options",), StreamOptions),
    (CHATS, {**CHAT, **JSON}, ("response_format",), ResponseFormat),
    (CHATS, {**CHAT, **JSON}, ("response_format", "json_schema"), JsonSchema),
]


@pytest.mark.parametrize(("path", "body", "place", "model"), NULLS, ids=[case[3].__name__ for case in NULLS])
def test_null_is_the_default_or_is_named(
    unharmed: Live, path: str, body: dict[str, Any], place: tuple[Any, ...], model: Any
) -> None:
    for field, info in model.model_fields.items():
        name = info.alias or field
        nulled, absent = copy.deepcopy(body), copy.deepcopy(body)
        for asked in (nulled, absent):
            asked.update({"temperature": {"seed": 5}, "max_tokens": {"top_k": 1}}.get(name, {}))
            around: Any = asked
            for step in place:
                around = around[step]
            around.pop(name, None)
            if asked is nulled:
                around[name] = None
        answer = unharmed.post(path, nulled)
        if info.is_required() or name == "json_schema":  # which the type asks for
            assert answer.status_code == 400
            assert name in error_of(answer)["param"]
            continue
        assert answer.status_code == 200, answer.text
        expected = unharmed.post(path, absent)
        choices = ("".join(r.text.split('"choices":')[1:]).split('"usage"')[0] for r in (answer, expected))
        assert len(set(choices)) == 1 or body.get("stream"), name


# streams


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "seed": 3}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("path", [TEXTS, CHATS])
def test_streams_of_choices_with_stops_and_logprobs(unharmed: Live, path: str, sampling: dict[str, Any]) -> None:
    """Every choice's parts add up to the whole answer's; a stop that spans many tokens shows nowhere."""
    more = {"logprobs": 2} if path == TEXTS else {"logprobs": True, "top_logprobs": 2}
    body = {**(TEXT if path == TEXTS else CHAT), **sampling, **more, "n": 3, "max_tokens": 60, "return_token_ids": True}

    def text_of(choice: dict[str, Any]) -> str:
        return str(choice["text"] if path == TEXTS else (choice.get("message") or choice["delta"]).get("content", ""))

    free = [text_of(c) for c in unharmed.post(path, body).json()["choices"]]
    stops = [free[0][20:27], free[2][3:5]]
    body["stop"] = stops
    whole = unharmed.post(path, body).json()["choices"]
    assert "stop" in [c["finish_reason"] for c in whole]
    seen: dict[int, list[Any]] = {i: [] for i in range(3)}
    streamed = unharmed.post(path, {**body, "stream": True}).text
    assert streamed.endswith("data: [DONE]\n\n")
    for line in streamed.splitlines():
        if line.startswith("data: {"):
            (choice,) = json.loads(line[6:])["choices"]
            seen[choice["index"]].append(choice)
    for i, parts in seen.items():
        assert "".join(map(text_of, parts)) == text_of(whole[i])
        assert not any(stop in text_of(whole[i]) for stop in stops)
        assert [p["finish_reason"] for p in parts] == [None] * (len(parts) - 1) + [whole[i]["finish_reason"]]
        assert [t for p in parts for t in p["token_ids"]] == whole[i]["token_ids"]
        name = "token_logprobs" if path == TEXTS else "content"
        logprobs = [x for p in parts if p["logprobs"] for x in p["logprobs"][name]]
        assert len(logprobs) == len(whole[i]["logprobs"][name]) == len(whole[i]["token_ids"])
