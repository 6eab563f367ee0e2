"""Which tensors a drafter of a given config has, and the check of a file against it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.checkpoints.schema import DrafterConfig, LayerConfig
from dspark.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape of a tensor, and whether a checkpoint must hold it."""

    shape: tuple[int, ...]
    required: bool = True


def expected_tensors(config: DrafterConfig) -> dict[str, TensorSpec]:
    """Every tensor that a checkpoint of this config may hold, by name."""
    c, d = config, config.hidden_size
    pruned = c.draft_vocab_size != c.vocab_size
    specs = {
        "fc.weight": TensorSpec((d, len(c.target_layer_ids) * c.target_hidden_size)),
        "norm.weight": TensorSpec((d,)),
        "embed_tokens.weight": TensorSpec((c.vocab_size, d), c.requires_embeddings),
        "lm_head.weight": TensorSpec((c.draft_vocab_size, d), c.requires_embeddings or (pruned and not c.borrows_head)),
    }
    if c.eagle is None:
        specs["hidden_norm.weight"] = TensorSpec((d,))
    elif c.eagle.norm_before_fc:
        specs["input_norm.weight"] = TensorSpec((len(c.target_layer_ids) * c.target_hidden_size,))
    if pruned:
        specs["d2t"] = TensorSpec((c.draft_vocab_size,))
        specs["t2d"] = TensorSpec((c.vocab_size,), required=False)
    for i, layer in enumerate(c.layers):
        specs.update({f"layers.{i}.{name}": TensorSpec(shape) for name, shape in _layer_tensors(c, layer)})
    specs.update({name: TensorSpec(shape) for name, shape in _head_tensors(c)})
    return specs


