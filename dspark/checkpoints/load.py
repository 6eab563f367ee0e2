"""Finding and reading a drafter checkpoint: a local folder, or a Hub id with a revision. safetensors, no pickle."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from dspark.checkpoints.formats import read_config
from dspark.checkpoints.schema import DrafterConfig
from dspark.checkpoints.tensors import canonical_names, check_tensors, token_map
from dspark.errors import CheckpointError

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A drafter as it was read, checked against its own config.

    Attributes:
        config: what it is.
        tensors: by canonical name (DeepSpec's), in the stored dtype, on the CPU; without the vocabulary maps.
        token_map: draft id -> target id, [Vd] int64, or None where they are the same.
        path: the folder that it was read from.
        source: what the caller named.
        raw: its config.json.
    """

    config: DrafterConfig
    tensors: Mapping[str, Tensor]
    token_map: Tensor | None = None
    path: Path | None = None
    source: str = ""
    raw: Mapping[str, Any] | None = None


def resolve_source(source: str | Path, revision: str | None = None, *, weights: bool = True) -> Path:
    """The local folder of a checkpoint; a Hub id is fetched into the Hub's cache.

    Args:
        source: a folder, or ``owner/name``.
        revision: branch, tag or commit of a Hub id.
        weights: fetch the tensors too, not config files alone.

    Raises:
        CheckpointError: no such folder, no such repository or revision, or no way to reach it.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        if revision is not None:
            raise CheckpointError(f"{source} is a local folder; revision {revision!r} applies to Hub ids")
        if not (path / "config.json").is_file():
            inside = sorted(p.parent.name for p in path.glob("*/config.json"))
            hint = f"; did you mean one of its folders: {', '.join(inside)}?" if inside else ""
            raise CheckpointError(f"{path}: no config.json{hint}")
        return path
    if path.exists() or not _HUB_ID.match(str(source)):
        raise CheckpointError(f"{source}: neither a folder nor a Hub id (owner/name)")
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors"] if weights else ["*.json"]
    try:
        return Path(snapshot_download(str(source), revision=revision, allow_patterns=patterns))
    except Exception as err:
        at = f" at revision {revision!r}" if revision else ""
        raise CheckpointError(f"{source}{at}: not a folder here, and not to be had from the Hub: {err}") from err


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        CheckpointError: unreadable, not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise CheckpointError(f"{path}: {err}") from err
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of ``model.safetensors``, or of the shards that its index names.

    Raises:
        CheckpointError: no safetensors file, a missing shard, or a damaged one.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = [folder / name for name in sorted(set(read_json(index).get("weight_map", {}).values()))]
    else:
        files = [folder / "model.safetensors"]
        if not files[0].is_file():
            files = sorted(folder.glob("*.safetensors"))
    pickles = [p.name for pattern in _PICKLES for p in folder.glob(pattern) if not p.name.startswith("training_state")]
    if not files:
        hint = f"; {pickles[0]} is a pickle, which is never loaded: convert it" if pickles else ""
        raise CheckpointError(f"{folder}: no safetensors file{hint}")
    if "mask_embedding.pt" in pickles:
        raise CheckpointError(f"{folder}: its mask embedding is a pickle (mask_embedding.pt), which is never loaded")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors.update(load_file(file))
        except (OSError, SafetensorError) as err:
            raise CheckpointError(f"{file}: {err}") from err
    return canonical_names(tensors)


def load_checkpoint(source: str | Path, *, revision: str | None = None, target_layers: int | None = None) -> Checkpoint:
    """Read a DeepSpec, speculators, SpecForge or z-lab checkpoint, strictly.

    Args:
        source: a folder, or a Hub id.
        revision: branch, tag or commit of a Hub id.
        target_layers: decoder layers of the target, for formats whose default tap layers depend on it.

    Raises:
        CheckpointError: unknown or unsupported format; missing or malformed keys; missing, unexpected or misshapen
            tensors, all of them in one error with the nearest names.
    """
    folder = resolve_source(source, revision)
    raw = read_json(folder / "config.json")
    config = read_config(raw, str(folder / "config.json"), target_layers=target_layers)
    return make_checkpoint(config, read_tensors(folder), path=folder, source=str(source), raw=raw)


def make_checkpoint(
    config: DrafterConfig,
    tensors: Mapping[str, Tensor],
    *,
    path: Path | None = None,
    source: str = "",
    raw: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """A checkpoint from tensors in memory, under the same checks as one from a file."""
    where = str(path or source or "checkpoint")
    check_tensors(config, tensors, where)
    ids = token_map(config, tensors, where)
    kept = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    return Checkpoint(config, kept, ids, path, source or where, raw)
