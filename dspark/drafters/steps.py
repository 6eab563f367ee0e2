"""Drafting a token a forward: the rows of a batch that draft, and their way through the sampler."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dspark.protocols import DraftSampler
from dspark.types import BatchView, BoolArray, IntArray


class StepRows:
    """The rows that draft, L of R.

    A row drafts at most what may be verified of it (``max_draft``), and all take as many steps as the longest asks.
    Both are known before anything is drawn.

    Args:
        batch: rows of the round.
        ready: rows that can draft at all, [R].

    Attributes:
        lens: what each row drafts, [R].
        steps: forwards to take.
        requests: the L rows.
        slots, anchors: their slots and the positions of their anchors, [L].
    """

    def __init__(self, batch: BatchView, ready: BoolArray) -> None:
        room = np.array([min(batch.gamma, r.max_draft) for r in batch.requests], dtype=np.int64)
        self.lens: IntArray = np.where(ready, room, 0).astype(np.int64)
        self.steps = int(self.lens.max(initial=0))
        self._rows, self._gamma = len(batch), batch.gamma
        self._live = np.flatnonzero(self.lens)
        self.requests = tuple(batch.requests[i] for i in self._live)
        self.slots: IntArray = np.array([r.slot for r in self.requests], dtype=np.int64)
        self.anchors: IntArray = np.array([r.anchor_position for r in self.requests], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.requests)

    def sample(self, sampler: DraftSampler, logits: Tensor, offset: int, token_map: Tensor | None = None) -> Tensor:
        """x_{offset+1} [L] from logits [L, Vd], which are handed over."""
        if len(self) == self._rows:
            return sampler.sample(logits, offset, token_map, reuse=True)
        at = self._at(logits)
        wide = logits.new_zeros(self._rows, logits.shape[1])  # what is drawn for the other rows is not looked at
        wide[at] = logits
        return sampler.sample(wide, offset, token_map, reuse=True)[at]

    def widen(self, values: list[Tensor]) -> Tensor:
        """One tensor [L, d] a step -> [R, gamma, d], zeros where nothing was drafted."""
        out = values[0].new_zeros(self._rows, self._gamma, values[0].shape[1])
        out[self._at(out), : len(values)] = torch.stack(values, dim=1)
        return out

    def _at(self, like: Tensor) -> Tensor:
        return torch.from_numpy(self._live).to(like.device)
