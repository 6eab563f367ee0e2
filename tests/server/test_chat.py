"""The chat template and its thinking mode: from the drafter's checkpoint, the server's settings, or the request."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dspark.checkpoints.chat import ChatRecord, read_chat, template_fingerprint, write_chat
from dspark.errors import CheckpointError, ConfigError, DSparkWarning, RequestError
from dspark.server import ServerConfig
from dspark.server.chat import chat_defaults
from dspark.server.errors import ApiError
from dspark.server.prompts import RequestReader
from dspark.server.schemas import ChatRequest

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|start|>{{ m['role'] }}: {{ m['content'] }}<|end|>{% endfor %}"
    "<|start|>assistant: {% if enable_thinking is defined and enable_thinking %}think {% endif %}"
)


@pytest.fixture
def tokenizer(tiny_tokenizer: Any) -> Any:
    own = copy.deepcopy(tiny_tokenizer)
    own.chat_template = TEMPLATE
    return own


@pytest.fixture
def engine(make_decoder: Callable[..., Any], tokenizer: Any, tmp_path: Path) -> Any:
    """An engine whose drafter was read from ``tmp_path``."""
    made = make_decoder().engine
    made.tokenizer = tokenizer
    made.parts.drafter.checkpoint = SimpleNamespace(path=tmp_path)
    return made


def read(engine: Any, config: ServerConfig | None = None, **body: Any) -> str:
    """The prompt that a chat becomes."""
    config = config or ServerConfig()
    reader = RequestReader(engine, config, chat_defaults(engine, config.template_args))
    messages = body.pop("messages", [{"role": "user", "content": "hi"}])
    work = reader.chat(ChatRequest.model_validate({"model": "x", "messages": messages, **body}))
    return str(engine.tokenizer.decode(work.choices[0][0]))


def test_records_come_back(tmp_path: Path) -> None:
    record = ChatRecord("0123456789abcdef", {"enable_thinking": False})
    write_chat(tmp_path, record)
    assert read_chat(tmp_path) == record
    assert read_chat(tmp_path / "elsewhere") is None
    for wrong in (
        "{",
        "[]",
        '{"format": "dspark-chat", "version": 2}',
        json.dumps({**record.as_dict(), "chat_template": 3}),
    ):
        (tmp_path / "chat.json").write_text(wrong)
        with pytest.raises(CheckpointError, match=r"chat\.json"):
            read_chat(tmp_path)


def test_fingerprints_tell_templates_apart(tokenizer: Any, tiny_tokenizer: Any) -> None:
    assert template_fingerprint(tokenizer) != template_fingerprint(tiny_tokenizer)
    assert template_fingerprint(None) is None


@pytest.mark.parametrize("thinking", [True, False])
def test_the_mode_is_the_checkpoints(engine: Any, tmp_path: Path, tokenizer: Any, thinking: bool, recwarn: Any) -> None:
    write_chat(tmp_path, ChatRecord(template_fingerprint(tokenizer), {"enable_thinking": thinking}))
    assert read(engine).endswith("think ") is thinking
    assert not [w for w in recwarn if issubclass(w.category, DSparkWarning)]


def test_the_servers_setting_wins_and_is_told(engine: Any, tmp_path: Path, tokenizer: Any) -> None:
    write_chat(tmp_path, ChatRecord(template_fingerprint(tokenizer), {"enable_thinking": False}))
    with pytest.warns(DSparkWarning, match="trained with enable_thinking = False, and the server sets True"):
        assert read(engine, ServerConfig(template_args={"enable_thinking": True})).endswith("think ")


def test_a_requests_setting_wins_and_is_told(engine: Any, tmp_path: Path, tokenizer: Any) -> None:
    write_chat(tmp_path, ChatRecord(template_fingerprint(tokenizer), {"enable_thinking": False}))
    with pytest.warns(DSparkWarning, match="a request sets enable_thinking = True"):
        assert read(engine, chat_template_kwargs={"enable_thinking": True}).endswith("think ")


def test_a_departure_from_the_templates_default_is_told(engine: Any, tmp_path: Path, tokenizer: Any) -> None:
    """A drafter that was trained with no variables set was trained in the template's own mode."""
    write_chat(tmp_path, ChatRecord(template_fingerprint(tokenizer), {}))
    with pytest.warns(DSparkWarning, match="trained with the template's default of enable_thinking, and the server"):
        assert read(engine, ServerConfig(template_args={"enable_thinking": True})).endswith("think ")
    with pytest.warns(DSparkWarning, match="a request sets enable_thinking = True"):
        assert read(engine, chat_template_kwargs={"enable_thinking": True}).endswith("think ")


def test_the_default_in_words_is_no_departure(engine: Any, tmp_path: Path, tokenizer: Any, recwarn: Any) -> None:
    write_chat(tmp_path, ChatRecord(template_fingerprint(tokenizer), {}))
    read(engine, ServerConfig(template_args={"enable_thinking": False}))
    read(engine, chat_template_kwargs={"enable_thinking": False})
    assert not [w for w in recwarn if issubclass(w.category, DSparkWarning)]


def test_another_template_is_told(engine: Any, tmp_path: Path) -> None:
    write_chat(tmp_path, ChatRecord("0" * 16, {}))
    with pytest.warns(DSparkWarning, match="another chat template"):
        defaults = chat_defaults(engine, {})
    assert len(defaults.notes) == 1


def test_a_broken_record_is_told_and_left_out(engine: Any, tmp_path: Path) -> None:
    (tmp_path / "chat.json").write_text("{")
    with pytest.warns(DSparkWarning, match=r"chat\.json"):
        assert chat_defaults(engine, {}).trained is None


def test_unknown_variables_are_refused(engine: Any) -> None:
    with pytest.raises(ConfigError, match="no variable 'enable_thought'"):
        chat_defaults(engine, {"enable_thought": True})
    with pytest.raises(ApiError, match="no such variable"):
        read(engine, chat_template_kwargs={"enable_thought": True})


def test_what_a_template_refuses_is_the_requests_fault(engine: Any) -> None:
    with pytest.raises((ApiError, RequestError), match="no tools here"):
        read(engine, messages=[{"role": "tool", "content": "x"}])


def test_without_a_template_there_are_no_chats(engine: Any) -> None:
    engine.tokenizer.chat_template = None
    with pytest.raises(ApiError, match="no chat template"):
        read(engine)
