"""config.json of a drafter in DeepSpec's and in speculators' spelling, made from its description alone.

What a format can't say shows when the result is read back: ``differences`` compares the two descriptions.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from dspark.checkpoints.borrow import TargetParts
from dspark.checkpoints.formats import HEAD_TYPES, PLUGIN_HEAD
from dspark.checkpoints.schema import DrafterConfig, LayerConfig, RopeConfig

MODEL_TYPES = {"qwen3": "qwen3", "llama": "llama", "gemma4": "gemma4_text"}
_FULL, _SLIDING = "full_attention", "sliding_attention"
_LABELS = ("source_format", "algorithm", "notes", "requires_embeddings", "borrows_head", "target_name")
"""Fields that say where a description came from, not what a drafter computes."""


def differences(first: DrafterConfig, second: DrafterConfig) -> list[str]:
    """Fields in which two descriptions mean different drafters, as ``field: first, second``.

    A window's origin counts only in sliding layers, the norm of the last tap only where the last layer is tapped, and
    the target's layers only where both say how many.
    """
    a, b = _meaning(first), _meaning(second)
    if None in (first.num_target_layers, second.num_target_layers):
        a["num_target_layers"] = b["num_target_layers"] = None
    return [f"{name}: {a[name]!r}, {b[name]!r}" for name in a if a[name] != b[name]]


def _meaning(config: DrafterConfig) -> dict[str, Any]:
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name not in _LABELS}
    origin = LayerConfig(1, 2).window_from
    values["layers"] = tuple(
        layer if layer.window is not None else dataclasses.replace(layer, window_from=origin) for layer in config.layers
    )
    values["head_config"] = json.loads(json.dumps(dict(config.head_config)))
    known = config.num_target_layers
    if known is not None and max(config.target_layer_ids) + 1 != known:
        values["last_tap"] = "raw"
    if config.embed_scale is None:
        values["embed_scale"] = 1.0
    return values


def transformer_keys(c: DrafterConfig) -> dict[str, Any]:
    """The transformer part, as a Hugging Face config of its family."""
    sliding = [layer for layer in c.layers if layer.window is not None]
    full = [layer for layer in c.layers if layer.window is None]
    base = (sliding or full)[0]
    keys: dict[str, Any] = {
        "model_type": MODEL_TYPES[c.family],
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": len(c.layers),
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": base.num_kv_heads,
        "head_dim": base.head_dim,
        "rms_norm_eps": c.rms_norm_eps,
        "attention_bias": c.attention_bias,
        "attention_dropout": 0.0,
        "layer_types": [_FULL if layer.window is None else _SLIDING for layer in c.layers],
        "sliding_window": sliding[0].window if sliding else None,
        "tie_word_embeddings": False,
    }
    keys["hidden_activation" if c.family == "gemma4" else "hidden_act"] = c.activation
    if c.max_positions is not None:
        keys["max_position_embeddings"] = c.max_positions
    if c.mlp_bias or c.family == "llama":
        keys["mlp_bias"] = c.mlp_bias
    if c.family != "gemma4":
        window = {"use_sliding_window": bool(sliding), "max_window_layers": 0}
        return keys | (window if c.family == "qwen3" else {}) | {"rope_parameters": rope_keys(base.rope)}
    return keys | _gemma_keys(c, full[0] if full else base, base)


def _gemma_keys(c: DrafterConfig, full: LayerConfig, base: LayerConfig) -> dict[str, Any]:
    """Gemma 4: rope by layer type, own shapes of full layers, and the defaults of its config that mean something."""
    return {
        "attention_k_eq_v": full.k_eq_v,
        "global_head_dim": full.head_dim,
        "num_global_key_value_heads": full.num_kv_heads,
        "final_logit_softcapping": c.logit_softcap,
        "rope_parameters": {_FULL: rope_keys(full.rope), _SLIDING: rope_keys(base.rope)},
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "enable_moe_block": False,
        "use_double_wide_mlp": False,
    }


def rope_keys(rope: RopeConfig) -> dict[str, Any]:
    """``rope_parameters`` of a rotary embedding, with the keys that its type reads."""
    keys: dict[str, Any] = {"rope_theta": rope.theta, "rope_type": rope.rope_type}
    if rope.factor != 1.0 or rope.rope_type in ("linear", "llama3", "yarn"):
        keys["factor"] = rope.factor
    if rope.rope_type == "proportional":
        keys["partial_rotary_factor"] = rope.partial
    if rope.rope_type in ("llama3", "yarn"):
        keys["original_max_position_embeddings"] = rope.original_max
    if rope.rope_type == "llama3":
        keys |= {"low_freq_factor": rope.low_freq, "high_freq_factor": rope.high_freq}
    if rope.rope_type == "yarn":
        keys |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        optional = {n: getattr(rope, n) for n in ("attention_factor", "mscale", "mscale_all_dim")}
        keys |= {name: value for name, value in optional.items() if value is not None}
    return keys


def head_keys(c: DrafterConfig) -> dict[str, Any]:
    """Sequential and confidence head. A plugin's head has its name, version and settings in a key of this project."""
    keys: dict[str, Any] = {"markov_rank": c.markov_rank, "enable_confidence_head": c.confidence}
    if c.confidence:
        keys["confidence_head_with_markov"] = c.confidence_with_markov
    if c.plugin_head:
        keys["markov_head_type"] = c.head
        keys[PLUGIN_HEAD] = {"name": c.head, "version": c.head_version, "config": dict(c.head_config)}
    elif c.markov_rank:
        keys["markov_head_type"] = next(name for name, head in HEAD_TYPES.items() if head == c.head)
    return keys


