"""What a checkpoint is, what it needs, and whether it fits a target, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dspark.checkpoints.load import Checkpoint
from dspark.checkpoints.schema import DrafterConfig

FLOAT16_MAX = 65504.0


@dataclass(frozen=True, slots=True)
class TargetShape:
    """What of a target decides whether a drafter fits; None where it is not known.

    Attributes:
        layers: decoder layers.
        hidden_size: width of its hidden states.
        vocab_size: width of its logits.
        name: for messages.
    """

    layers: int | None = None
    hidden_size: int | None = None
    vocab_size: int | None = None
    name: str = "the target"


def shape_of_config(raw: Mapping[str, Any], name: str = "the target") -> TargetShape:
    """The shape that a target's config.json states, its text model's where it has several."""
    text = raw.get("text_config")
    values = text if isinstance(text, Mapping) else raw

    def whole(key: str) -> int | None:
        value = values.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    return TargetShape(whole("num_hidden_layers"), whole("hidden_size"), whole("vocab_size"), name)


def fit_problems(config: DrafterConfig, target: TargetShape) -> list[str]:
    """Why a drafter can't draft for a target of this shape, in words; what is not known is not checked."""
    found = []
    layers, width, vocab = target.layers, target.hidden_size, target.vocab_size
    top = max(config.target_layer_ids)
    if layers is not None and top >= layers:
        found.append(f"it taps layer {top}, the target has {layers} layers (0..{layers - 1})")
    if layers is not None and config.num_target_layers not in (None, layers):
        found.append(f"it was trained on a target with {config.num_target_layers} layers, this one has {layers}")
    if width is not None and width != config.target_hidden_size:
        found.append(f"its taps are {config.target_hidden_size} wide, the target's hidden states {width}")
    if vocab is not None and config.vocab_size < vocab:
        found.append(f"it knows {config.vocab_size} token ids, the target has {vocab}")
    return found


def needs(checkpoint: Checkpoint) -> list[str]:
    """What a target must offer, in words."""
    c = checkpoint.config
    layers = ", ".join("the embedding" if k == -1 else str(k) for k in c.target_layer_ids)
    out = [f"hidden states of layers {layers} ({c.target_hidden_size} wide, counted from 0, after the layer)"]
    for name, what in (("embed_tokens.weight", "input embedding"), ("lm_head.weight", "output head")):
        if name not in checkpoint.tensors:
            out.append(f"its {what} ({c.hidden_size} wide), which the checkpoint does not hold")
    out.append(f"a vocabulary of at most {c.vocab_size} ids, with the tokenizer that it was trained with")
    if c.target_name:
        out.append(f"it names {c.target_name}")
    return out


def weight_faults(checkpoint: Checkpoint) -> tuple[list[str], list[str]]:
    """Names of tensors with non-finite values, and of those that overflow in float16."""
    broken, large = [], []
    for name, tensor in checkpoint.tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            broken.append(name)
        elif tensor.numel() and float(tensor.abs().max()) > FLOAT16_MAX:
            large.append(name)
    return broken, large


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """A checkpoint in plain values, for ``dspark inspect`` and its JSON."""
    c, tensors = checkpoint.config, checkpoint.tensors
    broken, large = weight_faults(checkpoint)
    pruned = c.draft_vocab_size != c.vocab_size
    return {
        "source": checkpoint.source,
        "format": c.source_format,
        "algorithm": c.algorithm,
        "layers": [_layer(c, i) for i in range(len(c.layers))],
        "hidden_size": c.hidden_size,
        "layout": c.layout,
        "block_size": c.block_size,
        "max_gamma": c.max_gamma if c.eagle is None else None,
        "mask_token_id": c.mask_token_id if c.eagle is None else None,
        "target_layer_ids": list(c.target_layer_ids),
        "last_tap": c.last_tap,
        "head": c.head,
        "head_version": c.head_version,
        "markov_rank": c.markov_rank,
        "confidence": _confidence(c),
        "vocabulary": c.vocab_size,
        "draft_vocabulary": c.draft_vocab_size,
        "vocabulary_map": "offsets d2t" if pruned else "none",
        "embedding": "own" if "embed_tokens.weight" in tensors else "the target's",
        "output_head": "own" if "lm_head.weight" in tensors else "the target's",
        "parameters": sum(t.numel() for t in tensors.values()),
        "bytes": sum(t.nbytes for t in tensors.values()),
        "dtypes": sorted({str(t.dtype).removeprefix("torch.") for t in tensors.values()}),
        "non_finite": broken,
        "overflow_in_float16": large,
        "calibration": checkpoint.path is not None and (checkpoint.path / "calibration.json").is_file(),
        "needs": needs(checkpoint),
        "notes": list(c.notes),
    }


def _layer(c: DrafterConfig, index: int) -> str:
    layer = c.layers[index]
    seen = "full context" if layer.window is None else f"window {layer.window} from the {layer.window_from}"
    block = "causal" if layer.causal else "bidirectional"
    rope = layer.rope
    return (
        f"{c.family}, {c.num_heads} heads, {layer.num_kv_heads} key-value heads of {layer.head_dim}, {seen}, "
        f"{block}{' in the block' if c.eagle is None else ''}, rope {rope.rope_type} at {rope.theta:g}"
    )


def _confidence(c: DrafterConfig) -> str:
    if not c.confidence:
        return "none"
    return "linear, with the Markov embedding" if c.confidence_with_markov else "linear, hidden state alone"