def _layer_tensors(c: DrafterConfig, layer: LayerConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    d, inner = c.hidden_size, c.intermediate_size
    q, kv = c.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    seen = d if c.eagle is None else 2 * d  # EAGLE-3's attention reads embedding and hidden state side by side
    projections = [("q", q, seen), ("k", kv, seen), ("o", d, q)]
    if not layer.k_eq_v:
        projections.insert(2, ("v", kv, seen))
    for name, rows, cols in projections:
        yield f"self_attn.{name}_proj.weight", (rows, cols)
        if c.attention_bias:
            yield f"self_attn.{name}_proj.bias", (rows,)
    for name, rows, cols in (("gate", inner, d), ("up", inner, d), ("down", d, inner)):
        yield f"mlp.{name}_proj.weight", (rows, cols)
        if c.mlp_bias:
            yield f"mlp.{name}_proj.bias", (rows,)
    yield "input_layernorm.weight", (d,)
    if c.eagle is not None:
        yield "hidden_norm.weight", (d,)
    yield "post_attention_layernorm.weight", (d,)
    if c.family != "llama":
        yield "self_attn.q_norm.weight", (layer.head_dim,)
        yield "self_attn.k_norm.weight", (layer.head_dim,)
    if c.family == "gemma4":
        yield "pre_feedforward_layernorm.weight", (d,)
        yield "post_feedforward_layernorm.weight", (d,)
        yield "layer_scalar", (1,)


def _head_tensors(c: DrafterConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    d, r = c.hidden_size, c.markov_rank
    if c.head != "none" and not c.plugin_head:
        yield "markov_head.markov_w1.weight", (c.vocab_size, r)
        yield "markov_head.markov_w2.weight", (c.draft_vocab_size, r)
    if c.head == "gated":
        yield "markov_head.gate_proj.weight", (r, d + r)
        yield "markov_head.gate_proj.bias", (r,)
    if c.head == "rnn":
        yield "markov_head.joint_proj.weight", (3 * r, 2 * r + d)
        yield "markov_head.joint_proj.bias", (3 * r,)
    if c.confidence:
        yield "confidence_head.proj.weight", (1, d + (r if c.confidence_with_markov else 0))
        yield "confidence_head.proj.bias", (1,)


def canonical_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names without the prefixes of old SpecForge files (``logit_head.``) and of wrapped models (``model.``)."""

    def plain(name: str) -> str:
        for prefix in ("model.", "logit_head."):
            name = name.removeprefix(prefix)
        return name

    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if plain(name) in out:
            raise CheckpointError(f"tensor {plain(name)!r} is stored twice, with and without a prefix")
        out[plain(name)] = tensor
    return out


def check_tensors(config: DrafterConfig, tensors: Mapping[str, Tensor], where: str) -> None:
    """Compare a file with what its config asks for.

    Raises:
        CheckpointError: one error listing every missing, unexpected and misshapen tensor, with the nearest name.
    """
    if any(name.startswith("mtp.") for name in tensors):
        raise CheckpointError(f"{where}: tensors mtp.*: DeepSeek-V4's own drafter layers are not supported")
    specs = expected_tensors(config)
    missing = [name for name, spec in specs.items() if spec.required and name not in tensors]
    free = "markov_head." if config.plugin_head else None  # a plugin's head names its own tensors
    extra = [name for name in tensors if name not in specs and not (free and name.startswith(free))]
    lines = [f"missing {name} {list(specs[name].shape)}{_closest(name, extra, 'the file has')}" for name in missing]
    lines += [f"unexpected {n} {list(tensors[n].shape)}{_closest(n, missing or list(specs), 'nearest')}" for n in extra]
    for name, spec in specs.items():
        if name in tensors and tuple(tensors[name].shape) != spec.shape:
            lines.append(f"misshapen {name}: expected {list(spec.shape)}, got {list(tensors[name].shape)}")
        elif name in tensors and name not in ("d2t", "t2d") and not tensors[name].is_floating_point():
            lines.append(f"{name}: expected a floating dtype, got {tensors[name].dtype} (no quantised drafters)")
    if lines:
        raise CheckpointError(f"{where}: {len(lines)} tensors do not fit the config:\n  " + "\n  ".join(lines))


def _closest(name: str, known: Sequence[str], word: str) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" ({word} {close[0]})" if close else ""


def token_map(config: DrafterConfig, tensors: Mapping[str, Tensor], where: str) -> Tensor | None:
    """Draft id -> target id, [Vd] int64, from the stored *offsets* ``d2t``; None where draft ids are target ids.

    Raises:
        CheckpointError: ids out of range or twice, or a ``t2d`` that disagrees.
    """
    offsets = tensors.get("d2t")
    if offsets is None:
        return None
    if offsets.is_floating_point() or offsets.dtype == torch.bool:
        raise CheckpointError(f"{where}: d2t: expected integers, got {offsets.dtype}")
    ids = torch.arange(len(offsets), device=offsets.device) + offsets.long()
    if int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size:
        hint = "; it looks like absolute ids, this format stores offsets" if _looks_absolute(offsets, config) else ""
        raise CheckpointError(
            f"{where}: d2t: maps to ids {int(ids.min())}..{int(ids.max())} of a vocabulary of {config.vocab_size}{hint}"
        )
    twice = len(ids) - len(set(ids.tolist()))
    if twice:
        hint = "; it looks like absolute ids, this format stores offsets" if _looks_absolute(offsets, config) else ""
        raise CheckpointError(f"{where}: d2t: {twice} target ids appear more than once{hint}")
    if "t2d" in tensors:
        kept = tensors["t2d"].bool().nonzero().flatten()
        if not torch.equal(kept, ids.sort().values):
            raise CheckpointError(
                f"{where}: t2d marks {len(kept)} target ids, and they are not the {len(ids)} that d2t maps to; the "
                "vocabulary maps belong to different checkpoints, or d2t holds absolute ids"
            )
    return ids


def _looks_absolute(offsets: Tensor, config: DrafterConfig) -> bool:
    values = offsets.long()
    inside = int(values.min()) >= 0 and int(values.max()) < config.vocab_size
    return inside and bool((values.diff() > 0).all())


def random_tensors(config: DrafterConfig, *, seed: int, std: float = 0.02) -> dict[str, Tensor]:
    """Seeded random float32 tensors of this config, for tests, benchmarks and the start of a training.

    Norm weights are ones, biases zeros, all else normal with ``std``; a pruned vocabulary keeps the lowest ids.
    """
    generator = torch.Generator().manual_seed(seed)
    out: dict[str, Tensor] = {}
    for name, spec in expected_tensors(config).items():
        if name == "d2t":
            out[name] = torch.zeros(spec.shape, dtype=torch.int64)
        elif name == "t2d":
            out[name] = torch.arange(config.vocab_size) < config.draft_vocab_size
        elif "norm" in name or name.endswith("layer_scalar"):
            out[name] = torch.ones(spec.shape)
        elif name.endswith(".bias"):
            out[name] = torch.zeros(spec.shape)
        else:
            out[name] = torch.empty(spec.shape).normal_(0.0, std, generator=generator)
    return out
