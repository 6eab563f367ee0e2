"""The transformer part of a drafter's config.json: a plain Hugging Face config dict, read as JSON.

It is not read through AutoConfig: Gemma 4's keys change their spelling with the transformers version
(``global_head_dim`` and ``num_global_key_value_heads`` or ``per_layer_config``), and both are accepted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dspark.checkpoints.fields import Fields
from dspark.checkpoints.schema import ROPE_TYPES, LayerConfig, RopeConfig

_FAMILY = {
    "qwen3": "qwen3",
    "llama": "llama",
    "mistral": "llama",
    "gemma4_text": "gemma4",
    "gemma4_unified_text": "gemma4",
}
_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_transformer(
    t: Fields, *, window_from: str, causal: bool | None, sliding_causal: bool = True
) -> dict[str, Any]:
    """Fields of ``DrafterConfig`` that the transformer part decides.

    Args:
        t: the object that holds ``hidden_size`` and the like.
        window_from: the format's measure of a sliding window, see ``LayerConfig``.
        causal: the file's explicit choice for all layers, or None.
        sliding_causal: whether sliding layers are causal in the block where ``causal`` is None.
    """
    model_type = t.text("model_type", "qwen3")
    family = _FAMILY.get(model_type, model_type)
    heads, d = t.whole("num_attention_heads"), t.whole("hidden_size")
    _refuse_variants(t)
    return {
        "family": family,
        "hidden_size": d,
        "intermediate_size": t.whole("intermediate_size"),
        "num_heads": heads,
        "vocab_size": t.whole("vocab_size"),
        "layers": tuple(_layers(t, family, window_from, causal, sliding_causal)),
        "rms_norm_eps": t.number("rms_norm_eps", 1e-6),
        "activation": t.text("hidden_activation" if t.has("hidden_activation") else "hidden_act", "silu"),
        "attention_bias": t.flag("attention_bias", False),
        "mlp_bias": t.flag("mlp_bias", False),
        "max_positions": t.optional_whole("max_position_embeddings"),
        "embed_scale": math.sqrt(d) if family == "gemma4" else 1.0,
        "logit_softcap": t.optional_number("final_logit_softcapping") if family == "gemma4" else None,
    }


def _refuse_variants(t: Fields) -> None:
    for key, what in (
        ("enable_moe_block", "mixture-of-experts draft layers"),
        ("num_experts", "mixture-of-experts draft layers"),
        ("num_local_experts", "mixture-of-experts draft layers"),
        ("hidden_size_per_layer_input", "per-layer input embeddings"),
        ("num_kv_shared_layers", "keys and values shared between draft layers"),
        ("use_double_wide_mlp", "double-wide MLPs"),
    ):
        if t.raw.get(key):
            t.problems.append(f"{key}: {what} are not supported")


def _layers(t: Fields, family: str, window_from: str, causal: bool | None, sliding_causal: bool) -> list[LayerConfig]:
    count = t.whole("num_hidden_layers")
    types = _layer_types(t, count)
    out = []
    for i, kind in enumerate(types):
        sliding = kind == _SLIDING
        kv_heads, head_dim = _attention_shape(t, family, i, sliding)
        out.append(
            LayerConfig(
                num_kv_heads=kv_heads,
                head_dim=head_dim,
                window=t.whole("sliding_window") if sliding else None,
                causal=(sliding and sliding_causal) if causal is None else causal,
                window_from=window_from,
                k_eq_v=family == "gemma4" and not sliding and t.flag("attention_k_eq_v", False),
                rope=_rope(t, kind),
            )
        )
    return out


def _layer_types(t: Fields, count: int) -> list[str]:
    types = t.raw.get("layer_types")
    if types is None:  # as the Hugging Face configs derive them
        first = t.whole("max_window_layers", 0)
        window = t.flag("use_sliding_window", False) and t.has("sliding_window")
        return [_SLIDING if window and i >= first else _FULL for i in range(count)]
    if not isinstance(types, list) or any(k not in (_FULL, _SLIDING) for k in types):
        t.problems.append(f"layer_types: expected a list of {_FULL!r} and {_SLIDING!r}, got {types!r}")
        return [_FULL] * count
    if len(types) != count:
        t.problems.append(f"layer_types: {len(types)} entries for num_hidden_layers {count}")
    return types


def _attention_shape(t: Fields, family: str, index: int, sliding: bool) -> tuple[int, int]:
    """Key-value heads and head width of a layer; Gemma 4's full layers have their own."""
    heads = t.whole("num_attention_heads", 1)
    kv_heads = t.whole("num_key_value_heads", heads)
    head_dim = t.whole("head_dim", t.whole("hidden_size", 0) // max(heads, 1))
    if family != "gemma4":
        return kv_heads, head_dim
    own = t.child("per_layer_config").child(str(index))
    if own.raw:
        return own.whole("num_key_value_heads", kv_heads), own.whole("head_dim", head_dim)
    if sliding:
        return kv_heads, head_dim
    if t.flag("attention_k_eq_v", False):
        kv_heads = t.whole("num_global_key_value_heads", kv_heads)
    return kv_heads, t.whole("global_head_dim", head_dim)


def _rope(t: Fields, kind: str) -> RopeConfig:
    """Rotary parameters of a layer type: ``rope_parameters``, else root ``rope_theta`` and ``rope_scaling``."""
    raw: Any = t.raw.get("rope_parameters")
    if isinstance(raw, Mapping) and isinstance(raw.get(kind), Mapping):
        raw = raw[kind]
    if not isinstance(raw, Mapping):
        scaling = t.raw.get("rope_scaling")
        raw = {"rope_theta": t.raw.get("rope_theta"), **(scaling if isinstance(scaling, Mapping) else {})}
    given = {k: v for k, v in raw.items() if v is not None}
    r = Fields({"rope_theta": t.raw.get("rope_theta"), **given}, "rope", t.problems)
    rope_type = r.text("rope_type" if r.has("rope_type") else "type", "default")
    rope_type = "default" if rope_type == "mrope" else rope_type  # text positions alone: all sections are equal
    if rope_type not in ROPE_TYPES:
        t.problems.append(f"rope type {rope_type!r} is not supported (supported: {', '.join(ROPE_TYPES)})")
    partial = r.number("partial_rotary_factor", t.number("partial_rotary_factor", 1.0))
    if partial != 1.0 and rope_type != "proportional":
        t.problems.append(f"partial_rotary_factor {partial} with rope type {rope_type!r} is not supported")
    scaled = rope_type in ("llama3", "yarn")
    return RopeConfig(
        theta=r.number("rope_theta", 10_000.0),
        rope_type=rope_type,
        factor=r.number("factor", 1.0) if rope_type in ("proportional", "default") else r.number("factor"),
        partial=partial,
        original_max=r.whole("original_max_position_embeddings") if scaled else 0,
        low_freq=r.number("low_freq_factor") if rope_type == "llama3" else 1.0,
        high_freq=r.number("high_freq_factor") if rope_type == "llama3" else 4.0,
        beta_fast=r.number("beta_fast", 32.0),
        beta_slow=r.number("beta_slow", 1.0),
        attention_factor=r.optional_number("attention_factor"),
        mscale=r.optional_number("mscale"),
        mscale_all_dim=r.optional_number("mscale_all_dim"),
        truncate=r.flag("truncate", True),
    )
