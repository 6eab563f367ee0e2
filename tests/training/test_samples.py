"""Conversations from JSON lines: every form, what is left out and counted, and files that still grow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark.errors import DataError
from dspark.prompts import encode_chat
from dspark.training.samples import Sample, SampleReader, Skipped, fault
from tests.training.tiny import write_lines


def read(path: Path, tokenizer: Any = None, max_length: int = 100) -> tuple[list[Sample], Skipped]:
    skipped = Skipped()
    found = SampleReader(max_length, tokenizer).read(path, skipped)
    return [s for s, _ in found if s is not None], skipped


def test_ids(tmp_path: Path) -> None:
    lines = [
        {"index": 7, "prompt_ids": [1, 2, 3], "response_ids": [4, 5, 6], "temperature": 0.0},
        {"prompt_ids": [1] * 6, "response_ids": [4] * 9},
    ]
    (first, second), skipped = read(write_lines(tmp_path / "a.jsonl", lines), max_length=8)
    assert first.ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert first.loss_mask.tolist() == [False] * 3 + [True] * 3
    assert (first.index, first.line, second.index, second.line) == (7, 0, 1, 1)
    assert len(second) == 8
    assert second.loss_mask.sum() == 2
    assert str(skipped) == "none"


def test_chats(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """Of every assistant turn, what the target would say: its words and the token that ends it."""
    messages = [
        {"role": "user", "content": "the quick"},
        {"role": "assistant", "content": "brown fox"},
        {"role": "user", "content": "jumps"},
        {"role": "assistant", "content": "over the lazy dog"},
    ]
    lines = [
        {"messages": messages},
        {"turns": ["the quick", "jumps"], "responses": ["brown fox", "over the lazy dog"]},
        {"turns": ["the quick"], "response": "brown fox"},
    ]
    (chat, turns, one), _ = read(write_lines(tmp_path / "a.jsonl", lines), tiny_tokenizer)
    assert chat.ids.tolist() == turns.ids.tolist()
    assert (chat.loss_mask == turns.loss_mask).all()
    assert tiny_tokenizer.decode(chat.ids[chat.loss_mask]) == "brown fox<|end|>over the lazy dog<|end|>"
    assert tiny_tokenizer.decode(one.ids[one.loss_mask]) == "brown fox<|end|>"
    prompt = encode_chat(messages[:1], tiny_tokenizer)
    assert one.ids[: len(prompt)].tolist() == prompt
    assert not one.loss_mask[: len(prompt)].any()


def test_a_template_that_rewrites_earlier_turns(tmp_path: Path, tiny_tokenizer: Any) -> None:
    """A turn that reads otherwise later on is not what the target said: the line is left out and counted."""
    import copy

    forgetful = copy.deepcopy(tiny_tokenizer)
    forgetful.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] if loop.last else '..' }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    path = write_lines(tmp_path / "a.jsonl", [{"turns": ["a", "b"], "responses": ["the fox", "the dog"]}])
    found, skipped = read(path, forgetful)
    assert not found
    assert dict(skipped.counts) == {"the chat template rewrites earlier turns": 1}


def test_nothing_to_learn_is_skipped_counted_and_reported(tmp_path: Path) -> None:
    good = {"prompt_ids": [1, 2], "response_ids": [3, 4, 5]}
    lines = [good, {"prompt_ids": [1] * 9, "response_ids": []}, {"prompt_ids": [1] * 9, "response_ids": [2]}, good]
    lines += [{"prompt_ids": [1] * 200, "response_ids": [2] * 9}]
    found, skipped = read(write_lines(tmp_path / "a.jsonl", lines))
    assert [s.line for s in found] == [0, 3]
    assert str(skipped) == (
        "2 x no token of the assistant (loss mask all zero) (first: line 2); "
        "1 x assistant turns of one token (first: line 3)"
    )


@pytest.mark.parametrize(
    ("mask", "why"),
    [
        ([0] * 20, "loss mask all zero"),
        ([0] * 10 + [1] + [0] * 5 + [1], "one token"),
        ([1, 1, 1, 1], "shorter than"),
        ([0, 1, 1, 1, 1], None),
    ],
)
def test_faults(mask: list[int], why: str | None) -> None:
    found = fault(np.array(mask, dtype=bool), 4)
    assert (found is None) if why is None else (found is not None and why in found)


def test_a_growing_file(tmp_path: Path) -> None:
    """Half a line is left for later; reading goes on behind the last whole one, with its line number."""
    path, reader = tmp_path / "a.jsonl", SampleReader(100)
    whole = [json.dumps({"prompt_ids": [i], "response_ids": [5, 6]}) + "\n" for i in range(3)]
    path.write_text(whole[0] + whole[1] + whole[2][:20])
    found = list(reader.read(path, Skipped()))
    assert [s.line for s, _ in found if s] == [0, 1]
    end = found[-1][1]
    assert end == len(whole[0]) + len(whole[1])
    path.write_text("".join(whole))
    found = list(reader.read(path, Skipped(), end))
    assert [(s.line, int(s.ids[0])) for s, _ in found if s] == [(2, 2)]


def test_a_file_that_shrinks(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match="has become shorter since its first 10 bytes were read"):
        list(SampleReader(100).read(tmp_path / "a.jsonl", Skipped(), 10))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt_ids": [1], "response_ids": "abc"}', "line 1: response_ids: expected a list of token ids"),
        ('{"prompt_ids": [1], "response_ids": [-2]}', "response_ids"),
        ('{"text": "abc"}', "expected prompt_ids and response_ids, messages, or turns and response, got text"),
        ('{"messages": [{"role": "user"}]}', "messages: expected a list of role and content"),
        ('{"turns": ["a", "b"], "response": "c"}', "2 turns and 1 responses"),
        ("[1, 2]", "expected an object, got list"),
        ("{", "not JSON"),
        ('{"turns": ["a"], "response": "c"}', "no tokenizer with a chat template"),
    ],
)
def test_malformed_lines_are_errors(line: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(line + "\n")
    with pytest.raises(DataError, match=message):
        read(tmp_path / "a.jsonl")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl: No such file"):
        read(tmp_path / "none.jsonl")
