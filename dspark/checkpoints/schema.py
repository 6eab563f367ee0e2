"""The one description that every drafter checkpoint is read into, whatever format it came in.

Layer ids are DeepSpec's: id k is the raw output of the target's decoder layer k, -1 the output of its embedding.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dspark.errors import CheckpointError, nearest

FAMILIES = ("qwen3", "llama", "gemma4")
HEADS = ("none", "markov", "gated", "rnn")
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional")
ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "gelu")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of a layer, in transformers' terms.

    Attributes:
        theta: base wavelength.
        rope_type: one of ``ROPE_TYPES``.
        factor: scaling factor of ``linear``, ``llama3``, ``yarn`` and ``proportional``.
        partial: share of the head that ``proportional`` rotates; the rest gets frequency 0.
        original_max: positions of the pre-training, for ``llama3`` and ``yarn``.
        low_freq, high_freq: of ``llama3``.
        beta_fast, beta_slow, attention_factor, mscale, mscale_all_dim, truncate: of ``yarn``.
    """

    theta: float = 10_000.0
    rope_type: str = "default"
    factor: float = 1.0
    partial: float = 1.0
    original_max: int = 0
    low_freq: float = 1.0
    high_freq: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """Attention of one draft layer.

    Attributes:
        num_kv_heads, head_dim: shape of its keys and values.
        window: width of a sliding window over the context; None for full attention.
        causal: slot k of the block sees slots 0..k alone. Full layers of every format are bidirectional by default.
        window_from: where the window is measured from: ``anchor`` (context positions anchor-W..anchor-1 for every
            slot; speculators) or ``query`` (positions above query-W; SpecForge, z-lab, vLLM).
        k_eq_v: values are the un-normed key projection under a weightless norm (Gemma 4 full layers).
    """

    num_kv_heads: int
    head_dim: int
    window: int | None = None
    causal: bool = False
    window_from: str = "query"
    k_eq_v: bool = False
    rope: RopeConfig = field(default_factory=RopeConfig)


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """What is EAGLE-3's alone: one layer that reads [norm(embedding); norm(hidden)], a token a forward.

    Attributes:
        norm_before_residual: the residual is the normed hidden state; else the raw one.
        norm_before_fc: the concatenated taps are normed before ``fc``.
        norm_output: the hidden state that is fed back is the one behind the final norm; else the one before it.
    """

    norm_before_residual: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """A DSpark, DFlash or EAGLE-3 drafter.

    Attributes:
        source_format: ``deepspec``, ``speculators``, ``specforge`` or ``zlab``.
        algorithm: ``dspark``, ``dflash`` or ``eagle3``.
        family: style of its layers, one of ``FAMILIES``.
        hidden_size, intermediate_size, num_heads: d and the widths of its layers.
        vocab_size: rows of the embedding and of W1 (target ids, padding included).
        draft_vocab_size: rows of the output head and of W2; below ``vocab_size`` for a pruned vocabulary.
        layers: attention of each draft layer.
        target_layer_ids: taps in DeepSpec's numbering, increasing, -1 for the embedding.
        target_hidden_size: width of one tap.
        num_target_layers: decoder layers of the target, where the format says so.
        last_tap: what the last target layer's tap was in training: ``raw``, or ``normed`` where it was read from
            Hugging Face's ``hidden_states[L]``, which is behind the final norm.
        block_size: inputs of a trained block, the anchor included; for EAGLE-3 the steps that a round drafts.
        sample_from_anchor: True: slot k predicts the token at anchor + k + 1 and every slot drafts (DSpark).
            False: slot k predicts the token *at* anchor + k, slot 0 is unused (DFlash).
        mask_token_id: input id of the masks; -1 for EAGLE-3, which has none.
        head, markov_rank: sequential head, one of ``HEADS`` or a plugin's ``distribution/name``, and its rank r (0 for
            none).
        head_version, head_config: of a plugin's head: the version that it was trained with, and its own settings.
        confidence, confidence_with_markov: a linear confidence head, and whether it reads W1[x_{k-1}].
        requires_embeddings: its format stores embedding and head; else the target's are used where they are absent.
        borrows_head: of a pruned vocabulary: the head is not stored, the target's rows of the vocabulary map are it.
        eagle: EAGLE-3's norms; None for a block drafter.
        embed_scale: factor on input embeddings; None for whatever the target's own embedding module does.
        logit_softcap: cap of base logits, before the sequential bias.
        target_name: the target that it names.
        notes: defaults that were taken for absent keys, and other things to say.
    """

    source_format: str
    algorithm: str
    family: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    vocab_size: int
    draft_vocab_size: int
    layers: tuple[LayerConfig, ...]
    target_layer_ids: tuple[int, ...]
    target_hidden_size: int
    block_size: int
    sample_from_anchor: bool
    mask_token_id: int
    head: str = "none"
    markov_rank: int = 0
    head_version: str = ""
    head_config: Mapping[str, Any] = field(default_factory=dict, hash=False)
    confidence: bool = False
    confidence_with_markov: bool = False
    num_target_layers: int | None = None
    last_tap: str = "raw"
    requires_embeddings: bool = False
    borrows_head: bool = False
    eagle: EagleConfig | None = None
    embed_scale: float | None = 1.0
    logit_softcap: float | None = None
    rms_norm_eps: float = 1e-6
    activation: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    max_positions: int | None = None
    target_name: str = ""
    notes: tuple[str, ...] = ()

    @property
    def max_gamma(self) -> int:
        """Most tokens that a block drafts: the trained ones, less the unused slot of the mask-only layout. EAGLE-3 was
        trained on so many steps, and can go on."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def plugin_head(self) -> bool:
        """The sequential head is a plugin's; its tensors are ``markov_head.*``, of names and shapes of its own."""
        return "/" in self.head

    @property
    def layout(self) -> str:
        """``anchor-first``, ``mask-only`` or, for EAGLE-3, ``autoregressive``."""
        if self.eagle is not None:
            return "autoregressive"
        return "anchor-first" if self.sample_from_anchor else "mask-only"

    def problems(self) -> list[str]:
        """What is wrong with these values, in words; empty if nothing is."""
        found: list[str] = []

        def want(ok: bool, message: str) -> None:
            if not ok:
                found.append(message)

        for name in ("hidden_size", "intermediate_size", "num_heads", "vocab_size", "draft_vocab_size", "block_size"):
            want(getattr(self, name) >= 1, f"{name}: expected at least 1, got {getattr(self, name)}")
        want(bool(self.layers), "num_hidden_layers: a drafter needs at least one layer")
        want(self.max_gamma >= 1, f"block_size: {self.block_size} leaves nothing to draft in the {self.layout} layout")
        want(
            self.family in FAMILIES,
            f"model_type: layers of {self.family!r} are not supported (supported: {', '.join(FAMILIES)})"
            f"{nearest(self.family, FAMILIES)}",
        )
        want(
            self.head in HEADS or self.plugin_head,
            f"markov_head_type: unknown head {self.head!r}{nearest(self.head, HEADS)}",
        )
        want(
            self.activation in ACTIVATIONS,
            f"hidden_act: {self.activation!r} is not supported (supported: {', '.join(ACTIVATIONS)})",
        )
        want(
            0 <= self.mask_token_id < self.vocab_size or self.eagle is not None,
            f"mask_token_id: {self.mask_token_id} has no row in an embedding of {self.vocab_size} rows",
        )
        ranked = self.markov_rank > 0
        want(
            self.plugin_head or (self.head != "none") == ranked,
            f"markov_rank: {self.markov_rank} with head {self.head!r}",
        )
        want(
            not self.confidence_with_markov or self.markov_rank > 0,
            "confidence_head_with_markov: set, but there is no Markov head (markov_rank is 0)",
        )
        if self.eagle is not None:
            want(len(self.layers) == 1, f"num_hidden_layers: EAGLE-3 with {len(self.layers)} layers is not supported")
            want(self.family != "gemma4", "model_type: EAGLE-3 with Gemma 4's layers is not supported")
        found += self._tap_problems()
        for i, layer in enumerate(self.layers):
            want(
                layer.num_kv_heads >= 1 and self.num_heads % layer.num_kv_heads == 0,
                f"layer {i}: {self.num_heads} heads can't share {layer.num_kv_heads} key-value heads",
            )
            want(layer.head_dim >= 2 and layer.head_dim % 2 == 0, f"layer {i}: head_dim {layer.head_dim} is not even")
            want(layer.window is None or layer.window >= 1, f"layer {i}: sliding_window {layer.window}")
            want(
                layer.rope.rope_type in ROPE_TYPES,
                f"layer {i}: rope type {layer.rope.rope_type!r} is not supported (supported: {', '.join(ROPE_TYPES)})",
            )
        return found

    def _tap_problems(self) -> list[str]:
        ids, found = self.target_layer_ids, []
        if not ids:
            found.append("target_layer_ids: empty")
        if any(b <= a for a, b in itertools.pairwise(ids)):
            found.append(f"target_layer_ids: expected increasing ids, got {list(ids)}")
        if ids and ids[0] < -1:
            found.append(f"target_layer_ids: {ids[0]} is below -1 (the embedding)")
        if ids and self.num_target_layers is not None and max(ids) >= self.num_target_layers:
            found.append(
                f"target_layer_ids: {max(ids)} is not a layer of a target with {self.num_target_layers} layers "
                f"(0..{self.num_target_layers - 1})"
            )
        return found

    def validate(self, where: str) -> DrafterConfig:
        """Itself, or a CheckpointError that lists everything that is wrong."""
        found = self.problems()
        if found:
            raise CheckpointError(f"{where}: " + "; ".join(dict.fromkeys(found)))
        return self
