"""EAGLE-3 in DeepSpec's and speculators' config.json, and what their readers share with the block drafters'."""

from __future__ import annotations

from typing import Any

from dspark.checkpoints.fields import Fields
from dspark.checkpoints.schema import EagleConfig
from dspark.checkpoints.transformer import read_transformer


def no_last_layer(root: Fields, ids: tuple[int, ...], layers: int | None) -> None:
    """Hugging Face returns the last hidden state behind the final norm, hooks before it: DeepSpec forbids it."""
    if ids and layers and max(ids) == layers - 1:
        root.problems.append(
            f"target_layer_ids: {max(ids)} is the target's last layer, whose hidden state is normed in some of the "
            "tools that write this format and raw in others; it is not allowed here"
        )


def speculators_taps(root: Fields, key: str, target_layers: int | None, notes: list[str]) -> tuple[int, ...]:
    """Taps in DeepSpec's numbering. speculators' id k is the state after k layers, DeepSpec's k - 1."""
    if root.has(key) or target_layers is None:
        return tuple(k - 1 for k in root.ids(key))
    aux = sorted({2, target_layers // 2, target_layers - 3})
    notes.append(f"{key} is absent: the default for {target_layers} layers, {aux}")
    return tuple(k - 1 for k in aux)


def deepspec_eagle3(root: Fields) -> dict[str, Any]:
    """DeepSpec: the hidden state is added and fed back as it is, before any norm."""
    values = read_transformer(root, window_from="query", causal=True)
    layers, ids = root.whole("num_target_layers"), root.ids("target_layer_ids")
    no_last_layer(root, ids, layers)
    return values | {
        "algorithm": "eagle3",
        "eagle": EagleConfig(),
        "draft_vocab_size": values["vocab_size"],
        "target_layer_ids": ids,
        "target_hidden_size": root.whole("target_hidden_size", values["hidden_size"]),
        "num_target_layers": layers,
        "block_size": root.whole("ttt_length"),
        "sample_from_anchor": True,
        "mask_token_id": -1,
        "requires_embeddings": True,
        "target_name": root.text("target_model_name_or_path", ""),
    }


def speculators_eagle3(root: Fields, target_layers: int | None) -> dict[str, Any]:
    """speculators: the norms are keys; a round drafts what its proposal method says."""
    transformer = root.child("transformer_layer_config")
    if not transformer.raw:
        root.problems.append("transformer_layer_config: missing")
    values = read_transformer(transformer, window_from="query", causal=True)
    if root.flag("fc_norm", False):
        root.problems.append("fc_norm: norms of single taps are not supported")
    notes: list[str] = []
    taps = speculators_taps(root, "eagle_aux_hidden_state_layer_ids", target_layers, notes)
    config = root.child("speculators_config")
    methods = config.raw.get("proposal_methods")
    proposal = Fields(methods[0] if isinstance(methods, list) and methods else {}, "proposal_methods[0]", root.problems)
    return values | {
        "algorithm": "eagle3",
        "eagle": EagleConfig(
            norm_before_residual=root.flag("norm_before_residual", False),
            norm_before_fc=root.flag("norm_before_fc", False),
            norm_output=root.flag("norm_output", False),
        ),
        "draft_vocab_size": root.whole("draft_vocab_size", 32_000),
        "target_layer_ids": taps,
        "target_hidden_size": root.whole("target_hidden_size", values["hidden_size"]),
        "num_target_layers": target_layers,
        "block_size": proposal.whole("speculative_tokens", 3),
        "sample_from_anchor": True,
        "mask_token_id": -1,
        "target_name": config.child("verifier").text("name_or_path", ""),
        "notes": tuple(notes),
    }
