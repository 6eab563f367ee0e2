"""From collected rounds to an entry of ``calibration.json``, and an entry against rounds that came later."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark import __version__
from dspark.confidence.calibration import Calibration, read_calibration, write_calibration
from dspark.errors import DSparkWarning, EvaluationError
from dspark.evaluation import calibration as fitting
from dspark.evaluation.about import folder_digest
from dspark.evaluation.collect import Record
from dspark.evaluation.rounds import Rounds
from dspark.evaluation.store import read_results


@dataclass(frozen=True, slots=True)
class Collected:
    """Raw rounds, and what they are of.

    Attributes:
        settings: target, verifier, gamma and sampling, see ``dspark.evaluation.compare.run_settings``.
        records: by key.
        name: of the files that are written.
    """

    settings: Mapping[str, Any]
    records: Mapping[str, Record]
    name: str


def read_recorded(path: Path, checkpoint: Path) -> Collected:
    """Rounds of an earlier run.

    Args:
        path: of the rounds.
        checkpoint: the drafter's folder; where it is one, the rounds have to be its own.

    Raises:
        EvaluationError: they can't be read, are of another drafter, or hold scores that were calibrated already.
    """
    settings, records = read_results(path)
    try:
        estimator = settings["drafter"]["estimator"]
        if estimator["calibration"] is not None or estimator["calibrator"] != "dspark/identity":
            raise EvaluationError(
                f"{path}: its confidences are calibrated already; temperatures are fitted to raw ones"
            )
        if checkpoint.is_dir() and settings["drafter"]["content"] != folder_digest(checkpoint):
            raise EvaluationError(f"{path}: its rounds are of another drafter than {checkpoint}")
        Key.of(settings)
    except (KeyError, TypeError) as err:
        raise EvaluationError(f"{path}: no rounds of `dspark calibrate`: {type(err).__name__}: {err}") from err
    return Collected(settings, {k: Record.from_dict(r) for k, r in records.items()}, path.stem.removeprefix("rounds-"))


@dataclass(frozen=True, slots=True)
class Key:
    """What temperatures are kept by."""

    target: str
    name: str
    verifier: str
    mode: str
    gamma: int
    temperature: float

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Key:
        """From the settings of a run."""
        target, drawn = settings["target"], settings["sampling"]
        temperature = 0.0 if drawn["mode"] == "greedy" else float(drawn["temperature"])
        key, name = str(target["key"]), str(target["name"])
        return cls(key, name, str(settings["verifier"]), str(drawn["mode"]), int(settings["gamma"]), temperature)

    def bucket(self, width: float) -> tuple[float, float]:
        """Sampling temperatures that the fit holds for; 0 to 0 for greedy."""
        if self.mode == "greedy":
            return 0.0, 0.0
        return round(max(0.0, self.temperature - width), 6), round(self.temperature + width, 6)


def fit_entry(found: Collected, path: Path, rounds: int, bucket: float) -> dict[str, Any]:
    """Fit, and write the entry.

    Raises:
        EvaluationError: too few rounds.
    """
    key = Key.of(found.settings)
    by_prompt: dict[str, list[Rounds]] = {}
    for name, record in found.records.items():
        by_prompt.setdefault(name.partition("#")[0], []).append(record.rounds.drafted())
    parts = [Rounds.concat(some, key.gamma) for some in by_prompt.values()]
    count = sum(len(part) for part in parts)
    if count < rounds:
        raise EvaluationError(
            f"{count} rounds of {len(parts)} prompts are on file, and {rounds} were asked for: give more prompts or "
            f"--max-tokens and run again, or take what there is with --rounds {count}"
        )
    if count < fitting.ENOUGH_ROUNDS:
        warnings.warn(
            f"{count} rounds: under {fitting.ENOUGH_ROUNDS} sampling noise alone shows more than about 1 % ECE",
            DSparkWarning,
            stacklevel=2,
        )
    fit = fitting.fit(parts)
    if len(fit.at_the_end):
        warnings.warn(
            f"the temperatures of positions {', '.join(map(str, fit.at_the_end))} are the first or last of the grid: "
            "there are too few rounds that get there, or scores of another kind",
            DSparkWarning,
            stacklevel=2,
        )
    about = {"sampling": found.settings["sampling"], "dspark": __version__}
    entry = fit.entry(
        target=key.target, name=key.name, verifier=key.verifier, mode=key.mode, bucket=key.bucket(bucket), about=about
    )
    before = read_calibration(path) if path.is_file() else Calibration()
    write_calibration(path, before.with_entry(entry))
    return {
        "format": "dspark-calibrate", "version": 1, "settings": dict(found.settings), "calibration": str(path),
        "bucket": list(key.bucket(bucket)), **fit.as_dict(),
    }  # fmt: skip


def judge_entry(found: Collected, path: Path) -> dict[str, Any]:
    """Judge the entry that fits these rounds; warns where they drifted.

    Raises:
        EvaluationError: there is none.
    """
    key = Key.of(found.settings)
    fitted = read_calibration(path)
    entry = fitted.find(key.target, key.verifier, key.mode, key.gamma, key.temperature)
    if entry is None:
        raise EvaluationError(
            f"{path}: nothing fits target {key.name}, verifier {key.verifier}, mode {key.mode}, gamma {key.gamma}, "
            f"temperature {key.temperature:g} (fitted for {fitted.describe()})"
        )
    rounds = Rounds.concat([r.rounds for r in found.records.values()], key.gamma)
    return {
        "format": "dspark-calibrate", "version": 1, "settings": dict(found.settings), "calibration": str(path),
        "bucket": [entry.low, entry.high], "temperatures": list(entry.temperatures),
        "rounds": len(rounds.drafted()), "prompts": len({name.partition("#")[0] for name in found.records}),
        **fitting.check(rounds, entry).as_dict(),
    }  # fmt: skip
