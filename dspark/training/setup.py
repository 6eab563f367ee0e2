"""A drafter for a target: its description, its module, and the checkpoint that it ends as."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dspark.checkpoints import Checkpoint, DrafterConfig, EagleConfig, make_checkpoint
from dspark.checkpoints.fields import Fields
from dspark.checkpoints.formats import default_zlab_layers
from dspark.checkpoints.transformer import read_transformer
from dspark.checkpoints.write import vocabulary_maps
from dspark.errors import ConfigError
from dspark.plugins.catalog import Catalog
from dspark.plugins.kinds import Kind
from dspark.protocols import BuildContext
from dspark.training.config import DrafterSettings
from dspark.training.eagle3 import TrainableEagle3
from dspark.training.model import TrainableDrafter
from dspark.types import IntArray

BUILT_IN_HEADS = ("none", "markov", "gated", "rnn")


def tap_layers(settings: DrafterSettings, layers: int) -> tuple[int, ...]:
    """The taps that were asked for, or evenly spread ones of a target with ``layers`` layers, the last not among them.

    Raises:
        ConfigError: not rising, or no layers of the target.
    """
    if settings.taps is not None:
        taps = tuple(settings.taps)
    elif settings.num_taps == 1 or layers < 5:
        taps = (layers // 2,) if settings.num_taps == 1 else tuple(range(max(layers - 1, 1)))[-settings.num_taps :]
    else:
        taps = tuple(sorted(set(default_zlab_layers(layers, settings.num_taps))))
    if not taps or any(b <= a for a, b in itertools.pairwise(taps)) or taps[0] < -1 or taps[-1] >= layers:
        raise ConfigError(f"drafter.taps: expected rising layers from -1 to {layers - 1}, got {list(taps)}")
    return taps


def mask_token(settings: DrafterSettings, tokenizer: Any, seen: IntArray) -> int:
    """The input id of masks: what was asked for, or the last special token that the data does not use.

    Args:
        seen: how often each token occurs in the data, [V].

    Raises:
        ConfigError: there is none to take.
    """
    if settings.mask_token_id is not None:
        return settings.mask_token_id
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    free = [int(i) for i in added if int(i) < len(seen) and seen[int(i)] == 0]
    if not free:
        raise ConfigError("drafter.mask_token_id: set it; the tokenizer has no special token that the data never uses")
    return max(free)


def new_config(
    settings: DrafterSettings, target: Any, draft_vocab_size: int | None, mask: int, catalog: Catalog
) -> DrafterConfig:
    """The description of a new drafter, in the target's own shape.

    Raises:
        ConfigError: the target's config does not say what a draft layer needs.
    """
    raw = dict(target.model.config.get_text_config().to_dict())
    family = settings.family
    if family == "auto":
        family = "llama" if settings.init == "target" and not _has_qk_norm(target) else "qwen3"
    eagle = settings.algorithm == "eagle3"
    layers = 1 if eagle else settings.layers
    kind = "sliding_attention" if settings.window else "full_attention"
    raw |= {
        "model_type": family,
        "num_hidden_layers": layers,
        "layer_types": [kind] * layers,
        "sliding_window": settings.window,
        "intermediate_size": settings.intermediate_size or raw.get("intermediate_size"),
    }
    fields = Fields(raw, "target config")
    values = read_transformer(fields, window_from="query" if eagle else "anchor", causal=eagle)
    if fields.problems:
        raise ConfigError("a drafter in the target's shape: " + "; ".join(fields.problems))
    embedding = target.input_embeddings.weight
    values |= {
        "source_format": "speculators",
        "vocab_size": len(embedding),
        "draft_vocab_size": draft_vocab_size or len(embedding),
        "target_layer_ids": tap_layers(settings, target.num_layers),
        "target_hidden_size": embedding.shape[1],
        "num_target_layers": target.num_layers,
        "target_name": target.name,
        **(_eagle_values(settings) if eagle else _block_values(settings, mask, catalog)),
    }
    return DrafterConfig(**values).validate("drafter")


def _block_values(settings: DrafterSettings, mask: int, catalog: Catalog) -> dict[str, Any]:
    head = settings.head
    anchor_first = settings.layout == "anchor-first"
    values: dict[str, Any] = {
        "algorithm": "dspark" if head != "none" or settings.confidence else "dflash",
        "block_size": settings.gamma if anchor_first else settings.gamma + 1,
        "sample_from_anchor": anchor_first,
        "mask_token_id": mask,
        "head": head,
        "markov_rank": settings.rank if head != "none" else 0,
        "confidence": settings.confidence,
        "confidence_with_markov": settings.confidence and head != "none" and settings.confidence_with_markov,
    }
    if head not in BUILT_IN_HEADS:
        registration = catalog.resolve(Kind.SEQUENTIAL_HEAD, head)
        values |= {
            "head": registration.key,
            "head_version": registration.version,
            "head_config": dict(settings.head_config),
            "confidence_with_markov": False,
        }
    return values


def _eagle_values(settings: DrafterSettings) -> dict[str, Any]:
    return {
        "algorithm": "eagle3",
        "eagle": EagleConfig(),
        "block_size": settings.gamma,
        "sample_from_anchor": True,
        "mask_token_id": -1,
    }


def _has_qk_norm(target: Any) -> bool:
    return any(name.endswith("self_attn.q_norm.weight") for name, _ in target.model.named_parameters())


def build_head(config: DrafterConfig, tensors: Mapping[str, Tensor], catalog: Catalog) -> Any:
    """The sequential head, as the catalog builds it.

    Raises:
        PluginError: nobody offers it, or it can't be built.
        ConfigError: it can't be trained.
    """
    prefix = "markov_head."
    weights = {n.removeprefix(prefix): t.clone() for n, t in tensors.items() if n.startswith(prefix)}
    values: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "rank": config.markov_rank,
        **({"weights": weights} if weights else {}),
        **config.head_config,
    }
    place = next(iter(tensors.values())).device
    context = BuildContext(vocab_size=config.vocab_size, gamma=config.max_gamma, device=place, dtype=torch.float32)
    head = catalog.build(Kind.SEQUENTIAL_HEAD, config.head, values, context)
    trains = isinstance(head, torch.nn.Module) and callable(getattr(head, "canonical", None))
    if not trains and not getattr(head, "silent", False):
        raise ConfigError(
            f"drafter.head: {config.head!r} can't be trained: it has to be a torch.nn.Module with canonical(), which "
            "gives its tensors by name"
        )
    return head


def build_drafter(
    config: DrafterConfig,
    tensors: Mapping[str, Tensor],
    *,
    embedding: Tensor,
    head: Tensor,
    catalog: Catalog,
    embed_scale: float = 1.0,
) -> TrainableDrafter | TrainableEagle3:
    """The module to be trained, in float32, with the target's embedding [V, d] and head rows [Vd, d] as they are."""
    owned = {n: t.to(device=embedding.device, dtype=torch.float32, copy=True) for n, t in tensors.items()}
    if config.eagle is not None:
        return TrainableEagle3(config, owned, embedding=embedding, head=head, embed_scale=embed_scale)
    sequential = build_head(config, owned, catalog)
    return TrainableDrafter(
        config, owned, embedding=embedding, head=head, sequential=sequential, embed_scale=embed_scale
    )


def to_checkpoint(
    drafter: TrainableDrafter | TrainableEagle3, token_map: Tensor | None, dtype: torch.dtype
) -> Checkpoint:
    """The drafter as a checkpoint: the embedding is left to the target, the head too where the vocabulary is whole."""
    config = dataclasses.replace(drafter.config, requires_embeddings=False)
    tensors = {n: t.detach().cpu().to(dtype) for n, t in drafter.canonical().items() if n != "embed_tokens.weight"}
    if token_map is None:
        del tensors["lm_head.weight"]
    else:
        tensors |= vocabulary_maps(token_map, config.vocab_size)
    return make_checkpoint(config, tensors, source=f"the drafter for {config.target_name}")
