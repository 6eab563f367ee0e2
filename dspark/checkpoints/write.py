"""Writing a drafter in DeepSpec's or in speculators' format, from the same description that every format is read into.

Nothing is written that would read back as another drafter: what a format has no word for is refused with the reason.
Fitted temperatures travel in ``calibration.json``, and how chats were written in ``chat.json``, beside the tensors;
other readers ignore them.
"""

from __future__ import annotations

import copy
import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.checkpoints.borrow import TargetParts
from dspark.checkpoints.chat import FILE_NAME as CHAT_FILE
from dspark.checkpoints.configs import (
    deepspec_keys,
    differences,
    plain_json,
    speculators_keys,
    speculators_verifier,
)
from dspark.checkpoints.files import dtype_name, new_folder, write_json, write_tensors
from dspark.checkpoints.formats import BORROWED_HEAD, read_config
from dspark.checkpoints.load import Checkpoint
from dspark.checkpoints.schema import DrafterConfig
from dspark.checkpoints.tensors import check_tensors, token_map
from dspark.errors import CheckpointError

CALIBRATION_FILE = "calibration.json"
_CALIBRATION_FORMAT = "dspark-sts"
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
_SPECULATORS_VERSION = "0.9.0"
"""The speculators release whose layout is written."""


def write_deepspec(
    folder: str | Path,
    checkpoint: Checkpoint,
    *,
    target: TargetParts | None = None,
    calibration: Mapping[str, Any] | None = None,
    num_anchors: int = 512,
    overwrite: bool = False,
) -> tuple[str, ...]:
    """Write DeepSpec's format: config.json with all keys at its root, embedding and head stored.

    The mask-only layout is written as ``sample_from_anchor: false``, a key that vLLM and dspark read.

    Args:
        folder: where to; it appears complete or not at all.
        checkpoint: what to write.
        target: gives embedding, head and layer count where the checkpoint has none.
        calibration: content of ``calibration.json``; None for the one beside the checkpoint, if there is one.
        num_anchors: training setting that DeepSpec's config carries, where the checkpoint was not DeepSpec's.
        overwrite: replace a folder that exists.

    Returns:
        What other readers of this format would do differently, in words; empty if nothing is known.

    Raises:
        CheckpointError: what the format can't say, or what is missing for it; the folder exists.
    """
    c, where = checkpoint.config, f"{checkpoint.source or 'checkpoint'} as DeepSpec"
    _refuse_eagle(c, where)
    if checkpoint.token_map is not None or c.draft_vocab_size != c.vocab_size:
        raise CheckpointError(
            f"{where}: its vocabulary is pruned ({c.draft_vocab_size} of {c.vocab_size} ids), and DeepSpec has no "
            "vocabulary map (d2t); write speculators' format"
        )
    if c.family == "llama":
        raise CheckpointError(f"{where}: DeepSpec has Qwen3 and Gemma 4 drafters, no Llama-style ones")
    _refuse_layers(c, "query", where)
    _refuse_scaled_embedding(c, target, where)
    if c.num_target_layers is None:
        if target is None or target.layers is None:
            raise CheckpointError(f"{where}: the number of the target's layers is not known; name the target")
        c = dataclasses.replace(c, num_target_layers=target.layers)
    raw = _kept(checkpoint, "deepspec") or deepspec_keys(c, target=target, num_anchors=num_anchors)
    if not c.sample_from_anchor:
        raw["sample_from_anchor"] = False  # absent, it is true
    name = c.target_name or (target.name if target is not None else "")
    if name:
        raw["target_model_name_or_path"] = name
    tensors = dict(checkpoint.tensors)
    for key, part in ((_EMBEDDING, "embedding"), (_HEAD, "head")):
        if key not in tensors:
            tensors[key] = _borrowed(target, part, where)
    _write(
        folder, raw, tensors, c, where, _calibration(checkpoint, calibration), _beside(checkpoint, CHAT_FILE), overwrite
    )
    return tuple(_deepspec_notes(c))


