"""What a model's attention really is, found by running it once rather than by believing its config.

Two tokens go through the model under an attention function that records what each layer is called with: shapes, dtype,
keyword arguments and the mask rule that transformers would apply. What the slot attention can't reproduce is refused
with the reason, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dspark.errors import TargetError
from dspark.targets.attention import CONTEXT_KEY
from dspark.targets.cache import LayerSpec

INSPECT_NAME = "dspark_inspect"

# Keyword arguments that do not change what attention computes here.
_NEUTRAL = frozenset(
    {"dropout", "scaling", "softcap", "sliding_window", "position_ids", "cache_position", "use_cache", "cache"}
    | {"past_key_values", "output_attentions", "output_hidden_states", "return_dict", "position_embeddings"}
    | {"output_router_logits", "deterministic", "num_items_in_batch", CONTEXT_KEY}
)
_PROBED_DISTANCE = 1 << 40
_RECURRENT_TYPES = ("linear_attention", "mamba", "recurrent", "conv", "ssm", "rwkv", "gated_delta")


@dataclass
class _Record:
    """What the layers were called with."""

    layers: dict[int, LayerSpec] = field(default_factory=dict)


class _RuleMask(torch.Tensor):
    """A mask that remembers the window of the rule that it stands for."""

    dspark_window: int | None


def refuse_by_config(config: Any) -> None:
    """Refuse architectures that can't be decoded from a slot cache.

    Raises:
        TargetError: naming the reason.
    """
    kind = getattr(config, "model_type", type(config).__name__)

    def refuse(reason: str) -> None:
        raise TargetError(f"target of type {kind!r} is not supported: {reason}")

    if getattr(config, "is_encoder_decoder", False):
        refuse("it is an encoder-decoder; a causal LM without an encoder is needed")
    if any(getattr(config, name, None) is not None for name in ("vision_config", "audio_config")):
        text = getattr(getattr(config, "text_config", None), "model_type", None)
        hint = f"; load its text model (type {text!r}) by itself" if text else ""
        refuse(f"it is a multimodal model{hint}")
    types = [str(t) for t in (getattr(config, "layer_types", None) or ())]
    types += [str(t) for t in (getattr(config, "layers_block_type", None) or ())]
    if found := sorted({t for t in types if any(word in t for word in _RECURRENT_TYPES)}):
        refuse(f"layers of type {', '.join(found)} keep a recurrent state, which can't be rolled back by length")
    if any(word in str(kind) for word in ("mamba", "rwkv", "xlstm", "recurrent_gemma", "falcon_h1", "bamba", "zamba")):
        refuse("it keeps a recurrent state, which can't be rolled back by length")
    if "chunked_attention" in types:
        refuse("chunked attention (layer_types) has no slot form here")
    if getattr(config, "alibi", False) or kind in ("bloom", "mpt"):
        refuse("ALiBi position biases are not carried by the slot attention")
    if getattr(config, "num_kv_shared_layers", 0):
        refuse("layers share keys and values (num_kv_shared_layers)")


def decoder_layers(model: nn.Module, count: int) -> nn.ModuleList:
    """The list of ``count`` decoder layers: the largest ModuleList of that length.

    Raises:
        TargetError: if there is none.
    """
    best: nn.ModuleList | None = None
    size = -1
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            weights = sum(p.numel() for p in module.parameters())
            if weights > size:
                best, size = module, weights
    if best is None:
        raise TargetError(f"{type(model).__name__} has no list of {count} decoder layers to tap")
    return best


def inspect_model(
    model: Any, set_attention: Callable[[str], None], device: torch.device
) -> tuple[dict[int, LayerSpec], int]:
    """Run two tokens through ``model`` and describe every attention layer.

    Args:
        set_attention: switches the model's attention implementation.

    Returns:
        A description of each layer by its number, and the width of the logits.

    Raises:
        TargetError: naming what the slot attention can't reproduce.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(INSPECT_NAME, _record_attention)
    AttentionMaskInterface.register(INSPECT_NAME, _record_mask)
    set_attention(INSPECT_NAME)
    record = _Record()
    tokens = torch.zeros((1, 2), dtype=torch.long, device=device)
    kwargs = {CONTEXT_KEY: record, "position_ids": torch.arange(2, device=device)[None], "use_cache": False}
    name = type(model).__name__
    try:
        with torch.no_grad():
            width = int(model(tokens, **kwargs).logits.shape[-1])
    except TargetError as err:
        raise TargetError(f"{name}: {err}") from err
    except Exception as err:  # a model of any architecture can fail in any way here
        raise TargetError(
            f"{name} can't run with a custom attention function: {type(err).__name__}: {err}. It has to call its "
            "attention through transformers' AttentionInterface and pass keyword arguments through"
        ) from err
    expected = int(model.config.num_hidden_layers)
    if len(record.layers) != expected:
        raise TargetError(
            f"{name}: {len(record.layers)} of {expected} layers call attention through transformers' "
            "AttentionInterface; the others keep their state elsewhere (recurrent or convolutional layers, or own code)"
        )
    return record.layers, width


