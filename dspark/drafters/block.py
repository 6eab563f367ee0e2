"""A drafted block: its inputs, its positions, and what each of its slots may see. Both layouts are decided here.

Anchor-first (DSpark): inputs are the anchor and gamma - 1 masks; slot k predicts the token at anchor + k + 1.
Mask-only (DFlash): the anchor and gamma masks; slot k predicts the token at anchor + k, and slot 0 is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dspark.checkpoints import LayerConfig
from dspark.types import IntArray

GROUP_WASTE = 2
"""Rows are attended together while the longest context is at most this many times the shortest."""
GROUP_FREE = 256
"""Contexts up to here are attended together whatever their lengths."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a block is laid out.

    Attributes:
        sample_from_anchor: True for anchor-first, False for mask-only.
        mask_token_id: input id of the masks.
    """

    sample_from_anchor: bool
    mask_token_id: int

    @property
    def skip(self) -> int:
        """Leading slots that predict nothing."""
        return 0 if self.sample_from_anchor else 1

    def size(self, gamma: int) -> int:
        """Inputs of a block that drafts ``gamma`` tokens."""
        return gamma + self.skip

    def inputs(self, anchors: Tensor, gamma: int) -> Tensor:
        """Input ids [R, size] from anchors [R]."""
        ids = anchors.new_full((len(anchors), self.size(gamma)), self.mask_token_id)
        ids[:, 0] = anchors
        return ids


def block_positions(anchors: Tensor, size: int) -> Tensor:
    """Absolute positions [R, size] of a block: slot k stands at anchor + k, in both layouts."""
    return anchors.unsqueeze(1) + torch.arange(size, device=anchors.device)


def visible(layer: LayerConfig, anchors: Tensor, size: int, low: int, high: int, window: int | None) -> Tensor:
    """What each slot attends to, bool [R, size or 1, high - low] over absolute key positions low..high-1.

    Keys below a row's anchor are context, keys anchor..anchor+size-1 the block itself. The anchor's own *feature* is
    never there: its position holds the block's first slot.

    Args:
        layer: window and causality.
        anchors: absolute positions of the anchors, [R].
        window: most context positions that any layer may see; None for all.
    """
    kv = torch.arange(low, high, device=anchors.device)
    start = anchors[:, None, None]
    seen = kv < start + size
    if layer.causal or (layer.window is not None and layer.window_from == "query"):
        query = start + torch.arange(size, device=anchors.device)[:, None]
        if layer.causal:
            seen = seen & (kv <= query)
        if layer.window is not None and layer.window_from == "query":
            seen = seen & (kv > query - layer.window)
    if layer.window is not None and layer.window_from == "anchor":
        seen = seen & (kv >= start - layer.window)
    if window is not None:
        seen = seen & (kv >= start - window)
    return seen


def reach(layer: LayerConfig, window: int | None) -> int | None:
    """Most context positions below the anchor that a slot of this layer can see; None for all."""
    limits = [w for w in (layer.window, window) if w is not None]
    return min(limits) if limits else None


def length_groups(anchors: IntArray) -> list[IntArray]:
    """Rows that are attended together, so that padding stays within ``GROUP_WASTE``; each group's rows rise."""
    if len(anchors) == 0:
        return []
    if int(anchors.max()) <= max(GROUP_FREE, GROUP_WASTE * int(anchors.min())):
        return [np.arange(len(anchors))]
    order = np.argsort(anchors, kind="stable")
    groups: list[IntArray] = []
    first = 0
    for i in range(1, len(order) + 1):
        longest = max(GROUP_FREE, GROUP_WASTE * int(anchors[order[first]]))
        if i == len(order) or int(anchors[order[i]]) > longest:
            groups.append(np.sort(order[first:i]))
            first = i
    return groups