def deepspec_keys(c: DrafterConfig, *, target: TargetParts | None, num_anchors: int) -> dict[str, Any]:
    """DeepSpec: everything at the root, where vLLM looks for it."""
    keys = transformer_keys(c) | head_keys(c)
    keys |= {
        "architectures": ["Gemma4DSparkModel" if c.family == "gemma4" else "Qwen3DSparkModel"],
        "num_target_layers": c.num_target_layers,
        "target_layer_ids": list(c.target_layer_ids),
        "block_size": c.block_size,
        "mask_token_id": c.mask_token_id,
        "num_anchors": num_anchors,
    }
    if c.target_hidden_size != c.hidden_size:
        keys["target_hidden_size"] = c.target_hidden_size
    if c.family == "gemma4":
        keys["target_text_model_type"] = MODEL_TYPES["gemma4"]
        if target is not None and target.model_type:
            keys["target_model_type"] = target.model_type
    return keys


def speculators_keys(c: DrafterConfig) -> dict[str, Any]:
    """speculators: the transformer part nested, tap ids one higher."""
    dspark = c.head != "none" or c.confidence
    name = "dspark" if dspark else "dflash"
    sliding = [layer for layer in c.layers if layer.window is not None]
    keys: dict[str, Any] = {
        "speculators_model_type": name,
        "architectures": ["DSparkDraftModel" if dspark else "DFlashDraftModel"],
        "transformer_layer_config": transformer_keys(c),
        "draft_vocab_size": c.draft_vocab_size,
        "block_size": c.block_size,
        "aux_hidden_state_layer_ids": [k + 1 for k in c.target_layer_ids],
        "mask_token_id": c.mask_token_id,
        "sample_from_anchor": c.sample_from_anchor,
        # Without sliding layers it says nothing here, but vLLM reads false as "every layer is causal".
        "sliding_window_non_causal": not sliding[0].causal if sliding else True,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
    }
    return keys | (head_keys(c) if dspark else {})


def speculators_verifier(c: DrafterConfig, algorithm: str, name: str, architectures: tuple[str, ...]) -> dict[str, Any]:
    """``speculators_config``: how many tokens a round drafts, and for which target."""
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {
                "proposal_type": "greedy",
                "speculative_tokens": c.max_gamma,
                "verifier_accept_k": 1,
                "accept_tolerance": 0.0,
            }
        ],
        "verifier": {"name_or_path": name, "architectures": list(architectures)},
    }


def plain_json(raw: Mapping[str, Any]) -> dict[str, Any]:
    """``raw`` as it reads after a trip through a file."""
    value: dict[str, Any] = json.loads(json.dumps(raw))
    return value
