"""Which format a config.json is in, and how each says what a drafter is.

Detection goes by the most specific key first: ``speculators_model_type``; DeepSpec's architectures; SpecForge's
``projector_type``; z-lab's architecture; DeepSpec's EAGLE-3. "DSparkDraftModel" alone is ambiguous: speculators,
SpecForge and DeepSeek-V4 servers all write it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspark.checkpoints.eagle3 import deepspec_eagle3, no_last_layer, speculators_eagle3, speculators_taps
from dspark.checkpoints.fields import Fields
from dspark.checkpoints.schema import DrafterConfig
from dspark.checkpoints.transformer import read_transformer
from dspark.errors import CheckpointError

DEEPSPEC_ARCHITECTURES = ("Qwen3DSparkModel", "Gemma4DSparkModel", "Qwen3OmniDSparkModel")
DEEPSPEC_EAGLE3 = ("Qwen3Eagle3Model", "Gemma4Eagle3Model", "Eagle3DraftModel")
SPECULATORS = ("dspark", "dflash", "eagle3")
"""Values of ``speculators_model_type`` that are read."""
HEAD_TYPES = {"vanilla": "markov", "gated": "gated", "rnn": "rnn"}
"""``markov_head_type`` of the files -> registered head."""
BORROWED_HEAD = "head_from_target"
"""dspark's own key in speculators' format: no head is stored for a pruned vocabulary, the target's rows are it."""
PLUGIN_HEAD = "sequential_head"
"""Key of this project for a plugin's head: ``name``, ``version`` and ``config``. Other readers ignore it."""
_REFUSED_SPECULATORS = {
    "peagle": "P-EAGLE replaces target features by a learned mask state and has no block backbone",
    "dflash2": "DFlash 2 has convolution and selector tensors that have no counterpart here",
    "mtp": "multi-token-prediction layers are part of their target, not a drafter of their own",
    "xpress": "its tensors are undocumented",
}


def detect(raw: Mapping[str, Any], where: str) -> str:
    """``deepspec``, ``speculators``, ``specforge`` or ``zlab``.

    Raises:
        CheckpointError: naming the format and the reason where it is known but not supported, or what was looked for.
    """
    model_type = raw.get("speculators_model_type")
    if model_type is not None:
        if model_type in SPECULATORS:
            return "speculators"
        known = f"unknown to this version (known: {', '.join(SPECULATORS)})"
        reason = _REFUSED_SPECULATORS.get(str(model_type), known)
        raise CheckpointError(f"{where}: speculators_model_type {model_type!r} is not supported: {reason}")
    architectures = [str(a) for a in raw.get("architectures") or ()]
    nested = raw.get("dflash_config") if isinstance(raw.get("dflash_config"), Mapping) else {}
    if any(a in DEEPSPEC_ARCHITECTURES for a in architectures):
        # An export that SpecForge normalised for serving keeps its layer ids nested.
        return "specforge" if "target_layer_ids" not in raw and "target_layer_ids" in (nested or {}) else "deepspec"
    projector = (nested or {}).get("projector_type")
    if projector == "dspark":
        return "specforge"
    if projector == "domino":
        raise CheckpointError(f"{where}: SpecForge Domino is not supported: its prefix GRU has no counterpart here")
    if "DFlashDraftModel" in architectures:
        return "zlab"
    if any(a in DEEPSPEC_EAGLE3 for a in architectures):
        return "deepspec"
    if "LlamaForCausalLMEagle3" in architectures:
        raise CheckpointError(
            f"{where}: LlamaForCausalLMEagle3 is not supported: EAGLE-3 in SGLang's spelling (tensors midlayer.*); "
            "convert it to speculators' format"
        )
    if any(str(k).startswith("dspark_") for k in raw) or str(raw.get("model_type", "")).startswith("deepseek_v4"):
        raise CheckpointError(
            f"{where}: DeepSeek-V4's own DSpark modules live inside the target's checkpoint (tensors mtp.*) with "
            "mixture-of-experts and hyper-connection layers; they are not supported, and no conversion is offered"
        )
    raise CheckpointError(
        f"{where}: not a drafter checkpoint that is known here (architectures {architectures or 'absent'}). "
        f"Looked for: speculators_model_type {', '.join(SPECULATORS)}; architectures "
        f"{', '.join((*DEEPSPEC_ARCHITECTURES, *DEEPSPEC_EAGLE3))} or DFlashDraftModel; "
        "dflash_config.projector_type dspark"
    )


