"""Fifty kinds of malformed requests, and the field that each answer has to name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True, slots=True)
class Malformed:
    """A request that must get a 4xx.

    Attributes:
        name: which kind.
        path: where it goes.
        content: its body.
        field: what the message has to name.
        headers: its headers.
    """

    name: str
    path: str
    content: bytes
    field: str
    headers: Mapping[str, str]


def malformed(model: str, max_len: int, *, body_limit: int = 1 << 20, choices: int = 10_000) -> list[Malformed]:
    """All kinds.

    Args:
        model: the served name.
        max_len: positions of a slot.
        body_limit: largest body that the server takes.
        choices: more choices than slots and queue hold.
    """
    chat = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    text = {"model": model, "prompt": "hello", "max_tokens": 4}
    found = [_json(name, CHAT, {**chat, **change}, field) for name, change, field in _chats(max_len)]
    found += [_json(name, TEXT, {**text, **change}, field) for name, change, field in _texts(max_len, choices)]
    found += [
        _json("no model", CHAT, {k: v for k, v in chat.items() if k != "model"}, "model"),
        _json("unknown model", TEXT, {**text, "model": "another"}, "model"),
        _json("no messages", CHAT, {"model": model}, "messages"),
        _json("no prompt", TEXT, {"model": model}, "prompt"),
        _json("a list as body", TEXT, [text], "body"),
        _raw("not JSON", CHAT, b'{"model": ', "body"),
        _raw("not UTF-8", TEXT, b'{"model": "\xff\xfe"}', "body"),
        _raw("empty body", CHAT, b"", "body"),
        _raw("body too large", TEXT, b'{"prompt": "' + b"a" * body_limit + b'"}', "body"),
        _raw("JSON too deep", TEXT, b"[" * 100_000, "body"),
        _raw("another content type", TEXT, json.dumps(text).encode(), "body", "text/plain"),
    ]
    return found


def _chats(max_len: int) -> list[tuple[str, dict[str, Any], str]]:
    def message(**changes: Any) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": "hello", **changes}]}

    return [
        ("messages a string", {"messages": "hello"}, "messages"),
        ("no message", {"messages": []}, "messages"),
        ("message a string", {"messages": ["hello"]}, "messages[0]"),
        ("unknown role", message(role="robot"), "messages[0].role"),
        ("content a number", message(content=3), "messages[0].content"),
        ("content null", message(content=None), "messages[0].content"),
        ("image content", message(content=[{"type": "image_url", "image_url": {"url": "x"}}]), "messages[0].content"),
        ("unknown field of a message", message(contents="x"), "messages[0].contents"),
        ("unknown field", {"temprature": 1}, "temprature"),
        ("tools", {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ("both limits", {"max_completion_tokens": 4}, "max_tokens"),
        ("top_logprobs alone", {"top_logprobs": 3}, "top_logprobs"),
        ("too many top_logprobs", {"logprobs": True, "top_logprobs": 1000}, "top_logprobs"),
        ("logprobs a number", {"logprobs": 3}, "logprobs"),
        ("template variable", {"chat_template_kwargs": {"no_such_variable_x": 1}}, "chat_template_kwargs"),
        ("own template", {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
        ("too long an answer", {"max_tokens": max_len}, "max_tokens"),
        ("stream a string", {"stream": "yes"}, "stream"),
        ("stream options alone", {"stream_options": {"include_usage": True}}, "stream_options"),
        ("no schema", {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            "wrong schema",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}},
            "response_format.json_schema.schema",
        ),
        ("unknown format", {"response_format": {"type": "xml"}}, "response_format.type"),
    ]


def _texts(max_len: int, choices: int) -> list[tuple[str, dict[str, Any], str]]:
    return [
        ("temperature a string", {"temperature": "hot"}, "temperature"),
        ("temperature negative", {"temperature": -1}, "temperature"),
        ("top_p zero", {"top_p": 0}, "top_p"),
        ("top_p above one", {"top_p": 1.5}, "top_p"),
        ("top_k negative", {"top_k": -3}, "top_k"),
        ("min_p above one", {"min_p": 2}, "min_p"),
        ("max_tokens zero", {"max_tokens": 0}, "max_tokens"),
        ("max_tokens a fraction", {"max_tokens": 1.5}, "max_tokens"),
        ("min_tokens above max", {"min_tokens": 5}, "min_tokens"),
        ("n zero", {"n": 0}, "n"),
        ("n huge", {"n": choices}, "n"),
        ("best_of", {"best_of": 3}, "best_of"),
        ("seed a string", {"seed": "x"}, "seed"),
        ("seed too large", {"seed": 2**70}, "seed"),
        ("stop empty", {"stop": ""}, "stop"),
        ("stop a number", {"stop": [3]}, "stop"),
        ("too many stops", {"stop": [str(i) for i in range(100)]}, "stop"),
        ("bias of a word", {"logit_bias": {"word": 1}}, "logit_bias"),
        ("bias too large", {"logit_bias": {"3": 1e9}}, "logit_bias"),
        ("bias outside", {"logit_bias": {str(10**9): 1}}, "logit_bias"),
        ("penalty too large", {"presence_penalty": 9}, "presence_penalty"),
        ("repetition zero", {"repetition_penalty": 0}, "repetition_penalty"),
        ("prompt empty", {"prompt": ""}, "prompt"),
        ("prompt a number", {"prompt": 3}, "prompt"),
        ("token outside", {"prompt": [10**9]}, "prompt"),
        ("prompt too long", {"prompt": [5] * (max_len + 1)}, "prompt"),
        ("echo with logprobs", {"echo": True, "logprobs": 1}, "echo"),
        ("suffix", {"suffix": "end"}, "suffix"),
    ]


def _json(name: str, path: str, body: Any, field: str) -> Malformed:
    return _raw(name, path, json.dumps(body).encode(), field)


def _raw(name: str, path: str, content: bytes, field: str, kind: str = "application/json") -> Malformed:
    return Malformed(name, path, content, field, {"content-type": kind})
