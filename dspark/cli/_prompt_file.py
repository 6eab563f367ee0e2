"""Files of prompts: one JSON object a line, and one answered object a line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from dspark.errors import DSparkError, RequestError

KEYS = ("turns", "messages", "prompt")


@dataclass(slots=True)
class Conversation:
    """One sample of one line on its way: what has been said, and what is still to be asked.

    Attributes:
        line: number in the file, from 1.
        choice: which of ``n`` samples.
        record: the line's object.
        messages: the chat so far; None for a text that continues.
        text: that text.
        ids: a prompt of token ids.
        todo: user messages still to come, the next one first.
        results: one ``Generation`` a turn.
        error: what ended it.
    """

    line: int
    choice: int
    record: dict[str, Any]
    messages: list[dict[str, Any]] | None = None
    text: str | None = None
    ids: list[int] | None = None
    todo: list[str] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    error: str = ""

    def next_prompt(self) -> Any:
        """The next prompt, as ``dspark.prompts.encode`` takes it."""
        if self.messages is None:
            return self.text if self.text is not None else self.ids
        if self.todo:
            self.messages.append({"role": "user", "content": self.todo.pop(0)})
        return self.messages

    def answer(self, result: Any) -> None:
        """Note the answer of a turn."""
        self.results.append(result)
        if self.messages is not None:
            self.messages.append({"role": "assistant", "content": result.text})

    def as_dict(self, *, stats: bool = False) -> dict[str, Any]:
        """The line's object with ``line``, ``answers`` (one a turn) and ``finish_reasons``, or ``error``."""
        done: dict[str, Any] = {**self.record, "line": self.line}
        if "n" in self.record or self.choice:
            done["choice"] = self.choice
        done["answers"] = [r.text for r in self.results]
        done["finish_reasons"] = [r.finish_reason for r in self.results]
        if any(r.logprobs for r in self.results):
            done["logprobs"] = [logprobs_as_json(r.logprobs) for r in self.results]
        if stats:
            done["stats"] = [r.stats.as_dict() for r in self.results]
        if self.error:
            done["error"] = self.error
        return done


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | RequestError]]:
    """(number, object) of every line that is not blank; a bad one comes as the error that it is.

    Raises:
        DSparkError: the file can't be read.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as err:
        raise DSparkError(f"file {str(path)!r} can't be read: {err}") from err
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines: JSON strings may hold U+2028
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as err:
            yield number, RequestError(f"not JSON: {err}")
            continue
        if not isinstance(record, dict):
            yield number, RequestError(f"expected an object with turns, messages or prompt, got {_brief(record)}")
            continue
        yield number, record


def conversation(line: int, choice: int, record: dict[str, Any], *, chat: bool, system: str | None) -> Conversation:
    """What a line asks.

    Args:
        chat: ``prompt`` is a user's message; else a text to continue.
        system: a system message for lines that have none.

    Raises:
        RequestError: saying what is wrong with the line.
    """
    if "response_ids" in record:
        raise RequestError(
            "a line of responses that `dspark data` wrote, not a prompt: give the file that it read, or "
            "NAME.prompts.jsonl of prompts that it wrote"
        )
    found = [key for key in KEYS if key in record]
    if len(found) != 1:
        what = f"both {found[0]!r} and {found[1]!r}" if found else f"keys {', '.join(map(repr, record)) or 'none'}"
        raise RequestError(f"expected one of 'turns', 'messages' and 'prompt', got {what}")
    made = Conversation(line, choice, record)
    value = record[found[0]]
    first = [{"role": "system", "content": system}] if system is not None else []
    if found[0] == "turns":
        made.todo, made.messages = _turns(value), first
    elif found[0] == "messages":
        messages = _messages(value)
        made.messages = messages if messages[0].get("role") == "system" else first + messages
    elif isinstance(value, str) and value:
        if chat:
            made.todo, made.messages = [value], first
        else:
            made.text = value
    elif isinstance(value, list) and value and all(type(i) is int for i in value):
        made.ids = value
    else:
        raise RequestError(f"'prompt': expected text or token ids, got {_brief(value)}")
    return made


def _turns(value: Any) -> list[str]:
    if not isinstance(value, list) or not value or not all(isinstance(t, str) and t for t in value):
        raise RequestError(f"'turns': expected a list of user messages, got {_brief(value)}")
    return list(value)


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise RequestError(f"'messages': expected a list of messages, got {_brief(value)}")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise RequestError(f"'messages': a message needs 'role' and 'content', got {_brief(message)}")
    return [dict(message) for message in value]


def _brief(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


class OrderedWriter:
    """Writes objects as lines in the order of their tickets, each as soon as those before it are out.

    Args:
        out: an open text file.
    """

    def __init__(self, out: IO[str]) -> None:
        self._out = out
        self._next = 0
        self._held: dict[int, dict[str, Any]] = {}

    def put(self, ticket: int, record: dict[str, Any]) -> None:
        """Write, or hold until its turn. Tickets count from 0."""
        self._held[ticket] = record
        while self._next in self._held:
            self._write(self._held.pop(self._next))
            self._next += 1
        self._out.flush()

    def close(self) -> None:
        """Write what is still held, if the run was interrupted."""
        for ticket in sorted(self._held):
            self._write(self._held.pop(ticket))
        self._out.flush()

    def _write(self, record: dict[str, Any]) -> None:
        self._out.write(to_json(record) + "\n")


def to_json(value: Any, **style: Any) -> str:
    """JSON without NaN and infinity, which it does not have: they become null."""
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False, **style)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def logprobs_as_json(entries: Sequence[Any]) -> list[dict[str, Any]]:
    """``TokenLogprobs`` as objects."""
    return [{"id": e.token_id, "logprob": e.logprob, "top": [list(pair) for pair in e.top]} for e in entries]
