"""Prompts of a data run: JSON lines with ``turns``, ``messages`` or ``prompt``."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.errors import DataError

KEYS = ("turns", "messages", "prompt")
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Skipped:
    """A line, or a conversation on its way, that gets no (further) response.

    Attributes:
        reason: short, for counting.
        detail: what exactly.
    """

    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Dialogue:
    """What one line asks.

    Attributes:
        index: the line's number, from 0.
        source: where it is from, if it says so.
        questions: one entry an answer: the messages between the answer before it and this one. Empty for plain text.
        text: a text to continue.
        ids: a prompt of token ids.
    """

    index: int
    source: str | None = None
    questions: tuple[tuple[dict[str, Any], ...], ...] = ()
    text: str | None = None
    ids: tuple[int, ...] | None = None

    @property
    def turns(self) -> int:
        """Answers wanted."""
        return len(self.questions) or 1


class PromptFile:
    """Lines of a file by their number, read when they are wanted. The file must not change meanwhile.

    Raises:
        DataError: it can't be read, or holds no line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._starts = array("Q")
        self.size = 0
        try:
            for line in self:
                self._starts.append(self.size)
                self.size += len(line)
        except OSError as err:
            raise DataError(f"prompts {str(path)!r} can't be read: {err.strerror or err}") from err
        if not self._starts:
            raise DataError(f"prompts {str(path)!r}: the file is empty")

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            yield from file

    def __getitem__(self, index: int) -> bytes:
        with self.path.open("rb") as file:
            file.seek(self._starts[index])
            return file.readline()

    def digest(self, size: int | None = None) -> str:
        """SHA-256 of the first ``size`` bytes, or of all."""
        left = self.size if size is None else size
        found = hashlib.sha256()
        with self.path.open("rb") as file:
            while left > 0 and (block := file.read(min(left, _BLOCK))):
                found.update(block)
                left -= len(block)
        return found.hexdigest()


def read_dialogue(index: int, line: bytes, *, chat: bool, system: str | None = None) -> Dialogue | Skipped | None:
    """What a line asks, why it can't be asked, or None for a blank line.

    Args:
        chat: ``prompt`` is a user's message; else a text to continue. Without, there are no ``turns`` and ``messages``.
        system: a system message for chats that have none.
    """
    try:
        text = line.decode("utf-8-sig" if index == 0 else "utf-8")
        if not text.strip():
            return None
        record = json.loads(text)
    except (ValueError, RecursionError) as err:
        return Skipped("not JSON", str(err))
    if not isinstance(record, dict):
        return Skipped("not an object", _brief(record))
    found = [key for key in KEYS if key in record]
    if len(found) != 1:
        return Skipped("not one of turns, messages and prompt", f"has {', '.join(map(repr, record)) or 'nothing'}")
    asked = _asked(found[0], record[found[0]], chat, system)
    if isinstance(asked, Skipped):
        return asked
    source = record.get("source")
    return Dialogue(index, None if source is None else str(source), **asked)


def _asked(key: str, value: Any, chat: bool, system: str | None) -> dict[str, Any] | Skipped:
    """The fields of ``Dialogue`` that say what is asked."""
    if key == "prompt" and not (chat and isinstance(value, str)):
        return _plain(value)
    if not chat:
        return Skipped("no chat template", f"{key!r} needs one")
    messages = _messages(key, value)
    questions = messages if isinstance(messages, Skipped) else _questions(messages, system)
    return questions if isinstance(questions, Skipped) else {"questions": questions}


def _plain(value: Any) -> dict[str, Any] | Skipped:
    """A text to continue, or token ids."""
    if isinstance(value, str):
        return _fault(value) or {"text": value}
    if isinstance(value, list) and all(type(i) is int for i in value):
        return {"ids": tuple(value)} if value else Skipped("empty prompt")
    return Skipped("not text", f"'prompt' is {_brief(value)}")


def _messages(key: str, value: Any) -> list[dict[str, Any]] | Skipped:
    """The messages of a line, of which those of the assistant are to be written anew."""
    value = [value] if key == "prompt" else value
    if not isinstance(value, list):
        return Skipped("not text", f"{key!r} is {_brief(value)}")
    if not value:
        return Skipped("empty conversation", f"{key!r} is []")
    if key == "messages":
        wrong = [message for message in value if not isinstance(message, dict) or "content" not in message]
        return Skipped("not a message", _brief(wrong[0])) if wrong else value
    answer = {"role": "assistant", "content": None}
    return [message for turn in value for message in ({"role": "user", "content": turn}, answer)]


def _questions(messages: list[dict[str, Any]], system: str | None) -> tuple[tuple[dict[str, Any], ...], ...] | Skipped:
    """Messages, cut where the assistant speaks; what it said is dropped."""
    has_system = system is None or messages[0].get("role") == "system"
    asked = [] if has_system else [{"role": "system", "content": system}]
    questions = []
    for number, message in enumerate(messages, 1):
        role = message.get("role")
        if role in ("tool", "function", "ipython") or message.get("tool_calls"):
            return Skipped("tool calls", f"message {number}: what the target would call is not known")
        if role == "assistant":
            if not _has_user(asked):
                return Skipped("an answer without a question", f"message {number}")
            questions.append(tuple(asked))
            asked = []
        elif role in ("user", "system", "developer"):
            fault = _fault(message["content"])
            if fault is not None:
                return fault
            asked.append(message)
        else:
            return Skipped("unknown role", _brief(role))
    if _has_user(asked):
        questions.append(tuple(asked))
    return tuple(questions) if questions else Skipped("empty conversation", "no message of a user")


def _has_user(messages: list[dict[str, Any]]) -> bool:
    return any(message["role"] == "user" for message in messages)


def _fault(content: Any) -> Skipped | None:
    """What is wrong with the text of a message."""
    if not isinstance(content, str):
        return Skipped("not text", _brief(content))
    if not content.strip():
        return Skipped("empty message")
    try:
        content.encode()
    except UnicodeEncodeError as err:  # JSON can spell half of a surrogate pair
        return Skipped("not text", str(err))
    return None


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