def is_eagle3(raw: Mapping[str, Any]) -> bool:
    """True where a config.json is an EAGLE-3 drafter's."""
    if raw.get("speculators_model_type") is not None:
        return bool(raw["speculators_model_type"] == "eagle3")
    return any(a in DEEPSPEC_EAGLE3 for a in raw.get("architectures") or ())


def read_config(
    raw: Mapping[str, Any], where: str = "config.json", *, target_layers: int | None = None
) -> DrafterConfig:
    """Read a drafter's config.

    Args:
        raw: config.json as a plain dict.
        where: what to call it in messages.
        target_layers: decoder layers of the target, for formats whose default tap layers depend on it.

    Raises:
        CheckpointError: one error with every missing or malformed key.
    """
    reader = {"deepspec": _deepspec, "speculators": _speculators, "specforge": _specforge, "zlab": _zlab}
    root = Fields(raw, "")
    source_format = detect(raw, where)
    values = reader[source_format](root, target_layers)
    root.raise_problems(f"{where} ({source_format})")
    return DrafterConfig(source_format=source_format, **values).validate(f"{where} ({source_format})")


def _head(fields: Fields, rank_default: Any = None) -> dict[str, Any]:
    """Sequential and confidence head, from the object that holds their keys."""
    rank = fields.whole("markov_rank") if rank_default is None else fields.whole("markov_rank", rank_default)
    kind = fields.text("markov_head_type", "vanilla") if rank > 0 else "none"
    plugin = fields.child(PLUGIN_HEAD)
    if rank > 0 and kind not in HEAD_TYPES and not plugin.raw:
        fields.problems.append(f"markov_head_type: expected one of {', '.join(HEAD_TYPES)}, got {kind!r}")
    confidence = fields.flag("enable_confidence_head", True)
    own: dict[str, Any] = {"head": HEAD_TYPES.get(kind, "none")}
    if plugin.raw:
        own = {
            "head": plugin.text("name"),
            "head_version": plugin.text("version"),
            "head_config": dict(plugin.child("config").raw),
        }
    return own | {
        "markov_rank": max(rank, 0),
        "confidence": confidence,
        "confidence_with_markov": confidence and rank > 0 and fields.flag("confidence_head_with_markov", True),
    }


def _deepspec(root: Fields, _: int | None) -> dict[str, Any]:
    """DeepSpec: the target's config with the drafter's keys at its root. Its DFlash files are anchor-first too."""
    if is_eagle3(root.raw):
        return deepspec_eagle3(root)
    values = read_transformer(root, window_from="query", causal=None)
    heads = _head(root)
    layers = root.whole("num_target_layers")
    ids = root.ids("target_layer_ids")
    no_last_layer(root, ids, layers)
    return (
        values
        | heads
        | {
            "algorithm": "dspark" if heads["markov_rank"] else "dflash",
            "draft_vocab_size": root.whole("draft_vocab_size", values["vocab_size"]),
            "target_layer_ids": ids,
            "target_hidden_size": root.whole("target_hidden_size", values["hidden_size"]),
            "num_target_layers": layers,
            "block_size": root.whole("block_size"),
            "sample_from_anchor": root.flag("sample_from_anchor", True),
            "mask_token_id": root.whole("mask_token_id"),
            "requires_embeddings": True,
            "target_name": root.text("target_model_name_or_path", ""),
        }
    )


