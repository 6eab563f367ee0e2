"""``offline_batch``: every line is answered once, whatever interrupts it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dspark import SpeculativeDecoder

pytestmark = pytest.mark.usefixtures("small")
PROMPTS: list[Any] = [
    {"prompt": "the quick brown fox"},
    {"messages": [{"role": "user", "content": "tell me about the sea"}]},
    {"prompt": "a small white house by the sea"},
    {"text": "no prompt here"},
    {"prompt": "the " * 2000},
    {"prompt": "runs away from"},
    {"prompt": "the lazy dog"},
]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]


def answers(path: Path) -> dict[int, Any]:
    said = lines(path)
    assert len({line["key"] for line in said}) == len(said)
    return {line["line"]: line.get("text", line.get("error")) for line in said}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(p) + "\n" for p in PROMPTS) + "{half a line\n", encoding="utf-8")
    return path


def test_an_interrupted_run_goes_on(
    example: Callable[[str], ModuleType],
    prompts: Path,
    tiny_folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = example("offline_batch")
    settings = {"target": tiny_folder, "drafter": "ngram", "max_slots": 2, "max_tokens": 12, "temperature": 1.0}
    whole = tmp_path / "whole.jsonl"
    module.main(prompts, whole, **settings)
    expected = answers(whole)
    assert sorted(expected) == list(range(1, 9))
    assert {line["line"] for line in lines(whole) if "error" in line} == {4, 5, 8}

    parts = tmp_path / "parts.jsonl"
    keep = module.Batch.keep

    def interrupted(self: Any, number: int, key: str, result: Any) -> None:
        if sum("text" in line for line in lines(parts)) == 2:
            raise KeyboardInterrupt
        keep(self, number, key, result)

    monkeypatch.setattr(module.Batch, "keep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        module.main(prompts, parts, **settings)
    assert 2 <= len(lines(parts)) < 8
    with parts.open("a", encoding="utf-8") as file:
        file.write('{"line": 7, "key": "7-')  # a kill in the middle of a write

    decoded: list[int] = []

    def counted(self: Any, number: int, key: str, result: Any) -> None:
        decoded.append(number)
        keep(self, number, key, result)

    monkeypatch.setattr(module.Batch, "keep", counted)
    module.main(prompts, parts, **settings)
    assert answers(parts) == expected  # seeded by line: whatever ran beside it
    assert len(decoded) == 3
    module.main(prompts, parts, **settings)
    assert len(decoded) == 3


def test_greedy_answers_are_plain_decoding(
    example: Callable[[str], ModuleType], prompts: Path, tiny_folder: str, tmp_path: Path
) -> None:
    out = tmp_path / "answers.jsonl"
    example("offline_batch").main(prompts, out, target=tiny_folder, drafter="ngram", max_tokens=12)
    with SpeculativeDecoder.from_pretrained(tiny_folder, "none") as plain:
        assert answers(out)[1] == plain.generate(PROMPTS[0]["prompt"], max_tokens=12)[0].text
        assert answers(out)[2] == plain.generate([PROMPTS[1]["messages"]], max_tokens=12)[0].text