def write_speculators(
    folder: str | Path,
    checkpoint: Checkpoint,
    *,
    target: TargetParts | None = None,
    calibration: Mapping[str, Any] | None = None,
    keep_embeddings: bool = False,
    borrow_head: bool = False,
    overwrite: bool = False,
) -> tuple[str, ...]:
    """Write speculators' format, as its release 0.9 does: tap ids one higher, vocabulary maps as offsets.

    That release stores no embedding, and a head only for a pruned vocabulary: the target's are used. Those of the
    checkpoint are compared with ``target``'s before they are left out.

    Args:
        folder: where to; it appears complete or not at all.
        checkpoint: what to write.
        target: named as the verifier, which speculators loads beside the drafter.
        calibration: content of ``calibration.json``; None for the one beside the checkpoint, if there is one.
        keep_embeddings: store embedding and head as the checkpoint has them, as releases before 0.9 did.
        borrow_head: leave out the head of a pruned vocabulary too. Only dspark reads such a file, which is smaller by
            it; writing it again without this, with the target named, gives the head back.
        overwrite: replace a folder that exists.

    Returns:
        What other readers of this format would do differently, in words; empty if nothing is known.

    Raises:
        CheckpointError: what the format can't say, or what is missing for it; the folder exists.
    """
    c, where = checkpoint.config, f"{checkpoint.source or 'checkpoint'} as speculators"
    _refuse_eagle(c, where)
    if c.family == "gemma4":
        raise CheckpointError(f"{where}: its draft layers are Qwen3's, this drafter has Gemma 4's")
    if c.target_hidden_size != c.hidden_size:
        raise CheckpointError(
            f"{where}: its drafters are as wide as their taps, this one is {c.hidden_size} wide and its taps "
            f"{c.target_hidden_size}"
        )
    ids = checkpoint.token_map
    if ids is not None and not bool((ids.diff() > 0).all()):
        raise CheckpointError(f"{where}: its draft ids rise with the target's, and this vocabulary map does not")
    _refuse_layers(c, "anchor", where)
    _refuse_scaled_embedding(c, target, where)
    name = c.target_name or (target.name if target is not None else "")
    if not name:
        raise CheckpointError(f"{where}: the format names the drafter's target, and this one names none; name it")
    raw = _kept(checkpoint, "speculators") or speculators_keys(c)
    raw.pop("auto_map", None)  # names Python code to run
    raw["aux_hidden_state_layer_ids"] = [k + 1 for k in c.target_layer_ids]
    raw["sample_from_anchor"] = c.sample_from_anchor
    raw["speculators_version"] = _SPECULATORS_VERSION
    architectures = target.architectures if target is not None else _architectures(raw)
    raw["speculators_config"] = speculators_verifier(c, raw["speculators_model_type"], name, architectures)
    tensors = dict(checkpoint.tensors)
    pruned = c.draft_vocab_size != c.vocab_size
    raw.pop(BORROWED_HEAD, None)
    if pruned and borrow_head:
        raw[BORROWED_HEAD] = True
        _drop(tensors, _HEAD, None if target is None else _pruned(target.head, ids), where)
    elif pruned and _HEAD not in tensors:
        dtype = next(iter(tensors.values())).dtype
        tensors[_HEAD] = _pruned(_borrowed(target, "head", where), ids).to(dtype)
    if not keep_embeddings:
        for key, part in ((_EMBEDDING, "embedding"), *(() if pruned else ((_HEAD, "head"),))):
            _drop(tensors, key, None if target is None else getattr(target, part), where)
    if ids is not None:
        tensors |= vocabulary_maps(ids, c.vocab_size)
    _write(
        folder, raw, tensors, c, where, _calibration(checkpoint, calibration), _beside(checkpoint, CHAT_FILE), overwrite
    )
    return tuple(_speculators_notes(c))


def _pruned(head: Tensor | None, ids: Tensor | None) -> Any:
    """Rows of a target's head that a draft vocabulary has."""
    return head if head is None or ids is None else head[ids.to(head.device)].contiguous()


