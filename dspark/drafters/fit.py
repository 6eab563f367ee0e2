"""Fitting a checkpoint to its target: what is borrowed, which draft ids exist, and where the two disagree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.checkpoints import Checkpoint, DrafterConfig, load_checkpoint
from dspark.checkpoints.describe import TargetShape, fit_problems
from dspark.errors import CheckpointError, ConfigError
from dspark.protocols import BuildContext

DTYPES = ("float16", "bfloat16", "float32", "float64")
"""What a drafter's ``dtype`` may name."""

_FINAL_NORMS = ("norm", "final_layernorm", "ln_f", "final_layer_norm")


@dataclass(frozen=True, slots=True)
class Fitted:
    """A checkpoint on a target.

    Attributes:
        tensors: by canonical name, on the device, in the dtype; without embedding and head.
        embedding, head: [rows, d] and [Vd, d], own or the target's; Vd without padding.
        embed_scale: factor on input embeddings.
        token_map: draft id -> target id [Vd], or None where they are the same.
        tap_norm: norm of the last tap, where the checkpoint was trained on a normed one.
        borrowed: what is the target's (``embedding``, ``head``).
    """

    tensors: Mapping[str, Tensor]
    embedding: Tensor
    head: Tensor
    embed_scale: float
    token_map: Tensor | None
    tap_norm: Callable[[Tensor], Tensor] | None
    borrowed: tuple[str, ...]


def check_source(name: str, checkpoint: object, dtype: str | None) -> None:
    """Settings that every drafter with a checkpoint has.

    Raises:
        ConfigError: naming the setting.
    """
    if not isinstance(checkpoint, Checkpoint) and not str(checkpoint):
        raise ConfigError(f"{name}.checkpoint: name a folder or a Hub id of a drafter checkpoint")
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"{name}.dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")


def open_checkpoint(source: str | Path | Checkpoint, revision: str | None, target: Any) -> Checkpoint:
    """A checkpoint for a target, which has to show its hidden states.

    Raises:
        CheckpointError: unreadable, incomplete, or the target shows none.
    """
    if not isinstance(source, Checkpoint):
        source = load_checkpoint(source, revision=revision, target_layers=getattr(target, "num_layers", None))
    if target is not None and not target.capabilities.taps:
        raise CheckpointError(f"{source.source} reads hidden states, and {target.name} can't show its own")
    return source


def place(context: BuildContext, dtype: str | None) -> tuple[torch.device, torch.dtype]:
    """Where a drafter runs and what it computes in: the target's device and dtype, unless ``dtype`` names another."""
    device = torch.device(context.device or "cpu")
    return device, getattr(torch, dtype) if dtype else context.dtype or torch.float32


def fit(checkpoint: Checkpoint, target: Any, device: torch.device, dtype: torch.dtype) -> Fitted:
    """Put a checkpoint on a target's device, with what it borrows.

    Raises:
        CheckpointError: layers, widths, vocabularies or the mask id do not fit; non-finite weights, naming the first.
    """
    config, where = checkpoint.config, checkpoint.source or "checkpoint"
    name = str(getattr(target, "name", "the target"))
    shape = TargetShape(getattr(target, "num_layers", None), _width(target), getattr(target, "vocab_size", None), name)
    problems = fit_problems(config, shape)
    if problems:
        raise CheckpointError(f"{where} does not fit {name}: " + "; ".join(problems))
    tensors = {name: to_finite(name, t, device, dtype, where) for name, t in checkpoint.tensors.items()}
    borrowed = []
    scale = config.embed_scale
    embedding = tensors.pop("embed_tokens.weight", None)
    if embedding is None:
        borrowed.append("embedding")
        module = _part(target, "input_embeddings", where)
        embedding = module.weight.detach().to(device=device, dtype=dtype)
        scale = float(getattr(module, "embed_scale", 1.0)) if scale is None else scale
    head = tensors.pop("lm_head.weight", None)
    if head is None:
        borrowed.append("head")
        head = _part(target, "lm_head", where).weight.detach()
        if checkpoint.token_map is not None:  # an id beyond the target's is dropped below
            head = head[checkpoint.token_map.to(head.device).clamp(max=len(head) - 1)]
        head = head.to(device=device, dtype=dtype)
    for part, weight in (("embedding", embedding), ("head", head)):
        if weight.shape[1] != config.hidden_size:
            raise CheckpointError(
                f"{where}: the {part} is {weight.shape[1]} wide, the drafter {config.hidden_size}"
                + ("; the target's is used, since the checkpoint holds none" if part in borrowed else "")
            )
    if config.mask_token_id >= len(embedding):
        raise CheckpointError(
            f"{where}: mask_token_id {config.mask_token_id} has no row in {len(embedding)} embeddings"
        )
    head, token_map = _vocabulary(checkpoint, head, tensors, getattr(target, "vocab_size", config.vocab_size))
    norm = _tap_norm(config, target, where)
    return Fitted(tensors, embedding, head, 1.0 if scale is None else scale, token_map, norm, tuple(borrowed))


