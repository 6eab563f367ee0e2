"""``dspark eval`` on a tiny real target: figures of several drafters, resumed after an interruption."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark.cli import eval as command
from dspark.cli._evaluation import file_name, read_data
from dspark.errors import EvaluationError

GOLDEN = Path(__file__).parents[1] / "golden"
TARGET = str(GOLDEN / "target_qwen3_tiny")
DSPARK, DFLASH = (str(GOLDEN / f"deepspec_{name}") for name in ("dspark_vanilla", "dflash"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name in ("alpha", "beta"):
        lines = [json.dumps({"prompt": rng.integers(0, 97, size=4 + i).tolist()}) for i in range(4)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def evaluate(dspark: Callable[..., Any], data: Path, tmp_path: Path) -> Callable[..., Any]:
    def run(*args: object, tokens: int = 24) -> Any:
        common = ("--target", TARGET, "--data", data, "--output", tmp_path / "out", "--max-tokens", tokens)
        return dspark("eval", *common, "--replicates", 100, *args)

    return run


def test_drafters_side_by_side(evaluate: Callable[..., Any], tmp_path: Path) -> None:
    done = evaluate("-d", f"ours={DSPARK}", "-d", DFLASH, "-d", "ngram", "--temperature", "1.0")
    assert done.code == 0, done.err
    for word in ("ours", "deepspec_dflash", "ngram", "macro gain", "conditional acceptance", "1 - TV, teacher-forced"):
        assert word in done.out
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert [d["label"] for d in result["drafters"]] == ["ours", "deepspec_dflash", "ngram"]
    assert result["settings"]["prompts"] == {"alpha": 4, "beta": 4}
    assert result["settings"]["verifier"] == "dspark/rejection"
    assert result["drafters"][1]["gain"]["macro"][0] < 0, "the golden DFlash drafter accepts less"
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert page.count("<svg") == 10
    names = sorted(p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*.*"))
    assert names == [
        "forced/deepspec_dflash.jsonl", "forced/ours.jsonl", "prefixes.jsonl", "report.html", "result.json",
        "rounds/deepspec_dflash.jsonl", "rounds/ngram.jsonl", "rounds/ours.jsonl",
    ]  # fmt: skip


def test_block_lengths_and_json(evaluate: Callable[..., Any], tmp_path: Path) -> None:
    done = evaluate("-d", DSPARK, "--gamma", 1, "--gamma", 3, "--json", "--limit", 2, "--anchors", 0, "--coupled",
                    "--temperature", "1.0")  # fmt: skip
    assert done.code == 0, done.err
    assert [(d["label"], d["gamma"]) for d in done.json["drafters"]] == [
        ("deepspec_dspark_vanilla @1", 1), ("deepspec_dspark_vanilla @3", 3),
    ]  # fmt: skip
    assert done.json["settings"]["sampling"]["mode"] == "coupled"
    assert done.json["drafters"][0]["teacher_forced"] is None
    lines = [(tmp_path / "out" / "rounds" / f"deepspec_dspark_vanilla_@{g}.jsonl").read_text() for g in (1, 3)]
    one, three = ([json.loads(line) for line in text.splitlines()[1:]] for text in lines)
    answers = [{r["key"]: r["samples"] for r in records} for records in (one, three)]
    assert answers[0] == answers[1], "coupled: the same tokens whatever drafts"
    assert "Block length" in (tmp_path / "out" / "report.html").read_text()


def without_scores(result: Any) -> Any:
    """Without confidences, whose last bits depend on the shape of the batch, and what is computed from them."""
    names = ("calibration", "thresholds")
    drafters = [{k: v for k, v in d.items() if k not in names} for d in result["drafters"]]
    return {**result, "drafters": drafters}


def test_an_interruption_keeps_what_is_finished(
    evaluate: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C after three prompts; the same command goes on, and gives what an undisturbed run gives."""
    from dspark.evaluation.store import ResultStore

    whole = evaluate("-d", DSPARK, "--max-slots", 2, "--json", "--output", tmp_path / "whole")
    add = ResultStore.add
    count = 0

    def add_three(self: Any, key: str, record: Any) -> None:
        nonlocal count
        count += 1
        if count > 3:
            raise KeyboardInterrupt
        add(self, key, record)

    monkeypatch.setattr(ResultStore, "add", add_three)
    stopped = evaluate("-d", DSPARK, "--max-slots", 2)
    assert stopped.code == 130
    assert stopped.out == ""
    assert f"is kept in {tmp_path / 'out'}, and the same command goes on" in stopped.err
    monkeypatch.undo()
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
    done = evaluate("-d", DSPARK, "--max-slots", 2, "--json")
    assert done.code == 0
    assert "8 prompts, 3 of them from an earlier run" in done.err
    assert without_scores(done.json) == without_scores(whole.json)
    again = evaluate("-d", DSPARK, "--json")
    assert again.json == done.json
    assert "8 prompts, 8 of them from an earlier run" in again.err
    other = evaluate("-d", DSPARK, tokens=20)
    assert other.code == 1
    assert "other settings" in other.err
    assert evaluate("-d", DSPARK, "--restart", tokens=20).code == 0


