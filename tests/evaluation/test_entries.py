"""From recorded rounds to a calibration file, and back."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from dspark.confidence.calibration import Calibration as File
from dspark.confidence.calibration import CalibrationEntry, read_calibration, write_calibration
from dspark.errors import ConfigError, DSparkWarning, EvaluationError
from dspark.evaluation.about import folder_digest
from dspark.evaluation.collect import Record
from dspark.evaluation.entries import Collected, Key, fit_entry, judge_entry, read_recorded
from dspark.evaluation.store import ResultStore
from tests.evaluation.synthetic import GAMMA, by_prompt, rounds_of


def settings(**changes: Any) -> dict[str, Any]:
    estimator = {"name": "dspark/linear", "settings": {}, "calibration": None, "calibrator": "dspark/identity"}
    values: dict[str, Any] = {
        "target": {"key": "0f", "name": "tiny", "dtype": "float32"},
        "drafter": {"name": "dspark/dspark", "content": "c", "estimator": estimator},
        "gamma": GAMMA,
        "verifier": "dspark/rejection",
        "sampling": {"mode": "rejection", "temperature": 0.7, "seed": 0},
    }
    return values | changes


def collected(count: int = 1200, *, seed: int = 0, shift: float = 0.0, **changes: Any) -> Collected:
    rounds, _ = rounds_of(count, seed=seed, shift=shift)
    records = {
        f"a:{i // 2}" + (f"#{i % 2}" if i % 2 else ""): Record("a", "d", r) for i, r in enumerate(by_prompt(rounds))
    }
    return Collected(settings(**changes), records, "rejection")


def fitted(path: Path, *arguments: Any, **more: Any) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fit_entry(collected(*arguments, **more), path, 1000, 0.1)


def test_an_entry_is_written_and_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    other = CalibrationEntry("1e", "dspark/greedy", "greedy", 2, 0.0, 0.0, (1.0, 1.0))
    write_calibration(path, File((other,)))
    result = fitted(path)
    kept, entry = read_calibration(path).entries
    assert kept == other
    assert entry.key == ("0f", "dspark/rejection", "rejection", GAMMA, 0.6, 0.8)
    assert list(entry.temperatures) == result["temperatures"]
    assert entry.name == "tiny"
    assert entry.fit["sampling"]["temperature"] == 0.7
    assert result["rounds"] == 1200
    assert result["prompts"] == 15, "two samples of a prompt are one prompt"
    again = fitted(path, seed=1)
    assert [e.temperatures for e in read_calibration(path).entries[1:]] == [tuple(again["temperatures"])]


def test_greedy_has_no_neighbourhood() -> None:
    drawn = {"mode": "greedy", "temperature": 0.9}
    assert Key.of(settings(sampling=drawn)).bucket(0.1) == (0.0, 0.0)
    assert Key.of(settings()).bucket(0.0) == (0.7, 0.7)
    assert Key.of(settings()).bucket(5.0) == (0.0, 5.7)


def test_too_few_rounds_write_nothing(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    with pytest.raises(
        EvaluationError, match=r"1200 rounds of 15 prompts are on file, and 2000 were asked for.*--rounds 1200"
    ):
        fit_entry(collected(), path, 2000, 0.1)
    assert not path.exists()
    with pytest.warns(DSparkWarning, match="under 15000 sampling noise"):
        fit_entry(collected(), path, 1200, 0.1)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="expected format"):
        fitted(path)
    assert path.read_text() == "{}", "what is none of ours is not overwritten"


def test_an_entry_is_judged_on_later_rounds(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    fitted(path, 4000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same = judge_entry(collected(4000, seed=9), path)
    assert same["drift"]["positions"] == []
    with pytest.warns(DSparkWarning, match="drift"):
        moved = judge_entry(collected(4000, seed=9, shift=1.0), path)
    assert moved["drift"]["positions"]
    assert moved["after"]["ece"][0] > same["after"]["ece"][0]
    assert moved["temperatures"] == list(read_calibration(path).entries[0].temperatures)
    with pytest.raises(EvaluationError, match=r"nothing fits target tiny.*temperature 0.9 \(fitted for tiny rejection"):
        judge_entry(collected(sampling={"mode": "rejection", "temperature": 0.9}), path)


def test_recorded_rounds_are_read_and_checked(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    own = settings()["drafter"] | {"content": folder_digest(checkpoint)}

    def write(name: str, **changes: Any) -> Path:
        path = tmp_path / f"rounds-{name}.jsonl"
        with ResultStore(path, settings(**{"drafter": own} | changes)) as store:
            for key, record in collected(200).records.items():
                store.add(key, record.as_dict())
        return path

    found = read_recorded(write("good"), checkpoint)
    assert found.name == "good"
    assert sum(len(r.rounds) for r in found.records.values()) == 200
    assert read_recorded(write("hub", drafter=settings()["drafter"]), tmp_path / "owner/name").records
    (checkpoint / "calibration.json").write_text("{}")
    assert read_recorded(tmp_path / "rounds-good.jsonl", checkpoint).records, (
        "a calibration does not change the drafter"
    )
    (checkpoint / "config.json").write_text('{"x": 1}')
    with pytest.raises(EvaluationError, match="another drafter"):
        read_recorded(tmp_path / "rounds-good.jsonl", checkpoint)
    calibrated = own | {"estimator": own["estimator"] | {"calibration": "5a"}}
    with pytest.raises(EvaluationError, match="calibrated already"):
        read_recorded(write("calibrated", drafter=calibrated), checkpoint)
    with pytest.raises(EvaluationError, match="no rounds of `dspark calibrate`"):
        read_recorded(write("other", drafter={}), checkpoint)
