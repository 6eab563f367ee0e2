"""``train_your_drafter`` from prompts to text, with settings for a tiny target."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

WORDS = ["quick", "brown", "fox", "lazy", "dog", "white", "house", "sea", "small", "runs"]


@pytest.mark.filterwarnings("ignore::dspark.errors.DSparkWarning")  # few rounds, an untrained target
def test_the_whole_way(
    example: Callable[[str], ModuleType], tiny_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    texts = [f"the {WORDS[n % 10]} {WORDS[n // 2]}" for n in range(20)]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
    work = tmp_path / "work"
    more = {"steps": 3, "gamma": 3, "rank": 8, "max_tokens": 24, "rounds": 30, "mask_token_id": 1}
    example("train_your_drafter").main(prompts, work, target=tiny_folder, **more)

    said = capsys.readouterr().out
    assert "16 answers" in said
    assert "mean ECE" in said
    assert [name for name in ("ngram", "drafter") if f"{name}: accepted length" in said] == ["ngram", "drafter"]
    assert "tokens were drafted and accepted" in said
    written = json.loads((work / "run" / "drafter" / "calibration.json").read_text())
    assert len(written["entries"][0]["temperatures"]) == 3
    held_out = {texts[i] for i in (0, 5, 10, 15)}
    assert not held_out & {json.loads(line)["prompt"] for line in (work / "train.jsonl").read_text().splitlines()}