def to_finite(name: str, tensor: Tensor, device: torch.device, dtype: torch.dtype, where: str) -> Tensor:
    """``tensor`` in ``dtype``.

    Raises:
        CheckpointError: it is not finite as stored, or overflows in ``dtype``.
    """
    if not bool(torch.isfinite(tensor).all()):
        raise CheckpointError(f"{where}: {name} holds non-finite values")
    out = tensor.to(device=device, dtype=dtype)
    if not bool(torch.isfinite(out).all()):
        top = float(tensor.abs().max())
        raise CheckpointError(
            f"{where}: {name} overflows in {dtype} (largest magnitude {top:.4g}); use bfloat16 or float32"
        )
    return out


def _vocabulary(
    checkpoint: Checkpoint, head: Tensor, tensors: dict[str, Tensor], vocab_size: int
) -> tuple[Tensor, Tensor | None]:
    """Drop draft ids that are no target ids (padding), and shorten head and W2 alike."""
    ids = checkpoint.token_map
    rows = min(len(head), checkpoint.config.draft_vocab_size)
    known = torch.arange(rows) if ids is None else ids
    keep = (known < vocab_size).nonzero().flatten()
    if len(keep) == 0:
        raise CheckpointError(f"{checkpoint.source}: none of its draft ids is a target id")
    w2 = "markov_head.markov_w2.weight"
    if len(keep) < len(head):
        at = keep.to(head.device)
        head = head[at]
        if w2 in tensors:
            tensors[w2] = tensors[w2][at]
    if ids is None and len(keep) == vocab_size:
        return head, None
    return head, known[keep].to(head.device)


def _width(target: Any) -> int | None:
    """Width of the target's hidden states, where it can be seen."""
    config = getattr(getattr(target, "model", None), "config", None)
    width = getattr(config, "hidden_size", None)
    return width if isinstance(width, int) else None


def _part(target: Any, name: str, where: str) -> Any:
    module = getattr(target, name, None)
    if module is None or getattr(module, "weight", None) is None:
        raise CheckpointError(
            f"{where} holds no {'embed_tokens' if name == 'input_embeddings' else name}.weight, and "
            f"{getattr(target, 'name', 'the target')} offers none to borrow (target.{name})"
        )
    if getattr(module, "bias", None) is not None:
        raise CheckpointError(f"{where}: the target's {name} has a bias, which a drafter can't share")
    return module


def _tap_norm(config: DrafterConfig, target: Any, where: str) -> Callable[[Tensor], Tensor] | None:
    """The target's final norm, where the last tap is the last layer and the checkpoint expects it normed."""
    layers = getattr(target, "num_layers", config.num_target_layers)
    if config.last_tap != "normed" or max(config.target_layer_ids) + 1 != layers:
        return None
    base = getattr(getattr(target, "model", None), "base_model", None)
    for name in _FINAL_NORMS:
        norm = getattr(base, name, None)
        if callable(norm):
            return norm  # type: ignore[no-any-return]
    raise CheckpointError(
        f"{where} taps the last layer behind the final norm (Hugging Face's hidden_states[{layers}]), and the target "
        "shows no final norm"
    )