def _speculators(root: Fields, target_layers: int | None) -> dict[str, Any]:
    """speculators: id k is the state after k layers, DeepSpec's k - 1; windows are measured from the anchor."""
    algorithm = root.text("speculators_model_type")
    if is_eagle3(root.raw):
        return speculators_eagle3(root, target_layers)
    transformer = root.child("transformer_layer_config")
    if not transformer.raw:
        root.problems.append("transformer_layer_config: missing")
    values = read_transformer(
        transformer,
        window_from="anchor",
        causal=None,
        sliding_causal=not root.flag("sliding_window_non_causal", False),
    )
    notes: list[str] = []
    if not root.has("sample_from_anchor"):
        layout = "mask-only, as drafters of both kinds were before the key existed"
        notes.append(f"sample_from_anchor is absent: read as false ({layout})")
    aux = speculators_taps(root, "aux_hidden_state_layer_ids", target_layers, notes)
    heads: dict[str, Any] = {"confidence": False}
    if algorithm == "dspark":
        heads = _head(root, rank_default=256)
    verifier = root.child("speculators_config").child("verifier")
    return (
        values
        | heads
        | {
            "algorithm": algorithm,
            "draft_vocab_size": root.whole("draft_vocab_size", 32_000),
            "target_layer_ids": aux,
            "target_hidden_size": root.whole("target_hidden_size", values["hidden_size"]),
            "num_target_layers": target_layers,
            "block_size": root.whole("block_size", 8),
            "sample_from_anchor": root.flag("sample_from_anchor", False),
            "mask_token_id": root.whole("mask_token_id"),
            "target_name": verifier.text("name_or_path", ""),
            "borrows_head": root.flag(BORROWED_HEAD, False),
            "notes": tuple(notes),
        }
    )


def _block_causality(nested: Fields) -> bool | None:
    if nested.raw.get("attention_sink_bias"):
        nested.problems.append("dflash_config.attention_sink_bias: attention sinks are not supported")
    return nested.flag("causal") if nested.has("causal") else None


def _specforge(root: Fields, _: int | None) -> dict[str, Any]:
    """SpecForge: DeepSpec's ids and layout, keys nested in ``dflash_config`` (a serving export: heads at the root)."""
    nested = root.child("dflash_config")
    values = read_transformer(root, window_from="query", causal=_block_causality(nested))
    heads = _head(nested if nested.has("markov_rank") else root)
    ids, layers = nested.ids("target_layer_ids"), root.optional_whole("num_target_layers")
    no_last_layer(root, ids, layers)
    return (
        values
        | heads
        | {
            "algorithm": "dspark",
            "draft_vocab_size": root.whole("draft_vocab_size", values["vocab_size"]),
            "target_layer_ids": ids,
            "target_hidden_size": root.whole("target_hidden_size", values["hidden_size"]),
            "num_target_layers": layers,
            "block_size": (root if root.has("block_size") else nested).whole("block_size"),
            "sample_from_anchor": root.flag("sample_from_anchor", True),
            "mask_token_id": (nested if nested.has("mask_token_id") else root).whole("mask_token_id"),
        }
    )


def _zlab(root: Fields, _: int | None) -> dict[str, Any]:
    """z-lab's DFlash: mask-only layout, embeddings and head are the target's, taps are Hugging Face hidden states."""
    nested = root.child("dflash_config")
    values = read_transformer(root, window_from="query", causal=_block_causality(nested))
    if values["family"] != "gemma4":
        values["embed_scale"] = None
    layers = root.whole("num_target_layers")
    notes = []
    if nested.has("target_layer_ids"):
        ids = nested.ids("target_layer_ids")
    elif root.has("target_layer_ids"):
        ids = root.ids("target_layer_ids")
    else:
        ids = default_zlab_layers(layers, len(values["layers"]))
        notes.append(f"target_layer_ids is absent: z-lab's default for {layers} layers, {list(ids)}")
    if not root.has("sample_from_anchor"):
        notes.append("sample_from_anchor is absent: mask-only, as every z-lab drafter")
    return values | {
        "algorithm": "dflash",
        "draft_vocab_size": values["vocab_size"],
        "target_layer_ids": ids,
        "target_hidden_size": values["hidden_size"],
        "num_target_layers": layers,
        "last_tap": "normed",
        "block_size": (root if root.has("block_size") else nested).whole("block_size"),
        "sample_from_anchor": root.flag("sample_from_anchor", False),
        "mask_token_id": (nested if nested.has("mask_token_id") else root).whole("mask_token_id"),
        "notes": tuple(notes),
    }


def default_zlab_layers(target_layers: int, draft_layers: int) -> tuple[int, ...]:
    """z-lab's taps where a file names none: evenly spread over layers 1..N-3, the middle one for a single layer."""
    if draft_layers <= 1:
        return (target_layers // 2,)
    span = target_layers - 4
    return tuple(round(1 + i * span / (draft_layers - 1)) for i in range(draft_layers))
