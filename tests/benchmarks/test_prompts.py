"""Prompts of the benchmarks: the spread over files, and chats of an exact length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks._common import write_section
from benchmarks.prompts import OWN, chats_of_length, encode_chats, load_prompts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, count in (("a", 2), ("b", 10), ("c", 6)):
        lines = [json.dumps({"turns": [f"{name}{i}", "second turn"]}) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return tmp_path


def test_prompts_are_spread_over_files_and_within_them(folder: Path) -> None:
    texts = [p.text for p in load_prompts(6, folder)]
    assert texts == ["a0", "b0", "c0", "a1", "b5", "c3"]
    assert [p.source for p in load_prompts(2, folder)] == ["a.jsonl:1", "b.jsonl:1"]


def test_small_files_give_what_they_have(folder: Path) -> None:
    texts = [p.text for p in load_prompts(18, folder)]
    assert len(set(texts)) == 18
    with pytest.raises(ValueError, match="has 18 prompts, 19 are asked"):
        load_prompts(19, folder)


def test_environment_names_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_PROMPTS", str(folder))
    assert load_prompts(1)[0].text == "a0"
    monkeypatch.delenv("DSPARK_PROMPTS")
    assert load_prompts(1)[0] == load_prompts(1, OWN)[0]


def test_chats_have_the_length_asked_and_the_template_whole(tiny_tokenizer: Any) -> None:
    chats = chats_of_length(60, 20, tiny_tokenizer)
    assert {len(chat) for chat in chats} == {60}
    assert len({tuple(chat) for chat in chats}) == 20
    assert all(tiny_tokenizer.decode(chat).endswith("<|end|><|start|>assistant: ") for chat in chats)
    whole = encode_chats(load_prompts(1, OWN), tiny_tokenizer)[0]
    assert tiny_tokenizer.decode(whole).startswith("<|start|>user: ")
    with pytest.raises(ValueError, match="are too few"):
        chats_of_length(3, 1, tiny_tokenizer)


def test_section_replaces_what_stands_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("top\n<!-- x:begin -->\nold\n<!-- x:end -->\nbottom\n", encoding="utf-8")
    write_section("x", "new\n\n", page)
    assert page.read_text(encoding="utf-8") == "top\n<!-- x:begin -->\nnew\n<!-- x:end -->\nbottom\n"
    with pytest.raises(ValueError, match="no section"):
        write_section("y", "new", page)
