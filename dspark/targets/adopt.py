"""Taking a loaded model: what it must be, a copy that shares its weights, its longest sequence and its end tokens."""

from __future__ import annotations

import copy
from typing import Any

from dspark.errors import TargetError
from dspark.targets.anatomy import refuse_by_config

DEFAULT_LEN = 4096
"""Tokens of a slot where neither the caller nor the model says."""


def check_model(model: Any) -> None:
    """Refuse what is not one causal LM on one device.

    Raises:
        TargetError: with the reason.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise TargetError(
            f"a target has to be a transformers PreTrainedModel, got {type(model).__name__} "
            "(merge adapters first, and pass compiled models before compiling)"
        )
    refuse_by_config(model.config)
    head: Any = model
    if head.get_output_embeddings() is None:
        raise TargetError(f"{type(model).__name__} has no language-model head: load it with AutoModelForCausalLM")
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise TargetError(
            f"{type(model).__name__} is dispatched or offloaded by accelerate (device_map); the key-value cache lives "
            "on one device: load the model on one device"
        )
    devices = {str(p.device) for p in model.parameters()}
    if len(devices) != 1 or "meta" in devices:
        raise TargetError(
            f"{type(model).__name__} has parameters on {', '.join(sorted(devices))}; one device is needed"
        )


def shared_copy(model: Any) -> Any:
    """A copy of the module tree with the same parameters and buffers: what it is set to does not reach the original."""
    memo: dict[int, Any] = {id(p): p for p in model.parameters()}
    memo |= {id(b): b for b in model.buffers()}
    return copy.deepcopy(model, memo)


def attention_of(model: Any) -> list[tuple[Any, str]]:
    """Every config in the model, the top one first, with its attention implementation."""
    found = {id(model.config): model.config}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation_internal"):
            found.setdefault(id(config), config)
    return [(config, config._attn_implementation_internal) for config in found.values()]


def length_limit(config: Any) -> int:
    """Most tokens that the position encoding takes without changing with the length of its neighbours."""
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or DEFAULT_LEN
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    for scaling in nested or [rope]:
        if scaling.get("rope_type", scaling.get("type")) in ("dynamic", "longrope"):
            # beyond it the frequencies follow the longest sequence of the batch: others would change with it
            original = scaling.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None) or limit
            limit = min(limit, int(original))
    return int(limit)


def eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        if ids is not None:
            return tuple(sorted({int(i) for i in (ids if isinstance(ids, (list, tuple)) else [ids])}))
    return ()
