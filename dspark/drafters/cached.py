"""What every drafter network shares: embedding, layers over keys and values kept by slot, output head."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.checkpoints import DrafterConfig, LayerConfig
from dspark.drafters.block import length_groups, reach, visible
from dspark.drafters.context import ContextCache
from dspark.drafters.layers import Attend, DraftLayer
from dspark.drafters.rope import RopeTable
from dspark.ops.packed import linear, pack
from dspark.types import IntArray


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that one attention call takes, with the key range and the mask of each kind of layer."""

    rows: Tensor | None
    slots: IntArray
    spans: Mapping[LayerConfig, tuple[int, int, Tensor | None]]


class CachedLayers(nn.Module):
    """Embedding, draft layers and output head over a cache, for rows of unequal context in one call.

    Args:
        config: what the checkpoint is.
        layers: its layers.
        norm: weight of the norm in front of the head, [d].
        embedding: input embeddings [rows, d], the drafter's own or the target's.
        head: output rows [Vd, d].
        embed_scale: factor on input embeddings.
        context_window: most context positions that a row may see; None for all.
        slots: slots of the cache to begin with.
    """

    def __init__(
        self,
        config: DrafterConfig,
        layers: Sequence[DraftLayer],
        *,
        norm: Tensor,
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
        self.norm, self.embedding, self.head = frozen(norm), frozen(embedding), frozen(head)
        # In the weights' precision, as the reference multiplies by it.
        self.embed_scale = float(torch.tensor(embed_scale, dtype=norm.dtype))
        self.blocks = list(layers)
        self.layers = nn.ModuleList(self.blocks)
        self._packed_head: Tensor | None = None
        kinds = {(layer.rope, layer.head_dim) for layer in config.layers}
        self._ropes = {kind: RopeTable(*kind, norm.device, norm.dtype) for kind in kinds}
        self.cache = self._new_cache(slots)

    def _new_cache(self, slots: int = 1) -> ContextCache:
        shapes = [(layer.num_kv_heads, layer.head_dim) for layer in self.config.layers]
        return ContextCache(shapes, self.device, self.dtype, slots)

    def pack(self) -> None:
        """Keep packed copies of the weights, for small blocks on CPU; the memory of the weights doubles."""
        for layer in self.blocks:
            layer.pack()
        self._packed_head = pack(self.head)

    def canonical(self) -> dict[str, Tensor]:
        """Its tensors by canonical name, as a checkpoint stores them; embedding and head included."""
        out: dict[str, Tensor] = {
            "norm.weight": self.norm,
            "embed_tokens.weight": self.embedding,
            "lm_head.weight": self.head,
        }
        for i, layer in enumerate(self.blocks):
            out |= {f"layers.{i}.{name}": t for name, t in layer.canonical().items()}
        return out

    def scratch(self) -> Self:
        """The same weights over an empty cache, for a probe that must not disturb live slots."""
        twin = copy.copy(self)
        twin.cache = self._new_cache()
        return twin

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return self.norm.device

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in."""
        return self.norm.dtype

    def reserve(self, slots: int, length: int) -> None:
        """Room for ``slots`` slots, and for positions 0..length-1."""
        self.cache.reserve(slots, length)
        for rope in self._ropes.values():
            rope.reserve(self.cache.capacity)

    def embed(self, ids: Tensor) -> Tensor:
        """Scaled input embeddings [.., d] of ids [..]."""
        x = F.embedding(ids, self.embedding)
        return x if self.embed_scale == 1.0 else x * self.embed_scale

    def logits(self, hidden: Tensor) -> Tensor:
        """Base logits U [.., Vd] of hidden states [.., d], soft-capped where the model is, in float32 or better."""
        out = linear(hidden, self.head, None, self._packed_head)
        out = out if out.dtype == torch.float64 else out.float()
        return out if self.softcap is None else torch.tanh(out / self.softcap) * self.softcap

    def _turns(self, positions: Tensor) -> dict[LayerConfig, tuple[Tensor, Tensor]]:
        tables = {kind: rope.at(positions) for kind, rope in self._ropes.items()}
        return {layer: tables[layer.rope, layer.head_dim] for layer in self.config.layers}

    def _index(self, values: IntArray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(self.device)

    def attention(self, index: int, slots: IntArray, at: Tensor, size: int, groups: Sequence[Group]) -> Attend:
        """What layer ``index`` attends with: it keeps keys and values at positions ``at`` [R * size], then looks."""
        where = self._index(slots).repeat_interleave(size)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.cache.write(index, where, at, k, v)
            return self._attend(index, q.view(len(slots), size, *q.shape[1:]), groups)

        return attend

    def groups(self, slots: IntArray, anchors: IntArray, size: int) -> list[Group]:
        """Rows of similar context, for blocks of ``size`` from ``anchors`` [R] on."""
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
                if far is not None or (layer.causal and size > 1) or int(own.min()) != int(own.max()):
                    mask = visible(layer, self._index(own), size, low, high, self.context_window).unsqueeze(1)
                spans[layer] = (low, high, mask)
            out.append(Group(None if len(parts) == 1 else self._index(rows), slots[rows], spans))
        return out

    def _attend(self, index: int, q: Tensor, groups: Sequence[Group]) -> Tensor:
        """q [R, size, heads, D] -> [R * size, heads * D]."""
        layer = self.blocks[index]
        if len(groups) == 1:
            return self._attend_group(index, layer, q, groups[0]).flatten(0, 1)
        out = torch.empty(q.shape[0], q.shape[1], q.shape[2] * q.shape[3], device=q.device, dtype=q.dtype)
        for group in groups:
            out[group.rows] = self._attend_group(index, layer, q[group.rows], group)
        return out.flatten(0, 1)

    def _attend_group(self, index: int, layer: DraftLayer, q: Tensor, group: Group) -> Tensor:
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


def frozen(tensor: Tensor) -> nn.Parameter:
    """A parameter without a gradient."""
    return nn.Parameter(tensor, requires_grad=False)


def layer_tensors(tensors: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
    """Tensors of layer ``index``, without ``layers.N.``."""
    prefix = f"layers.{index}."
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
