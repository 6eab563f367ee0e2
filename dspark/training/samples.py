"""Conversations as a drafter trains on them: token ids, and which of them are the assistant's words."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dspark.errors import DataError
from dspark.types import BoolArray, IntArray


@dataclass(frozen=True, slots=True)
class Sample:
    """One conversation.

    Attributes:
        ids: token ids, [S].
        loss_mask: True at tokens that the assistant said, [S].
        index: number of its prompt; samples of one prompt share it.
        line: where it stood in its file, from 0.
    """

    ids: IntArray
    loss_mask: BoolArray
    index: int = 0
    line: int = 0

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(slots=True)
class Skipped:
    """Conversations that were left out, by reason, and the lines where that happened first."""

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, int] = field(default_factory=dict)

    def add(self, reason: str, line: int) -> None:
        """Count one."""
        self.counts[reason] += 1
        self.first.setdefault(reason, line)

    def __str__(self) -> str:
        if not self.counts:
            return "none"
        return "; ".join(f"{n} x {why} (first: line {self.first[why] + 1})" for why, n in self.counts.most_common())


def fault(loss_mask: BoolArray, gamma: int) -> str | None:
    """Why nothing can be learnt from a conversation; None where something can.

    An anchor and the token after it both have to be the assistant's, so a turn of one token has none.
    """
    if not loss_mask.any():
        return "no token of the assistant (loss mask all zero)"
    if not (loss_mask[:-1] & loss_mask[1:]).any():
        return "assistant turns of one token"
    if len(loss_mask) <= gamma:
        return f"shorter than an anchor and a block of {gamma} drafts"
    return None


class SampleReader:
    """Reads samples from JSON lines, as ``dspark data`` writes them or as messages.

    A line has ``prompt_ids`` and ``response_ids``; or ``messages`` (a chat: every assistant turn is learnt from); or
    ``turns`` (what the user said) with ``response`` or ``responses`` (the answers, as many as there are turns).

    Args:
        max_length: longer conversations are cut.
        tokenizer: for chats; None where lines hold ids.
        chat_args: variables of the chat template.
    """

    def __init__(self, max_length: int, tokenizer: Any = None, chat_args: Mapping[str, Any] | None = None) -> None:
        self.max_length, self.tokenizer, self.chat_args = max_length, tokenizer, dict(chat_args or {})

    def read(self, path: Path, skipped: Skipped, start: int = 0) -> Iterator[tuple[Sample | None, int]]:
        """Samples of a file from byte ``start`` on, each with the byte behind its line; None for those left out.

        Raises:
            DataError: an unreadable file or line.
        """
        for line, end, record in read_lines(path, start):
            where = f"{path}, line {line + 1}"
            found = self.ids(record, where)
            if isinstance(found, str):
                skipped.add(found, line)
                yield None, end
                continue
            ids, mask = found
            index = record.get("index")
            sample = Sample(
                ids[: self.max_length], mask[: self.max_length], index if type(index) is int else line, line
            )
            why = fault(sample.loss_mask, 1)
            if why is not None:
                skipped.add(why, line)
            yield (sample if why is None else None), end

    def ids(self, record: Mapping[str, Any], where: str) -> tuple[IntArray, BoolArray] | str:
        """Token ids and loss mask of a line, or why it is left out.

        Raises:
            DataError: none of the forms above, or a malformed one.
        """
        if "prompt_ids" in record or "response_ids" in record:
            prompt, response = (_token_ids(record, name, where) for name in ("prompt_ids", "response_ids"))
            ids = np.array([*prompt, *response], dtype=np.int64)
            return ids, np.arange(len(ids)) >= len(prompt)
        return self._chat(_messages(record, where), where)

    def _chat(self, messages: Sequence[Mapping[str, Any]], where: str) -> tuple[IntArray, BoolArray] | str:
        if not getattr(self.tokenizer, "chat_template", None):
            raise DataError(f"{where}: a chat, and the target has no tokenizer with a chat template; give token ids")
        whole = self._render(messages, False)
        ids: list[int] = []
        said: list[bool] = []
        done = 0
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, after = self._render(messages[:i], True), self._render(messages[: i + 1], False)
            if not (whole.startswith(after) and after.startswith(before)):
                return "the chat template rewrites earlier turns"
            # In pieces, as it happens when the target answers: a token never spans prompt and answer.
            self._append(whole[done : len(before)], False, ids, said)
            self._append(whole[len(before) : len(after)], True, ids, said)
            done = len(after)
        self._append(whole[done:], False, ids, said)
        return np.array(ids, dtype=np.int64), np.array(said, dtype=bool)

    def _append(self, text: str, by_assistant: bool, ids: list[int], said: list[bool]) -> None:
        tokens = [int(i) for i in self.tokenizer(text, add_special_tokens=False)["input_ids"]] if text else []
        ends = {int(i) for i in self.tokenizer.all_special_ids}
        # What follows the token that ends a turn is the template's, not the target's.
        length = next((n + 1 for n, token in enumerate(tokens) if token in ends), len(tokens)) if by_assistant else 0
        ids += tokens
        said += [n < length for n in range(len(tokens))]

    def _render(self, messages: Sequence[Mapping[str, Any]], open_turn: bool) -> str:
        text: str = self.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=open_turn, tokenize=False, **self.chat_args
        )
        return text


def _token_ids(record: Mapping[str, Any], name: str, where: str) -> list[int]:
    value = record.get(name)
    if not isinstance(value, list) or not all(type(i) is int and i >= 0 for i in value):
        raise DataError(f"{where}: {name}: expected a list of token ids, got {value!r:.60}")
    return value


def _messages(record: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    if "messages" in record:
        found = record["messages"]
        if isinstance(found, list) and found and all(_is_message(m) for m in found):
            return found
        raise DataError(f"{where}: messages: expected a list of role and content, got {found!r:.60}")
    turns = record.get("turns")
    answers = record.get("responses", [record["response"]] if "response" in record else None)
    if not _texts(turns) or not _texts(answers):
        raise DataError(
            f"{where}: expected prompt_ids and response_ids, messages, or turns and response, got {', '.join(record)}"
        )
    if len(turns) != len(answers):  # type: ignore[arg-type]
        raise DataError(f"{where}: {len(turns)} turns and {len(answers)} responses")  # type: ignore[arg-type]
    pairs = zip(turns, answers, strict=True)  # type: ignore[arg-type]
    return [{"role": r, "content": c} for pair in pairs for r, c in zip(("user", "assistant"), pair, strict=True)]


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, str) for v in value)


def read_lines(path: Path, start: int = 0) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """(line number from 0, byte offset behind it, object) of complete JSON lines from byte ``start`` on.

    A last line without its newline is still being written, and is left for the next reading.

    Raises:
        DataError: unreadable, or a line that is no JSON object.
    """
    try:
        with path.open("rb") as file:
            if path.stat().st_size < start:
                raise DataError(
                    f"{path} has become shorter since its first {start:,} bytes were read: begin a new cache"
                )
            number, offset = file.read(start).count(b"\n"), start
            for raw in file:
                if not raw.endswith(b"\n"):
                    return
                offset += len(raw)
                if raw.strip():
                    yield number, offset, _object(raw, f"{path}, line {number + 1}")
                number += 1
    except OSError as err:
        raise DataError(f"{path}: {err.strerror or err}") from err


def _object(raw: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except ValueError as err:
        raise DataError(f"{where}: not JSON: {err}") from err
    if not isinstance(value, dict):
        raise DataError(f"{where}: expected an object, got {type(value).__name__}")
    return value
