"""What a written checkpoint takes from its target: a name, a shape, and the embedding and head that some formats store.

A few tensors are read from the target's safetensors; the model is not built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from dspark.checkpoints.load import read_json, resolve_source
from dspark.errors import CheckpointError

_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class TargetParts:
    """A target, as far as a writer needs it.

    Attributes:
        name: hub id or folder.
        architectures: of its config.json.
        model_type: of its config.json.
        layers: decoder layers.
        embedding, head: [V, d], in the stored dtype; None where they were not asked for.
    """

    name: str
    architectures: tuple[str, ...] = ()
    model_type: str = ""
    layers: int | None = None
    embedding: Tensor | None = None
    head: Tensor | None = None


def read_target(source: str | Path, revision: str | None = None) -> TargetParts:
    """Read a target's folder or Hub id.

    Raises:
        CheckpointError: no such target, or its embedding or head can't be told among its tensors.
    """
    folder = resolve_source(source, revision)
    raw = read_json(folder / "config.json")
    text = raw.get("text_config")
    values: Mapping[str, Any] = text if isinstance(text, Mapping) else raw
    places = _places(folder)
    embedding = _read(folder, places, _EMBEDDING)
    tied = bool(raw.get("tie_word_embeddings", values.get("tie_word_embeddings", False)))
    stored = any(name.endswith(_HEAD) for name in places)
    layers = values.get("num_hidden_layers")
    return TargetParts(
        name=str(source),
        architectures=tuple(str(a) for a in raw.get("architectures") or ()),
        model_type=str(raw.get("model_type", "")),
        layers=layers if isinstance(layers, int) else None,
        embedding=embedding,
        head=embedding if tied and not stored else _read(folder, places, _HEAD),
    )


def parts_of(target: Any) -> TargetParts:
    """The same of a loaded target (see ``dspark.protocols.Target``) whose modules can be seen."""
    config = getattr(getattr(target, "model", None), "config", None)

    def weight(name: str) -> Tensor | None:
        value = getattr(getattr(target, name, None), "weight", None)
        return value.detach().cpu() if isinstance(value, Tensor) else None

    return TargetParts(
        name=str(getattr(target, "name", "")),
        architectures=tuple(getattr(config, "architectures", None) or ()),
        model_type=str(getattr(config, "model_type", "")),
        layers=getattr(target, "num_layers", None),
        embedding=weight("input_embeddings"),
        head=weight("lm_head"),
    )


def _places(folder: Path) -> dict[str, Path]:
    """Tensor name -> file."""
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return {str(name): folder / str(file) for name, file in read_json(index).get("weight_map", {}).items()}
    places: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                places |= dict.fromkeys(opened.keys(), file)
        except (OSError, SafetensorError) as err:
            raise CheckpointError(f"{file}: {err}") from err
    if not places:
        raise CheckpointError(f"{folder}: no safetensors file to take the target's embedding from")
    return places


def _read(folder: Path, places: Mapping[str, Path], ending: str) -> Tensor:
    from safetensors import SafetensorError, safe_open

    names = [n for n in places if n == ending or n.endswith("." + ending)]
    names = [n for n in names if not any(part in n for part in ("vision", "visual", "audio"))]
    if len(names) != 1:
        found = f"{len(names)} ({', '.join(sorted(names))})" if names else "none"
        raise CheckpointError(f"{folder}: expected one tensor {ending} of the target, found {found}")
    try:
        with safe_open(places[names[0]], framework="pt") as opened:
            tensor: Tensor = opened.get_tensor(names[0])
    except (OSError, SafetensorError) as err:
        raise CheckpointError(f"{places[names[0]]}: {err}") from err
    return tensor