def test_prefixes_are_fixed(evaluate: Callable[..., Any], tmp_path: Path) -> None:
    """A second drafter, later, stands on the same responses; other ones can be named."""
    first = evaluate("-d", DSPARK, "--json")
    kept = (tmp_path / "out" / "prefixes.jsonl").read_text()
    both = evaluate("-d", DFLASH, "-d", DSPARK, "--json")
    assert (tmp_path / "out" / "prefixes.jsonl").read_text() == kept
    assert both.json["drafters"][1]["teacher_forced"] == first.json["drafters"][0]["teacher_forced"]
    assert both.json["settings"]["teacher_forced"] == {"responses": 8, "anchors": 16, "span": 16}
    named = tmp_path / "named.jsonl"
    ids = np.random.default_rng(1).integers(0, 97, size=(2, 40)).tolist()
    rows = [{"index": i, "source": "x", "prompt_ids": row[:5], "response_ids": row[5:]} for i, row in enumerate(ids)]
    named.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = evaluate("-d", DSPARK, "--json", "--prefixes", named, "--output", tmp_path / "other")
    assert done.json["drafters"][0]["teacher_forced"]["responses"] == 2
    assert done.json["drafters"][0]["teacher_forced"]["anchors"] == 32


def test_what_cannot_be_done_is_said(evaluate: Callable[..., Any], dspark: Callable[..., Any], tmp_path: Path) -> None:
    for args, code, words in (
        (("-d", DSPARK, "-d", DSPARK), 2, "two drafters are called 'deepspec_dspark_vanilla'"),
        (("-d", "ngarm"), 2, "ngram"),
        (("-d", DSPARK, "--gamma", 9), 2, "gamma 9 is beyond"),
        (("-d", DSPARK, "--set", "scheduler=off"), 1, "full length"),
        (("-d", DSPARK, "--prefixes", tmp_path / "absent"), 1, "absent"),
        (("-d", DSPARK, "--top-p", 0), 2, "top_p"),
    ):
        done = evaluate(*args)
        assert (done.code, done.out) == (code, "")
        assert words in done.err
    assert dspark("eval", "--data", tmp_path).code == 1
    assert dspark("eval").code == 2


def test_data_sets_take_turns(tmp_path: Path) -> None:
    """Any beginning of the prompts has some of each data set, so that a run that stops early has no favourites."""
    for name, count in (("a", 3), ("b", 2)):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"turns": ["{name}{i}"]}}\n\n' for i in range(count)))
    lines = read_data([tmp_path])
    assert [(line.dataset, line.number) for line in lines] == [("a", 1), ("b", 1), ("a", 3), ("b", 3), ("a", 5)]
    assert [line.dataset for line in read_data([tmp_path], 1)] == ["a", "b"]
    assert lines[0].digest != lines[2].digest
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "a.jsonl").write_text('{"turns": ["x"]}\n')
    with pytest.raises(EvaluationError, match="both called 'a'"):
        read_data([tmp_path, tmp_path / "c" / "a.jsonl"])
    (tmp_path / "c" / "a.jsonl").write_text("\n")
    with pytest.raises(EvaluationError, match="no prompts"):
        read_data([tmp_path / "c"])
    (tmp_path / "d").mkdir()
    with pytest.raises(EvaluationError, match=r"no .jsonl files"):
        read_data([tmp_path / "d"])


def test_names_of_drafters() -> None:
    variants = command.variants_of(["x=owner/name", "some/folder", "a/b=c", "ngram"], [None])
    assert [(v.label, v.drafter) for v in variants] == [
        ("x", "owner/name"), ("folder", "some/folder"), ("b=c", "a/b=c"), ("ngram", "ngram"),
    ]  # fmt: skip
    assert [v.label for v in command.variants_of(["ngram"], [2, 4])] == ["ngram @2", "ngram @4"]
    assert file_name("a/b c@2") == "a_b_c@2"
