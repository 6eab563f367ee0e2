"""EAGLE-3 drafters for tests: golden ones on recorded features, and toys on the table target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.checkpoints import (
    Checkpoint,
    DrafterConfig,
    EagleConfig,
    LayerConfig,
    RopeConfig,
    make_checkpoint,
    random_tensors,
)
from dspark.config import build_config
from dspark.drafters.eagle3 import Eagle3Config, Eagle3Draft, build
from dspark.types import Committed
from tests.drafters.golden import ROOT, make_context, request, stub_target

VARIANTS = {
    "deepspec": EagleConfig(),
    "speculators": EagleConfig(norm_before_residual=True, norm_before_fc=True, norm_output=True),
}


def make_eagle(
    checkpoint: str | Path | Checkpoint, target: Any = None, *, dtype: Any = torch.float32, **config: Any
) -> Eagle3Draft:
    """Build a drafter as the engine does; a bare name is a golden case."""
    if isinstance(checkpoint, str) and (ROOT / checkpoint).is_dir():
        checkpoint = ROOT / checkpoint
    settings = build_config(Eagle3Config, {"checkpoint": checkpoint, **config})
    return build(settings, make_context(target if target is not None else stub_target(), dtype=dtype))


def commit_text(
    drafter: Eagle3Draft, ids: Sequence[int], taps: Tensor | None, *, start: int, slot: int = 0, generation: int = 1
) -> None:
    """All of ``ids`` but the last, the anchor, is cached; positions from ``start`` on have come in this step."""
    before = list(ids[: start + 1])
    view = request(before, slot=slot, generation=generation, num_cached=start)
    drafter.commit([Committed(view, -1, tuple(ids[start + 1 :]), 0, 0, len(ids) - 1, taps)])


def toy_eagle_checkpoint(
    variant: str = "deepspec", *, vocab: int = 3, gamma: int = 2, window: int | None = None, seed: int = 0,
    std: float = 0.6,
) -> Checkpoint:  # fmt: skip
    """A random EAGLE-3 drafter of ``vocab`` tokens."""
    config = DrafterConfig(
        source_format="deepspec",
        algorithm="eagle3",
        family="qwen3" if variant == "deepspec" else "llama",
        hidden_size=8,
        intermediate_size=12,
        num_heads=2,
        vocab_size=vocab,
        draft_vocab_size=vocab,
        layers=(LayerConfig(num_kv_heads=1, head_dim=4, window=window, causal=True, rope=RopeConfig(theta=100.0)),),
        target_layer_ids=(0, 1),
        target_hidden_size=vocab,
        block_size=gamma,
        sample_from_anchor=True,
        mask_token_id=-1,
        requires_embeddings=True,
        eagle=VARIANTS[variant],
    ).validate("toy")
    return make_checkpoint(config, random_tensors(config, seed=seed, std=std), source=f"toy-eagle3-{variant}")


def toy_eagle(variant: str = "deepspec", target: Any = None, **settings: Any) -> Eagle3Draft:
    """``toy_eagle_checkpoint`` as a drafter in float64."""
    return make_eagle(toy_eagle_checkpoint(variant, **settings), target, dtype=torch.float64)
