"""Teacher-forced blocks: what a drafter predicts along a given text, from its own tokens (METHOD section 5)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.drafters.backbone import Backbone
from dspark.drafters.block import Layout
from dspark.types import IntArray


def forced_block(
    backbone: Backbone, head: Any, layout: Layout, ids: Tensor, taps: Tensor, anchors: IntArray, gamma: int
) -> Tensor:
    """Corrected draft logits [A, gamma, Vd] of blocks behind ``anchors`` [A], all in one batch.

    Position k of a block reads the text's own x_{k-1}, the anchor for k = 1.

    Args:
        backbone: its live slots are not touched.
        head: the sequential head.
        layout: of the block.
        ids: the text, [n]; every anchor has gamma - 1 tokens behind it.
        taps: target features of positions 0.., as the backbone reads them, [>= largest anchor, m * d_t].
    """
    backbone = backbone.scratch()
    owners = np.concatenate([np.full(a, row, dtype=np.int64) for row, a in enumerate(anchors)])
    places = np.concatenate([np.arange(a, dtype=np.int64) for a in anchors])
    backbone.remember(taps[torch.from_numpy(places).to(taps.device)], owners, places)
    ids = ids.to(backbone.device)
    at = torch.from_numpy(np.ascontiguousarray(anchors, dtype=np.int64)).to(ids.device)
    hidden = backbone(layout.inputs(ids[at], gamma), np.arange(len(anchors)), anchors)[:, layout.skip :]
    prev = ids[at[:, None] + torch.arange(gamma, device=ids.device)]
    logits: Tensor = backbone.logits(hidden) + head.block(prev, hidden)
    return logits
