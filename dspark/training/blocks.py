"""Anchors of a sequence, and the teacher-forced blocks that begin at them (METHOD section 5).

A block drafts the gamma tokens after its anchor, in both layouts: y_k = ids[anchor + 1 + k], k = 0..gamma-1. The token
before y_k is the true one (the anchor for k = 0), and the target's law of y_k stands at position anchor + k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.training.samples import Sample
from dspark.types import BoolArray, FloatArray, IntArray


def candidates(loss_mask: BoolArray) -> IntArray:
    """Positions that may be an anchor: it and the token after it are the assistant's."""
    return np.flatnonzero(loss_mask[:-1] & loss_mask[1:]).astype(np.int64)


def sample_anchors(loss_mask: BoolArray, count: int, keys: FloatArray) -> IntArray:
    """Up to ``count`` anchors, without repeats, in rising order.

    Args:
        loss_mask: [S].
        keys: a random number for each position but the last, [S - 1]; the candidates with the smallest are taken.
    """
    found = candidates(loss_mask)
    order = np.argsort(keys[found], kind="stable")[:count]
    return np.sort(found[order])


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of several sequences that are packed one after the other; A blocks, gamma drafts each.

    Attributes:
        starts: first packed row of each sequence, and the end, [n + 1].
        counts: blocks of each sequence, [n]; blocks are in the order of their sequences.
        anchors: position of each anchor in its sequence, [A].
        anchor_ids: its token, [A].
        prev: the token before each label, [A, gamma].
        labels: y, [A, gamma]; 0 beyond the sequence.
        valid: labels that count: inside the sequence and the assistant's, and all earlier ones of the block too.
        teacher: packed row of the target's law of each label, [A, gamma]; row 0 where not valid.
    """

    starts: IntArray
    counts: IntArray
    anchors: IntArray
    anchor_ids: Tensor
    prev: Tensor
    labels: Tensor
    valid: Tensor
    teacher: Tensor

    def __len__(self) -> int:
        return len(self.anchors)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return [int(n) for n in np.diff(self.starts)]


def make_blocks(samples: Sequence[Sample], anchors: Sequence[IntArray], gamma: int) -> Blocks:
    """Blocks of packed samples at given anchors."""
    starts = np.cumsum([0, *map(len, samples)]).astype(np.int64)
    prev, labels, valid, teacher = [], [], [], []
    for sample, at, start in zip(samples, anchors, starts, strict=False):
        where = at[:, None] + 1 + np.arange(gamma)
        inside = where < len(sample)
        safe = np.where(inside, where, 0)
        ok = np.logical_and.accumulate(inside & sample.loss_mask[safe], axis=1)
        y = np.where(inside, sample.ids[safe], 0)
        labels.append(y)
        prev.append(np.concatenate([sample.ids[at][:, None], y[:, :-1]], axis=1))
        valid.append(ok)
        teacher.append(np.where(ok, start + where - 1, start))

    def packed(parts: list[Any]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)) if parts else torch.zeros(0, gamma, dtype=torch.int64)

    ids = [s.ids[a] for s, a in zip(samples, anchors, strict=True)]
    return Blocks(
        starts=starts,
        counts=np.array([len(a) for a in anchors], dtype=np.int64),
        anchors=np.concatenate(anchors) if anchors else np.zeros(0, dtype=np.int64),
        anchor_ids=torch.from_numpy(np.concatenate(ids)) if ids else torch.zeros(0, dtype=torch.int64),
        prev=packed(prev),
        labels=packed(labels),
        valid=packed(valid),
        teacher=packed(teacher),
    )
