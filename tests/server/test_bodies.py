"""Bodies that JSON allows, or nearly, and that nothing behind could take: refused by the field's name."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from dspark.server.bodies import MOST_DIGITS, read_json
from dspark.server.errors import ApiError, BodyError
from tests.server.conftest import MODEL, Live

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TEXT: dict[str, Any] = {"model": MODEL, "prompt": "the fox", "max_tokens": 2}
PATHS = {"chat": ("/v1/chat/completions", CHAT), "text": ("/v1/completions", TEXT)}
HALF = '"\\ud800"'
LONG = "9" * 5000


def send(live: Live, kind: str, field: str, value: str) -> httpx.Response:
    """A request with one more field, whose value is written as ``value``."""
    path, body = PATHS[kind]
    raw = json.dumps({k: v for k, v in body.items() if k != field})[:-1] + f', "{field}": {value}}}'
    return httpx.post(live.url + path, content=raw.encode(), headers={"content-type": "application/json"}, timeout=60)


def refused(answer: httpx.Response, param: str) -> dict[str, Any]:
    assert answer.status_code == 400, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")
    return error


@pytest.mark.parametrize(
    ("kind", "field", "value", "param"),
    [
        ("chat", "chat_template_kwargs", f"{{{HALF}: 1}}", "chat_template_kwargs"),
        ("chat", "chat_template_kwargs", f'{{"role": {HALF}}}', "chat_template_kwargs.role"),
        ("chat", "chat_template_kwargs", f'{{"role": ["\\uDfff"], "a": {HALF}}}', "chat_template_kwargs.role[0]"),
        ("chat", "chat_template_kwargs", '{"role": NaN}', "chat_template_kwargs.role"),
        ("chat", "chat_template_kwargs", f'{{"role": {LONG}}}', "chat_template_kwargs.role"),
        ("chat", "messages", f'[{{"role": "user", "content": {HALF}}}]', "messages[0].content"),
        ("chat", "messages", f'[{{"role": "user", "content": "a", {HALF}: 1}}]', "messages[0]"),
        ("text", "prompt", f'["a", {HALF}]', "prompt[1]"),
        ("text", "prompt", f"[5, {LONG}]", "prompt[1]"),
        ("text", "stop", HALF, "stop"),
        ("text", "model", HALF, "model"),
        ("text", "user", HALF, "user"),
        ("text", "logit_bias", f"{{{HALF}: 1}}", "logit_bias"),
        ("text", "metadata", f'{{"a": {{{HALF}: 1}}}}', "metadata.a"),
        ("text", "metadata", f'{{"a": [-{LONG}]}}', "metadata.a[0]"),
        ("text", "metadata", '{"a": 1e999}', "metadata.a"),
        ("text", "\\ud800", "1", "body"),
        ("text", "max_tokens", LONG, "max_tokens"),
        ("text", "temperature", LONG, "temperature"),
        ("text", "temperature", f"{LONG}.5", "temperature"),
        ("text", "temperature", "9" * MOST_DIGITS, "temperature"),
        ("text", "seed", f"-{LONG}", "seed"),
        ("text", "stop_token_ids", f"[{LONG}]", "stop_token_ids[0]"),
        ("text", "nothing_known", LONG, "nothing_known"),
        ("text", "logit_bias", f'{{"{LONG}": 1}}', "logit_bias"),
    ],
)
def test_what_no_reader_takes_is_refused_by_name(live: Live, kind: str, field: str, value: str, param: str) -> None:
    refused(send(live, kind, field, value), param)


def test_a_half_in_a_schema_is_named(live: Live) -> None:
    schema = f'{{"type": "json_schema", "json_schema": {{"name": "x", "schema": {{"enum": [{HALF}]}}}}}}'
    refused(send(live, "text", "response_format", schema), "response_format.json_schema.schema.enum[0]")


def test_whole_pairs_and_long_strings_of_digits_pass(live: Live) -> None:
    assert send(live, "text", "prompt", '"\\ud83d\\ude00"').status_code == 200
    assert send(live, "text", "user", f'"{LONG}"').status_code == 200
    assert send(live, "text", "metadata", f'{{"a": {"9" * MOST_DIGITS}, "b": [1.5, null, true]}}').status_code == 200


def test_bodies_are_read_as_python_reads_them() -> None:
    for text in ('{"a": [1, -2.5e3, true, null, "\\ud83d\\ude00"]}', "[]", '"x"', "0"):
        for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-32"):
            assert read_json(text.encode(encoding)) == json.loads(text)


@pytest.mark.parametrize(("raw", "message"), [(b'"\xff\xfe"', "no text"), (b"[" * 200_000, "nested too deeply")])
def test_what_is_no_text_or_too_deep_is_the_bodys_fault(raw: bytes, message: str) -> None:
    with pytest.raises(BodyError, match=message) as refusal:
        read_json(raw)
    assert refusal.value.status_code == 400
    assert refusal.value.param == "body"


def test_an_odd_place_deep_inside_is_found() -> None:
    with pytest.raises(BodyError) as refusal:
        read_json(b'{"a": ' + b"[" * 300 + b"NaN" + b"]" * 300 + b"}")
    assert refusal.value.param == "a" + "[0]" * 300


def test_an_error_can_be_sent_whatever_it_quotes() -> None:
    answer = ApiError(400, "x: \ud800 is odd").response()
    assert json.loads(bytes(answer.body))["error"]["message"] == "x: \\ud800 is odd"


# numbers within JSON's reach and beyond the engine's


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"seed": 1}, {}], ids=["greedy", "seeded", "sampled"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("repetition_penalty", 0.01),
        ("repetition_penalty", 100),
        ("temperature", 1e-30),
        ("top_p", 5e-324),
        ("min_p", 5e-324),
        ("min_p", 1),
        ("presence_penalty", -5e-324),
        ("frequency_penalty", -2),
        ("logit_bias", {"5": 5e-324, "6": -100, "7": 100}),
    ],
)
def test_numbers_at_the_edge_work(live: Live, sampling: dict[str, Any], field: str, value: Any) -> None:
    edge = {"temperature": 1e-30, "repetition_penalty": 0.01} if sampling.get("temperature") != 0 else {}
    for more in ({}, edge):
        answer = live.post("/v1/completions", {**TEXT, "max_tokens": 6, **more, **sampling, field: value})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("repetition_penalty", 1e-308),
        ("repetition_penalty", 5e-324),
        ("repetition_penalty", 0.009),
        ("repetition_penalty", 101),
        ("repetition_penalty", 1e308),
        ("temperature", 5e-324),
        ("temperature", 1e308),
        ("top_p", 1e308),
        ("min_p", -5e-324),
        ("presence_penalty", 1e308),
        ("frequency_penalty", -1e308),
        ("logit_bias", {"5": 1e308}),
        ("logit_bias", {"300": 1}),
        ("stop_token_ids", [5, 300]),
        ("stop_token_ids", [2**31 - 1]),
    ],
)
def test_numbers_beyond_the_edge_are_refused_by_name(live: Live, field: str, value: Any) -> None:
    answer = live.post("/v1/completions", {**TEXT, field: value})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"].partition(".")[0].partition("[")[0] == field
    assert error["message"].startswith(field)
