"""What a line of a file of prompts asks, and the chat template around it."""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from dspark.errors import ConfigError, DataError
from dspark.training.chat_format import ChatFormat
from dspark.training.prompts_in import Dialogue, PromptFile, Skipped, read_dialogue


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


SYSTEM = {"role": "system", "content": "be quick"}


def read(record: Any, *, chat: bool = True, system: str | None = None) -> Any:
    line = record if isinstance(record, bytes) else json.dumps(record).encode()
    return read_dialogue(3, line, chat=chat, system=system)


@pytest.mark.parametrize(
    ("record", "questions"),
    [
        ({"turns": ["a", "b"]}, [[user("a")], [user("b")]]),
        ({"prompt": "a"}, [[user("a")]]),
        ({"messages": [user("a")]}, [[user("a")]]),
        ({"messages": [user("a"), assistant("x")]}, [[user("a")]]),
        ({"messages": [SYSTEM, user("a"), assistant("x"), user("b")]}, [[SYSTEM, user("a")], [user("b")]]),
        ({"messages": [user("a"), user("b"), assistant(""), user("c")]}, [[user("a"), user("b")], [user("c")]]),
    ],
)
def test_every_turn_of_the_assistant_is_asked_for_anew(record: Any, questions: Any) -> None:
    found = read({**record, "source": "here"})
    assert found == Dialogue(3, "here", tuple(tuple(q) for q in questions))
    assert found.turns == len(questions)


def test_a_system_message_is_added_where_there_is_none() -> None:
    assert read({"turns": ["a"]}, system="be quick").questions == ((SYSTEM, user("a")),)
    own = {"role": "system", "content": "be slow"}
    assert read({"messages": [own, user("a")]}, system="be quick").questions == ((own, user("a")),)


def test_plain_prompts() -> None:
    assert read({"prompt": "a"}, chat=False) == Dialogue(3, text="a")
    assert read({"prompt": [5, 6]}) == read({"prompt": [5, 6]}, chat=False) == Dialogue(3, ids=(5, 6))


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (b"{not json", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"null", "not an object"),
        ([1], "not an object"),
        ({"text": "a"}, "not one of turns, messages and prompt"),
        ({"prompt": "a", "turns": ["a"]}, "not one of turns, messages and prompt"),
        ({"turns": []}, "empty conversation"),
        ({"messages": []}, "empty conversation"),
        ({"messages": [SYSTEM]}, "empty conversation"),
        ({"turns": ["a", " \n"]}, "empty message"),
        ({"prompt": ""}, "empty message"),
        ({"messages": [user("")]}, "empty message"),
        ({"prompt": []}, "empty prompt"),
        ({"prompt": [1, True]}, "not text"),
        ({"turns": "a"}, "not text"),
        ({"turns": ["a", 3]}, "not text"),
        ({"messages": [user([{"type": "image"}])]}, "not text"),
        (b'{"prompt": "\\ud800"}', "not text"),
        ({"messages": [{"role": "user"}]}, "not a message"),
        ({"messages": ["a"]}, "not a message"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "unknown role"),
        ({"messages": [assistant("hello"), user("a")]}, "an answer without a question"),
        ({"messages": [user("a"), assistant("x"), assistant("y")]}, "an answer without a question"),
        ({"messages": [user("a"), assistant("x", tool_calls=[{}]), user("b")]}, "tool calls"),
        ({"messages": [user("a"), {"role": "tool", "content": "4"}]}, "tool calls"),
    ],
)
def test_what_cannot_be_asked_has_a_reason(record: Any, reason: str) -> None:
    found = read(record)
    assert isinstance(found, Skipped)
    assert found.reason == reason


def test_chats_need_a_template_and_blank_lines_nothing() -> None:
    assert read({"turns": ["a"]}, chat=False).reason == "no chat template"
    assert read(b" \r\n") is None
    assert read_dialogue(0, b'\xef\xbb\xbf{"prompt": "a"}', chat=True) == Dialogue(0, questions=((user("a"),),))


def test_lines_of_a_file_by_number(tmp_path: Path) -> None:
    lines = ['{"prompt": "a\u2028b"}\n', "\n", '{"prompt": "c"}\r\n', '{"prompt": "d"}']
    path = tmp_path / "prompts.jsonl"
    path.write_bytes("".join(lines).encode())
    prompts = PromptFile(path)
    assert [prompts[i].decode() for i in range(len(prompts))] == lines == [line.decode() for line in prompts]
    data = path.read_bytes()
    assert prompts.digest() == hashlib.sha256(data).hexdigest()
    assert prompts.digest(7) == hashlib.sha256(data[:7]).hexdigest()


def test_a_file_that_is_not_there_or_empty(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.jsonl"):
        PromptFile(tmp_path / "nowhere.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DataError, match="empty"):
        PromptFile(tmp_path / "empty.jsonl")


# --- the template ----------------------------------------------------------------------------------------------------


def with_template(tokenizer: Any, template: str | None) -> Any:
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    return changed


def test_variables_reach_the_template_and_unknown_ones_are_refused(tiny_tokenizer: Any) -> None:
    thinking = with_template(tiny_tokenizer, tiny_tokenizer.chat_template + "{% if enable_thinking %}hm{% endif %}")
    on, off = (ChatFormat(thinking, {"enable_thinking": value}) for value in (True, False))
    assert tiny_tokenizer.decode(on.encode([user("a")])).endswith("assistant: hm")
    assert tiny_tokenizer.decode(off.encode([user("a")])).endswith("assistant: ")
    assert on.fingerprint == off.fingerprint != ChatFormat(tiny_tokenizer).fingerprint
    with pytest.raises(ConfigError, match="enable_thinking"):
        ChatFormat(tiny_tokenizer, {"enable_thinking": True})


def test_a_users_turn_that_a_token_closes(tiny_tokenizer: Any) -> None:
    turn = ChatFormat(tiny_tokenizer).user_turn()
    assert tiny_tokenizer.decode(turn.opening) == "<|start|>user: "
    assert turn.end_ids == (tiny_tokenizer.eos_token_id,)
    assert turn.end_text == ""
    assert turn.special_ids == {0, 1}
    with_system = ChatFormat(tiny_tokenizer).user_turn("be quick")
    assert tiny_tokenizer.decode(with_system.opening) == "<|start|>system: be quick<|end|><|start|>user: "


def test_a_users_turn_that_text_closes(tiny_tokenizer: Any) -> None:
    template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} [/{{ m['role'] }}]{% endfor %}"
    turn = ChatFormat(with_template(tiny_tokenizer, template)).user_turn()
    assert tiny_tokenizer.decode(turn.opening) == "[user] "
    assert (turn.end_ids, turn.end_text) == ((), "[/user]")


@pytest.mark.parametrize(
    "template",
    [
        None,
        "nothing of the user",
        "{{ messages[0]['content'] }}<|end|>",
        "user: {{ messages[0]['content'] }}",
        "user: {{ messages[0]['content'] }} {{ messages[0]['content'] }}<|end|>",
    ],
)
def test_a_template_that_hides_the_users_turn_is_refused(tiny_tokenizer: Any, template: str | None) -> None:
    with pytest.raises(ConfigError, match="chat template"):
        ChatFormat(with_template(tiny_tokenizer, template)).user_turn()