def _record_mask(*args: Any, **kwargs: Any) -> Tensor:
    """Mask function of the inspection: recognises full causal and sliding-window rules, refuses all others."""
    rule, window = kwargs["mask_function"], kwargs.get("local_size")
    far = _PROBED_DISTANCE
    seen = {0: window is None, far: True, far + 1: False}
    if window is not None:
        seen |= {far - int(window): False, far - int(window) + 1: True}
    zero = torch.zeros((), dtype=torch.long)
    for key, expected in seen.items():
        allowed = rule(zero, zero, torch.tensor(far), torch.tensor(key))
        if bool(allowed) != expected:
            raise TargetError(
                "its attention mask is neither causal nor a causal sliding window (chunked, bidirectional or custom)"
            )
    length = int(kwargs["q_length"])
    mask = torch.ones((1, 1, length, length), dtype=torch.bool, device=kwargs.get("device")).as_subclass(_RuleMask)
    mask.dspark_window = None if window is None else int(window)
    return mask


def _record_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention function of the inspection: records the call and returns something of the right shape."""
    record: _Record | None = kwargs.get(CONTEXT_KEY)
    index = getattr(module, "layer_idx", None)
    if record is None:
        raise TargetError("its layers do not pass keyword arguments on to the attention function")
    if not isinstance(index, int):
        raise TargetError(f"its attention {type(module).__name__} has no layer_idx")
    if index in record.layers:
        raise TargetError(f"layer {index} calls attention more than once")
    _refuse_arguments(index, kwargs)
    if key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        raise TargetError(f"layer {index} has {query.shape[1]} query heads for {key.shape[1]} key heads")
    if query.shape[:1] + query.shape[2:3] != (1, 2) or key.shape[2] != 2 or query.shape[3] != key.shape[3]:
        raise TargetError(f"layer {index} calls attention with shapes {tuple(query.shape)}, {tuple(key.shape)}")
    if not getattr(module, "is_causal", True):
        raise TargetError(f"layer {index} is not causal")
    window = _window(index, attention_mask, kwargs)
    softcap = kwargs.get("softcap") is not None
    record.layers[index] = LayerSpec(
        index, key.shape[1], query.shape[1], key.shape[3], value.shape[3], window, key.dtype, softcap
    )
    fold = query.shape[1] // key.shape[1]
    return value.repeat_interleave(fold, dim=1).transpose(1, 2).contiguous(), None


def _refuse_arguments(index: int, kwargs: Mapping[str, Any]) -> None:
    if kwargs.get("is_causal") is False:
        raise TargetError(f"layer {index} is not causal")
    unknown = sorted(k for k, v in kwargs.items() if k not in _NEUTRAL and k != "is_causal" and v is not None)
    if unknown:
        raise TargetError(
            f"layer {index} passes {', '.join(unknown)} to attention, which the slot attention does not implement "
            "(attention sinks, position biases and sparse patterns change the result)"
        )


def _window(index: int, mask: Tensor | None, kwargs: Mapping[str, Any]) -> int | None:
    """The window that the model's own mask applies; its keyword argument where there is no mask to read."""
    asked = kwargs.get("sliding_window")
    if mask is None:
        return None if asked is None else int(asked)
    if not isinstance(mask, _RuleMask) or not hasattr(mask, "dspark_window"):
        raise TargetError(f"layer {index} builds or edits its own attention mask")
    return mask.dspark_window
