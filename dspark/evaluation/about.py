"""What results depend on: target, drafter and settings, in a form that two runs can compare."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from dspark.confidence.calibration import FILE_NAME, target_key
from dspark.engine.engine import Engine
from dspark.errors import EvaluationError


def folder_digest(folder: Path) -> str:
    """Hash of a checkpoint's config files and tensors, by content; its calibration is not part of it.

    Raises:
        EvaluationError: a file that can't be read.
    """
    total = hashlib.sha256()
    for path in sorted((*folder.glob("*.json"), *folder.glob("*.safetensors"))):
        if path.name == FILE_NAME:
            continue
        try:
            with path.open("rb") as file:
                total.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
        except OSError as err:
            raise EvaluationError(f"{path}: {err}") from err
    return total.hexdigest()[:16]


def target_of(engine: Engine) -> dict[str, Any]:
    """The target of an engine."""
    target = engine.parts.target
    dtype = str(target.dtype).removeprefix("torch.")
    return {"key": target_key(target), "name": target.name, "dtype": dtype}


def checkpoint_folder(engine: Engine) -> Path | None:
    """Where the drafter's checkpoint was read from; None for a drafter without one."""
    path = getattr(getattr(engine.parts.drafter, "checkpoint", None), "path", None)
    return None if path is None else Path(path)


def drafter_of(engine: Engine) -> dict[str, Any]:
    """The drafter of an engine: its name, settings, shape and content."""
    checkpoint = getattr(engine.parts.drafter, "checkpoint", None)
    settings = {k: v for k, v in engine.config.drafter_config.items() if k != "checkpoint"}
    found: dict[str, Any] = {"name": engine.parts.name("drafter"), "settings": _plain(settings)}
    folder = checkpoint_folder(engine)
    if folder is not None:
        found["content"] = folder_digest(folder)
    elif checkpoint is not None:
        found["source"] = checkpoint.source
    config = getattr(checkpoint, "config", None)
    if config is not None:
        found["layers"] = len(config.layers)
        found["head"] = getattr(config, "head", "none")
        found["block_size"] = config.block_size
    return found


def estimator_of(engine: Engine) -> dict[str, Any]:
    """Estimator and calibrator of an engine, with the temperatures that the former has."""
    config = engine.config
    calibration = getattr(engine.parts.estimator, "calibration", None)
    fitted = None if calibration is None else json.dumps(calibration.to_json(), sort_keys=True)
    return {
        "name": engine.parts.name("estimator"),
        "settings": _plain({k: v for k, v in config.estimator_config.items() if k != "calibration"}),
        "calibration": None if fitted is None else hashlib.sha256(fitted.encode()).hexdigest()[:16],
        "calibrator": engine.parts.name("calibrator"),
        "calibrator_settings": _plain(dict(config.calibrator_config)),
    }


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str, sort_keys=True))
