"""The state of a run on disk: everything that the next step depends on, in safetensors and JSON."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dspark.checkpoints.files import new_folder, write_json, write_tensors
from dspark.errors import TrainingError

FORMAT, VERSION = "dspark-training-state", 1
_STEP = re.compile(r"^step-(\d+)$")


def checkpoints(output: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    found = [(int(m[1]), p) for p in output.glob("step-*") if (m := _STEP.match(p.name)) and p.is_dir()]
    return [path for _, path in sorted(found)]


def save_state(
    output: Path,
    step: int,
    state: Mapping[str, Any],
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    constants: Mapping[str, Tensor],
    keep: int,
) -> Path:
    """Write ``step-N`` under ``output`` and drop all but the last ``keep``.

    Args:
        state: plain values.
        parameters: what is trained, by name.
        optimizer: whose moments go with them.
        constants: further tensors (the vocabulary).
    """
    folder = output / f"step-{step:07d}"
    moments: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            moments[f"{key}.{name}"] = value if isinstance(value, Tensor) else torch.tensor(value)
    with new_folder(folder, overwrite=True) as new:
        write_tensors(new / "model.safetensors", {**parameters, **constants})
        write_tensors(new / "optimizer.safetensors", moments)
        write_json(new / "state.json", {"format": FORMAT, "version": VERSION, "step": step, **state})
    for old in checkpoints(output)[:-keep]:
        shutil.rmtree(old)
    return folder


def read_state(folder: Path) -> dict[str, Any]:
    """The plain values of a checkpoint.

    Raises:
        TrainingError: it is none.
    """
    try:
        value = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise TrainingError(f"{folder}: not a training checkpoint: {err}") from err
    if not isinstance(value, dict) or value.get("format") != FORMAT or value.get("version") != VERSION:
        raise TrainingError(f"{folder}: not a training checkpoint of format {FORMAT!r} version {VERSION}")
    return value


def read_tensors(folder: Path, name: str = "model") -> dict[str, Tensor]:
    """Tensors of a checkpoint's file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(folder / f"{name}.safetensors")
    except (OSError, SafetensorError) as err:
        raise TrainingError(f"{folder}: {err}") from err


def load_state(folder: Path, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Put a checkpoint's weights and moments back, bit for bit.

    Raises:
        TrainingError: naming what is missing or misshapen.
    """
    tensors, moments = read_tensors(folder), read_tensors(folder, "optimizer")
    faults = []
    for name, parameter in parameters.items():
        found = tensors.get(name)
        if found is None or found.shape != parameter.shape:
            got = "nothing" if found is None else list(found.shape)
            faults.append(f"{name}: expected {list(parameter.shape)}, got {got}")
    strange = [key for key in moments if key.partition(".")[2] not in parameters]
    faults += [f"a state of {key}, which is not trained now" for key in strange]
    if faults:
        raise TrainingError(f"{folder} is of another drafter: " + "; ".join(faults))
    for name, parameter in parameters.items():
        with torch.no_grad():
            parameter.copy_(tensors[name])
    for key, value in moments.items():
        kind, _, name = key.partition(".")
        parameter = parameters[name]
        # Fused and capturable optimizers keep the step beside the parameter, others on the CPU.
        optimizer.state[parameter][kind] = value.to(parameter.device)


def changes(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Settings that differ between two nested mappings, as ``section.field: old -> new``."""
    out = []
    for key in {**old, **new}:
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            out += changes(a, b, f"{prefix}{key}.")
        elif a != b:
            out.append(f"{prefix}{key}: {a!r} -> {b!r}")
    return out
