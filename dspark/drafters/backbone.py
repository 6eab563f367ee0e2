"""The parallel backbone of DSpark and DFlash (METHOD section 2, eqs. 2-3), batched over rows of unequal context.

H_ctx = RMSNorm(W_c [H(l_1); ..; H(l_m)]) for every committed position before the anchor; every layer attends to
[W_K H_ctx; W_K H_d]. Keys and values of the context are projected once and kept; those of the block go to the positions
behind them and are overwritten in the next round.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.checkpoints import DrafterConfig, LayerConfig
from dspark.drafters.block import block_positions, length_groups, reach, visible
from dspark.drafters.context import ContextCache
from dspark.drafters.layers import DraftLayer, rms_norm
from dspark.drafters.rope import RopeTable
from dspark.ops.packed import linear, pack
from dspark.types import IntArray


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows that one attention call takes, with the key range and the mask of each kind of layer."""

    rows: Tensor | None
    slots: IntArray
    spans: Mapping[LayerConfig, tuple[int, int, Tensor | None]]


class Backbone(nn.Module):
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
        super().__init__()
        self.config = config
        self.eps, self.softcap = config.rms_norm_eps, config.logit_softcap
        self.context_window = context_window

        def frozen(tensor: Tensor) -> nn.Parameter:
            return nn.Parameter(tensor, requires_grad=False)

        self.fc = frozen(tensors["fc.weight"])
        self.hidden_norm = frozen(tensors["hidden_norm.weight"])
        self.norm = frozen(tensors["norm.weight"])
        self.embedding, self.head = frozen(embedding), frozen(head)
        # In the weights' precision, as the reference multiplies by it.
        self.embed_scale = float(torch.tensor(embed_scale, dtype=self.fc.dtype))
        self.blocks = [DraftLayer(config, i, _layer_tensors(tensors, i)) for i in range(len(config.layers))]
        self.layers = nn.ModuleList(self.blocks)
        self._packed_head: Tensor | None = None
        device, dtype = self.fc.device, self.fc.dtype
        kinds = {(layer.rope, layer.head_dim) for layer in config.layers}
        self._ropes = {kind: RopeTable(*kind, device, dtype) for kind in kinds}
        shapes = [(layer.num_kv_heads, layer.head_dim) for layer in config.layers]
        self.cache = ContextCache(shapes, device, dtype, slots)

    def pack(self) -> None:
        """Keep packed copies of the weights, for small blocks on CPU; the memory of the weights doubles."""
        for layer in self.blocks:
            layer.pack()
        self._packed_head = pack(self.head)

    def canonical(self) -> dict[str, Tensor]:
        """Its tensors by canonical name, as a checkpoint stores them; embedding and head included."""
        out: dict[str, Tensor] = {
            "fc.weight": self.fc,
            "hidden_norm.weight": self.hidden_norm,
            "norm.weight": self.norm,
            "embed_tokens.weight": self.embedding,
            "lm_head.weight": self.head,
        }
        for i, layer in enumerate(self.blocks):
            out |= {f"layers.{i}.{name}": t for name, t in layer.canonical().items()}
        return out

    def scratch(self) -> Backbone:
        """The same weights over an empty cache, for a probe that must not disturb live slots."""
        twin = copy.copy(self)
        shapes = [(layer.num_kv_heads, layer.head_dim) for layer in self.config.layers]
        twin.cache = ContextCache(shapes, self.device, self.dtype)
        return twin

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return self.fc.device

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in."""
        return self.fc.dtype

    def reserve(self, slots: int, length: int) -> None:
        """Room for ``slots`` slots, and for positions 0..length-1."""
        self.cache.reserve(slots, length)
        for rope in self._ropes.values():
            rope.reserve(self.cache.capacity)

    def _turns(self, positions: Tensor) -> dict[LayerConfig, tuple[Tensor, Tensor]]:
        tables = {kind: rope.at(positions) for kind, rope in self._ropes.items()}
        return {layer: tables[layer.rope, layer.head_dim] for layer in self.config.layers}

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

    def _index(self, values: IntArray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(self.device)

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
        where = self._index(slots).repeat_interleave(size)
        np.maximum.at(self.cache.used, slots, anchors + size)
        groups, turns = self._groups(slots, anchors, size), self._turns(at)
        x = F.embedding(ids.flatten(), self.embedding)
        if self.embed_scale != 1.0:
            x = x * self.embed_scale
        for i, layer in enumerate(self.blocks):

            def attend(q: Tensor, k: Tensor, v: Tensor, i: int = i) -> Tensor:
                self.cache.write(i, where, at, k, v)
                return self._attend(i, q.view(rows, size, *q.shape[1:]), groups)

            x = layer(x, *turns[self.config.layers[i]], attend)
            if trace is not None:
                trace.append(x)
        return rms_norm(x, self.norm, self.eps).view(rows, size, -1)

    def _groups(self, slots: IntArray, anchors: IntArray, size: int) -> list[_Group]:
        parts = length_groups(anchors)
        out = []
        for rows in parts:
            own = anchors[rows]
            spans = {}
            for layer in set(self.config.layers):
                far = reach(layer, self.context_window)
                low = 0 if far is None else max(0, int(own.min()) - far)
                high = int(own.max()) + size
                mask: Tensor | None = None
                if far is not None or layer.causal or int(own.min()) != int(own.max()):
                    mask = visible(layer, self._index(own), size, low, high, self.context_window).unsqueeze(1)
                spans[layer] = (low, high, mask)
            out.append(_Group(None if len(parts) == 1 else self._index(rows), slots[rows], spans))
        return out

    def _attend(self, index: int, q: Tensor, groups: list[_Group]) -> Tensor:
        """q [R, size, heads, D] -> [R * size, heads * D]."""
        layer = self.blocks[index]
        if len(groups) == 1:
            return self._attend_group(index, layer, q, groups[0]).flatten(0, 1)
        out = torch.empty(q.shape[0], q.shape[1], q.shape[2] * q.shape[3], device=q.device, dtype=q.dtype)
        for group in groups:
            out[group.rows] = self._attend_group(index, layer, q[group.rows], group)
        return out.flatten(0, 1)

    def _attend_group(self, index: int, layer: DraftLayer, q: Tensor, group: _Group) -> Tensor:
        spec = self.config.layers[index]
        low, high, mask = group.spans[spec]
        keys, values = self.cache.read(index, group.slots, low, high)
        rows, size, heads, dim = q.shape
        fold = heads // spec.num_kv_heads
        # Query heads that share keys are folded into the query axis: no copy of the keys.
        split = q.view(rows, size, spec.num_kv_heads, fold, dim).permute(0, 2, 3, 1, 4)
        folded = split.reshape(rows, spec.num_kv_heads, fold * size, dim)
        if mask is not None and mask.shape[2] > 1:
            mask = mask.repeat(1, 1, fold, 1)
        y: Tensor = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=layer.scale)
        split = y.view(rows, spec.num_kv_heads, fold, size, dim).permute(0, 3, 1, 2, 4)
        return split.reshape(rows, size, heads * dim)

    def logits(self, hidden: Tensor) -> Tensor:
        """Base logits U [.., Vd] of hidden states [.., d], soft-capped where the model is, in float32 or better."""
        out = linear(hidden, self.head, None, self._packed_head)
        out = out if out.dtype == torch.float64 else out.float()
        return out if self.softcap is None else torch.tanh(out / self.softcap) * self.softcap


def _layer_tensors(tensors: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
    prefix = f"layers.{index}."
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