def vocabulary_maps(token_map: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """``d2t`` int64 [Vd], offsets, and ``t2d`` bool [V] of a map draft id -> target id [Vd]."""
    ids = token_map.cpu().long()
    kept = torch.zeros(vocab_size, dtype=torch.bool)
    kept[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": kept}


def _kept(checkpoint: Checkpoint, source_format: str) -> dict[str, Any] | None:
    """The checkpoint's own config.json where it is of this format and still says what the checkpoint is."""
    c = checkpoint.config
    if checkpoint.raw is None or c.source_format != source_format:
        return None
    try:
        said = read_config(checkpoint.raw, target_layers=c.num_target_layers)
    except CheckpointError:
        return None
    return None if differences(said, c) else copy.deepcopy(dict(checkpoint.raw))


def _write(
    folder: str | Path,
    raw: dict[str, Any],
    tensors: Mapping[str, Tensor],
    wanted: DrafterConfig,
    where: str,
    calibration: Mapping[str, Any] | Path | None,
    chat: Path | None,
    overwrite: bool,
) -> None:
    """Check what would be read back, then write."""
    raw = plain_json(raw | {"dtype": dtype_name(tensors)})
    said = read_config(raw, where, target_layers=wanted.num_target_layers)
    different = differences(wanted, said)
    if different:
        raise CheckpointError(
            f"{where}: this format can't say all of it (field: here, as it would read back: {'; '.join(different)})"
        )
    check_tensors(said, tensors, where)
    token_map(said, tensors, where)
    with new_folder(folder, overwrite=overwrite) as new:
        write_json(new / "config.json", raw)
        write_tensors(new / "model.safetensors", tensors)
        if isinstance(calibration, Path):
            shutil.copyfile(calibration, new / CALIBRATION_FILE)
        elif calibration is not None:
            write_json(new / CALIBRATION_FILE, calibration)
        if chat is not None:
            shutil.copyfile(chat, new / CHAT_FILE)


def _calibration(checkpoint: Checkpoint, given: Mapping[str, Any] | None) -> Mapping[str, Any] | Path | None:
    if given is not None:
        if given.get("format") != _CALIBRATION_FORMAT:
            raise CheckpointError(f"calibration: expected format {_CALIBRATION_FORMAT!r}, got {given.get('format')!r}")
        return given
    return _beside(checkpoint, CALIBRATION_FILE)


def _beside(checkpoint: Checkpoint, name: str) -> Path | None:
    path = None if checkpoint.path is None else checkpoint.path / name
    return path if path is not None and path.is_file() else None


def _refuse_eagle(c: DrafterConfig, where: str) -> None:
    if c.eagle is not None:
        raise CheckpointError(f"{where}: EAGLE-3 drafters are read and run, not written")


def _refuse_layers(c: DrafterConfig, window_from: str, where: str) -> None:
    """Attention that a format has no word for."""
    found = []
    for i, layer in enumerate(c.layers):
        if layer.window is None and layer.causal:
            found.append(f"layer {i} is causal in the block, and full layers are bidirectional in this format")
        if layer.window is not None and layer.window_from != window_from:
            found.append(
                f"layer {i} measures its window from the {layer.window_from}, and this format from the {window_from}"
            )
    if found:
        raise CheckpointError(f"{where}: " + "; ".join(found))


def _refuse_scaled_embedding(c: DrafterConfig, target: TargetParts | None, where: str) -> None:
    if c.embed_scale is None and target is not None and target.model_type.startswith("gemma"):
        raise CheckpointError(
            f"{where}: {target.name} scales its embeddings in its own embedding module, which a drafter of another "
            "family can't do in this format"
        )


def _borrowed(target: TargetParts | None, part: str, where: str) -> Tensor:
    tensor = None if target is None else getattr(target, part)
    if tensor is None:
        raise CheckpointError(f"{where}: the format stores the target's {part}, which is not here; name the target")
    return tensor  # type: ignore[no-any-return]


def _drop(tensors: dict[str, Tensor], name: str, same: Tensor | None, where: str) -> None:
    """Leave out a tensor that readers take from the target, once it is known to be the target's."""
    own = tensors.get(name)
    if own is None:
        return
    hint = "or keep the embeddings (keep_embeddings, --keep-embeddings)"
    if same is None:
        raise CheckpointError(f"{where}: {name} is left out by this format: name the target to compare it with, {hint}")
    if own.shape != same.shape or not torch.equal(own, same.to(device=own.device, dtype=own.dtype)):
        raise CheckpointError(
            f"{where}: {name} is not the target's, which readers would use; name the right one {hint}"
        )
    del tensors[name]


def _architectures(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """The verifier's architectures as a speculators config states them."""
    verifier = (raw.get("speculators_config") or {}).get("verifier") or {}
    return tuple(str(a) for a in verifier.get("architectures") or ())


def _head_notes(c: DrafterConfig) -> list[str]:
    if c.plugin_head:
        return [f"the sequential head is the plugin's {c.head} {c.head_version}: other readers can't run it"]
    if c.head in ("gated", "rnn"):
        return [f"vLLM (0.32) runs the Markov head alone, this drafter has the head {c.head}"]
    return []


def _deepspec_notes(c: DrafterConfig) -> list[str]:
    notes = _head_notes(c)
    if not c.sample_from_anchor:
        notes.append("the layout is mask-only: DeepSpec's own code does not read sample_from_anchor")
    if any(layer.window is not None for layer in c.layers):
        notes.append("some layers slide: DeepSpec's own code attends to the whole context")
    return notes


def _speculators_notes(c: DrafterConfig) -> list[str]:
    notes, sliding = _head_notes(c), [layer for layer in c.layers if layer.window is not None]
    if c.family == "llama":
        notes.append("the layers are Llama's, without norms on queries and keys: speculators and vLLM build Qwen3's")
    dspark = c.head != "none" or c.confidence
    if dspark and any(not layer.causal for layer in sliding):
        notes.append("sliding layers are bidirectional in the block: vLLM (0.32) runs them causally")
    if not dspark and any(layer.causal for layer in sliding) and len(sliding) < len(c.layers):
        notes.append("some layers slide: vLLM (0.32) runs the full ones causally too")
    return notes
