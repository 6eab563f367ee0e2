"""The parallel backbone of DSpark and DFlash (METHOD section 2, eqs. 2-3), batched over rows of unequal context.

H_ctx = RMSNorm(W_c [H(l_1); ..; H(l_m)]) for every committed position before the anchor; every layer attends to
[W_K H_ctx; W_K H_d]. Keys and values of the context are projected once and kept; those of the block go to the positions
behind them and are overwritten in the next round.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from dspark.checkpoints import DrafterConfig
from dspark.drafters.block import block_positions
from dspark.drafters.cached import CachedLayers, frozen, layer_tensors
from dspark.drafters.layers import DraftLayer, rms_norm
from dspark.types import IntArray


class Backbone(CachedLayers):
    """Embedding, draft layers and output head over a context cache.

    Args:
        config: what the checkpoint is.
        tensors: its tensors by canonical name, on the right device and in the right dtype.
        embedding: input embeddings [rows, d], the drafter's own or the target's.
        head: output rows [Vd, d].
        embed_scale: factor on input embeddings.
        context_window: most context positions that a block may see; None for all.
        slots: slots of the cache to begin with.
    """

    def __init__(
        self,
        config: DrafterConfig,
        tensors: Mapping[str, Tensor],
        *,
        embedding: Tensor,
        head: Tensor,
        embed_scale: float = 1.0,
        context_window: int | None = None,
        slots: int = 1,
    ) -> None:
        super().__init__(
            config,
            [DraftLayer(config, i, layer_tensors(tensors, i)) for i in range(len(config.layers))],
            norm=tensors["norm.weight"],
            embedding=embedding,
            head=head,
            embed_scale=embed_scale,
            context_window=context_window,
            slots=slots,
        )
        self.fc = frozen(tensors["fc.weight"])
        self.hidden_norm = frozen(tensors["hidden_norm.weight"])

    def canonical(self) -> dict[str, Tensor]:
        """Its tensors by canonical name, as a checkpoint stores them; embedding and head included."""
        return {"fc.weight": self.fc, "hidden_norm.weight": self.hidden_norm, **super().canonical()}

    def project(self, taps: Tensor) -> Tensor:
        """H_ctx [n, d] of concatenated target features [n, m * d_t] (eq. 2)."""
        return rms_norm(F.linear(taps.to(self.dtype), self.fc), self.hidden_norm, self.eps)

    def remember(self, taps: Tensor, slots: IntArray, positions: IntArray) -> None:
        """Project features [n, m * d_t] and keep their keys and values at n (slot, absolute position) pairs."""
        if len(positions) == 0:
            return
        self.reserve(int(slots.max()) + 1, int(positions.max()) + 1)
        where, at = self._index(slots), self._index(positions)
        ctx, turns = self.project(taps), self._turns(at)
        for i, layer in enumerate(self.blocks):
            self.cache.write(i, where, at, *layer.context(ctx, *turns[self.config.layers[i]]))
        np.maximum.at(self.cache.used, slots, positions + 1)

    def forward(self, ids: Tensor, slots: IntArray, anchors: IntArray, trace: list[Tensor] | None = None) -> Tensor:
        """Hidden states behind the final norm, [R, size, d], of blocks ``ids`` [R, size].

        Args:
            slots: slot of each row, [R].
            anchors: absolute position of each row's anchor, [R]; its context is what the slot holds below it.
            trace: gets the output of every layer appended, [R * size, d].
        """
        rows, size = ids.shape
        self.reserve(int(slots.max()) + 1, int(anchors.max()) + size)
        at = block_positions(self._index(anchors), size).flatten()
        np.maximum.at(self.cache.used, slots, anchors + size)
        groups, turns = self.groups(slots, anchors, size), self._turns(at)
        x = self.embed(ids.flatten())
        for i, layer in enumerate(self.blocks):
            x = layer(x, *turns[self.config.layers[i]], self.attention(i, slots, at, size, groups))
            if trace is not None:
                trace.append(x)
        return rms_norm(x, self.norm, self.eps).view(rows, size, -1)
