"""Golden training forwards: recorded batches as packed samples, and golden checkpoints as trainable drafters."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.checkpoints import load_checkpoint
from dspark.training.blocks import Blocks, make_blocks
from dspark.training.model import TrainableDrafter
from dspark.training.samples import Sample
from dspark.training.setup import build_drafter
from tests.drafters.golden import ROOT, io, stub_target

__all__ = ["ROOT", "catalog", "io", "packed_blocks", "samples_of", "trainable"]


def catalog() -> Any:
    from dspark.plugins.manager import PluginManager

    return PluginManager(discover=False).load()


def trainable(case: str) -> TrainableDrafter:
    """A golden checkpoint, ready to be trained in float32."""
    checkpoint = load_checkpoint(ROOT / case, target_layers=6)
    stub = stub_target()
    tensors = dict(checkpoint.tensors)
    embedding = tensors.pop("embed_tokens.weight", stub.input_embeddings.weight)
    head = tensors.pop("lm_head.weight", None)
    if head is None:
        head = stub.lm_head.weight
    scale = checkpoint.config.embed_scale
    return build_drafter(
        checkpoint.config,
        tensors,
        embedding=embedding,
        head=head,
        catalog=catalog(),
        embed_scale=1.0 if scale is None else scale,
    )


def samples_of(data: dict[str, Tensor]) -> list[Sample]:
    """The rows of a recorded batch."""
    ids, mask = data["train.input_ids"].numpy(), data["train.loss_mask"].bool().numpy()
    return [Sample(ids[i].astype(np.int64), mask[i], index=i, line=i) for i in range(len(ids))]


def packed_blocks(data: dict[str, Tensor], gamma: int) -> Blocks:
    """Blocks at the anchors that the recording kept."""
    keep = data["train.block_keep_mask"]
    anchors = [at[k].numpy() for at, k in zip(data["train.anchor_positions"], keep, strict=True)]
    return make_blocks(samples_of(data), anchors, gamma)


def kept(tensor: Tensor, data: dict[str, Tensor]) -> Tensor:
    """Kept blocks of a recorded [batch, blocks, ..] tensor, in packed order."""
    return tensor[data["train.block_keep_mask"]]


def packed(tensor: Tensor) -> Tensor:
    """[batch, S, d] -> [batch * S, d]."""
    return torch.flatten(tensor, 0, 1)
