"""``dspark calibrate`` on a tiny real target: collect, fit, write, use, and notice drift."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark.confidence.calibration import read_calibration
from dspark.evaluation.about import folder_digest
from dspark.evaluation.collect import Record
from dspark.evaluation.store import ResultStore, read_results
from tests.evaluation.synthetic import TEMPERATURES, by_prompt, rounds_of
from tests.evaluation.test_entries import settings

GOLDEN = Path(__file__).parents[1] / "golden"
TARGET = str(GOLDEN / "target_qwen3_tiny")
SAMPLED = ("--temperature", "1.0")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "deepspec_dspark_vanilla", tmp_path / "vanilla"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name in ("alpha", "beta"):
        lines = [json.dumps({"prompt": rng.integers(0, 97, size=4 + i).tolist()}) for i in range(3)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def calibrate(dspark: Callable[..., Any], checkpoint: Path, data: Path, tmp_path: Path) -> Callable[..., Any]:
    def run(*args: object, source: tuple[object, ...] = ("--data", data), tokens: int = 24) -> Any:
        common = ("--target", TARGET, "--drafter", checkpoint, "--output", tmp_path / "out", "--max-tokens", tokens)
        return dspark("calibrate", *common, *source, *args)

    return run


def test_temperatures_go_into_the_checkpoint_and_are_used(
    calibrate: Callable[..., Any], dspark: Callable[..., Any], checkpoint: Path, tmp_path: Path
) -> None:
    done = calibrate(*SAMPLED, "--rounds", 150)
    assert done.code == 0, done.err
    (entry,) = read_calibration(checkpoint / "calibration.json").entries
    assert (entry.mode, entry.verifier, entry.gamma) == ("rejection", "dspark/rejection", 4)
    assert (entry.low, entry.high) == (0.9, 1.1)
    assert "ECE before, %" in done.out
    assert "AUC after" in done.out
    assert "under 15000 sampling noise" in done.err
    page = (tmp_path / "out" / "calibration-rejection-1-gamma4.html").read_text()
    assert page.count("<svg") == 3
    rounds = read_results(tmp_path / "out" / "rounds-rejection-1-gamma4.jsonl")[1]
    assert sum(len(Record.from_dict(r).rounds.drafted()) for r in rounds.values()) == entry.fit["rounds"] >= 150
    assert any("#" in key for key in rounds), "sampled prompts are drawn again until there are enough rounds"
    prompt = ("generate", "--target", TARGET, "--drafter", checkpoint, "--cost", "none", "--max-tokens", 6)
    (tmp_path / "one.jsonl").write_text('{"prompt": [1, 2, 3]}\n')
    used = dspark(*prompt, "--file", tmp_path / "one.jsonl", "--temperature", 1.0)
    assert used.code == 0, used.err
    assert "raw" not in used.err
    shorter = dspark(*prompt, "--file", tmp_path / "one.jsonl", "--temperature", 1.0, "--gamma", 3)
    assert shorter.code == 0, shorter.err
    assert "raw" not in shorter.err, "a longer block's temperatures serve"
    raw = dspark(*prompt, "--file", tmp_path / "one.jsonl", "--temperature", 0.5)
    assert "gamma 4, temperature 0.5" in raw.err
    assert "these confidences are raw" in raw.err


def test_a_run_goes_on_where_it_stopped(calibrate: Callable[..., Any], checkpoint: Path, tmp_path: Path) -> None:
    """Greedy prompts give what they give: too few rounds are said, kept, and enough with more prompts or --rounds."""
    few = calibrate("--limit", 1, "--rounds", 50)
    assert few.code == 1
    assert "2 prompts are on file, and 50 were asked for" in few.err
    assert not (checkpoint / "calibration.json").exists()
    path = tmp_path / "out" / "rounds-greedy-0-gamma4.jsonl"
    kept = path.read_text()
    done = calibrate("--rounds", 60, "--json")
    assert done.code == 0, done.err
    assert path.read_text().startswith(kept), "what was finished was not decoded again"
    assert len(read_results(path)[1]) > 2
    assert done.json["settings"]["sampling"]["mode"] == "greedy"
    assert done.json["rounds"] >= 60
    assert len(done.json["after"]["ece"]) == 4
    assert calibrate("--rounds", 20, tokens=20).code == 1, "other settings"
    assert calibrate("--rounds", 20, "--restart", tokens=20).code == 0


def recorded(path: Path, checkpoint: Path, **rounds: Any) -> Path:
    """Synthetic rounds as if this checkpoint had made them."""
    made, _ = rounds_of(**rounds)
    own = settings()["drafter"] | {"content": folder_digest(checkpoint)}
    with ResultStore(path, settings(drafter=own)) as store:
        for i, part in enumerate(by_prompt(made)):
            store.add(f"a:{i}", Record("a", "d", part).as_dict())
    return path


def test_case_19_from_files(calibrate: Callable[..., Any], checkpoint: Path, tmp_path: Path) -> None:
    """Known temperatures are found in a file of rounds without loading a model; a shifted file raises the warning."""
    calm = recorded(tmp_path / "calm.jsonl", checkpoint, count=16_000)
    later = recorded(tmp_path / "later.jsonl", checkpoint, count=5000, seed=2)
    shifted = recorded(tmp_path / "shifted.jsonl", checkpoint, count=5000, seed=2, shift=0.8)
    done = calibrate("--json", source=("--recorded", calm))
    assert done.code == 0, done.err
    assert done.err == ""
    np.testing.assert_allclose(done.json["temperatures"][:3], TEMPERATURES[:3], rtol=0.2)
    assert done.json["after"]["mean_ece"] < 0.015 < done.json["before"]["mean_ece"]
    same = calibrate("--check", source=("--recorded", later))
    assert (same.code, same.err) == (0, "")
    moved = calibrate("--check", source=("--recorded", shifted))
    assert moved.code == 1
    assert moved.err.startswith("dspark: warning: drift: the confidences calibrated for mode 'rejection'")
    assert "ECE after, %" in moved.out
    before = (checkpoint / "calibration.json").read_text()
    assert calibrate("--check", "--json", source=("--recorded", shifted)).json["drift"]["positions"][0] == 1
    assert (checkpoint / "calibration.json").read_text() == before, "a check fits nothing"


def test_what_cannot_be_done_is_said_first(
    dspark: Callable[..., Any], calibrate: Callable[..., Any], data: Path, tmp_path: Path
) -> None:
    def refused(*args: object) -> str:
        done = dspark("calibrate", "--target", TARGET, *args)
        assert done.code in (1, 2)
        assert done.out == ""
        return str(done.err)

    assert "either --data or --recorded" in refused("-d", "x")
    assert "no local folder" in refused("-d", "owner/name", "--data", data)
    assert "no confidence head" in refused("-d", GOLDEN / "deepspec_dflash", "--data", data)
    assert "absent" in refused("-d", GOLDEN / "deepspec_dflash", "--data", tmp_path / "absent.jsonl")
    (tmp_path / "bad.jsonl").write_text('{"prompt": [1]}\n{"text": "x"}\n')
    assert "bad.jsonl line 2" in refused("-d", GOLDEN / "deepspec_dflash", "--data", tmp_path / "bad.jsonl")
    assert "absent.json" in calibrate("--check", "--calibration", tmp_path / "absent.json", *SAMPLED, "--rounds", 5).err
