"""Attention of a packed forward over a slot cache, as transformers calls it.

``SlotContext`` plans one forward; every attention layer then writes its keys and values into the cache and attends
group by group. The context reaches the layers as a keyword argument of ``model(...)``: there is no global state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.errors import TargetError
from dspark.ops.packed import matrix_tiles
from dspark.targets.cache import LayerSpec, SlotCache
from dspark.targets.flex import FlexMasks
from dspark.targets.groups import GroupState, attend_group, fuses
from dspark.targets.plan import AttentionCost, plan_groups
from dspark.types import VerifyLayout

ATTENTION_NAME = "dspark_slots"
CONTEXT_KEY = "dspark_context"


class SlotContext:
    """One packed forward over a cache.

    Attributes:
        taps: layer -> its captured output [B, d], for the layers in ``wanted``.
        calls: attention layers that ran.
        rope: cos and signed sin [B, 1, D] of this forward, once a layer has asked for them.
    """

    def __init__(
        self,
        layout: VerifyLayout,
        cache: SlotCache,
        specs: Mapping[int, LayerSpec],
        cost: AttentionCost,
        *,
        kernel: str = "auto",
        wanted: frozenset[int] = frozenset(),
    ) -> None:
        self.cache, self.specs = cache, specs
        self.wanted, self.taps = wanted, dict[int, Tensor]()
        self.calls = 0
        self.num_tokens = layout.num_tokens
        device = cache.device.type
        query_lens = layout.query_lens
        lone = kernel == "flex"  # one call for all sequences: nothing to group
        lists = layout.slots.tolist(), layout.starts.tolist(), query_lens.tolist()
        planned = () if lone else plan_groups(*lists, cost)
        parts = kernel == "auto" and device == "cpu" and cache.dtype.itemsize <= 2 and not matrix_tiles(cache.dtype)
        self.groups = [
            GroupState(group, layout, query_lens, cache, fused=fuses(group, kernel, specs, device), in_parts=parts)
            for group in planned
        ]
        whole = len(self.groups) == 1 and self.groups[0].rows is None
        self.whole = whole
        sequence = np.repeat(np.arange(len(layout.slots)), query_lens)
        inside = np.arange(self.num_tokens) - layout.cu_query_lens[sequence]
        self._positions = layout.starts[sequence] + inside
        self._slots = layout.slots[sequence]
        self.longest = int(self._positions.max()) + 1
        self._flex = FlexMasks(self._slots, self._positions, cache) if lone else None
        self.rope: tuple[Tensor, Tensor] | None = None
        self._cache_rows: dict[tuple[int, bool], Tensor] = {}
        self._joint_rows: dict[int, Tensor] = {}

    def write(self, flat: Tensor, new: Tensor) -> None:
        """Put ``new`` [1, kv_heads, B, dim] at its places in ``flat`` [slots * kv_heads * max_len, dim]."""
        heads, head_major = new.shape[1], new.is_contiguous()
        rows = self._cache_rows.get((heads, head_major))
        if rows is None:
            head = np.arange(heads)
            base = self._slots * (heads * self.cache.max_len) + self._positions
            at = base[None] + head[:, None] * self.cache.max_len if head_major else None
            at = base[:, None] + head[None] * self.cache.max_len if at is None else at
            rows = torch.from_numpy(np.ascontiguousarray(at).ravel().astype(np.int64)).to(self.cache.device)
            self._cache_rows[heads, head_major] = rows
        source = new if head_major else new.transpose(1, 2)
        flat.index_copy_(0, rows, source.reshape(-1, new.shape[3]))

    def attend(self, layer: int, states: Tensor, query_heads: int, scale: float) -> Tensor:
        """Attention [B, query_heads * D] of rotated queries, keys and values, all in ``states`` [B, heads, D]."""
        spec, cache = self.specs[layer], self.cache
        self.calls += 1
        joint = cache.joint.get(layer)
        if joint is not None:
            self._write_joint(joint, states[:, query_heads:], spec.kv_heads)
        else:
            key, value = torch.split(states[:, query_heads:], spec.kv_heads, dim=1)
            self.write(cache.flat_keys[layer], key.transpose(0, 1)[None])
            self.write(cache.flat_values[layer], value.transpose(0, 1)[None])
        out = self._attend_groups(spec, states[:, :query_heads], scale, None)
        return out.reshape(self.num_tokens, query_heads * spec.value_dim)

    def _write_joint(self, joint: Tensor, new: Tensor, heads: int) -> None:
        """Put keys and values ``new`` [B, 2 * kv_heads, dim] at their places in ``joint``, keys first."""
        rows = self._joint_rows.get(heads)
        if rows is None:
            base = self._slots * (heads * self.cache.max_len) + self._positions
            at = base[:, None] + np.arange(heads)[None] * self.cache.max_len
            both = np.concatenate([at, at + len(joint) // 2], axis=1)
            rows = torch.from_numpy(both.ravel().astype(np.int64)).to(self.cache.device)
            self._joint_rows[heads] = rows
        joint.index_copy_(0, rows, new.reshape(-1, new.shape[2]))

    def _attend_groups(self, spec: LayerSpec, rows: Tensor, scale: float, softcap: float | None) -> Tensor:
        """Attention [B, query_heads, Dv] of packed queries [B, query_heads, D], group by group."""
        keys, values = self.cache.keys[spec.index], self.cache.values[spec.index]
        window = self.window_of(spec)
        if self._flex is not None:
            return self._flex.attend(rows, keys, values, window, scale, softcap)
        if self.whole:
            return attend_group(self.groups[0], rows, keys, values, window, scale, softcap)
        out = rows.new_empty(self.num_tokens, spec.query_heads, spec.value_dim)
        for state in self.groups:
            part = attend_group(state, rows, keys, values, window, scale, softcap)
            if state.rows is None:
                out[state.first_row : state.first_row + part.shape[0]] = part
            else:
                out.index_copy_(0, state.out_rows, part.index_select(0, state.valid))
        return out

    def window_of(self, spec: LayerSpec) -> int | None:
        """The layer's window where it hides anything in this forward."""
        return spec.window if spec.window is not None and spec.window < self.longest else None


def slots_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer; registered with transformers under ``ATTENTION_NAME``.

    Args:
        query: [1, query_heads, B, D]; ``key`` [1, kv_heads, B, D]; ``value`` [1, kv_heads, B, Dv].

    Returns:
        [1, B, query_heads, Dv] and None.
    """
    context: SlotContext | None = kwargs.get(CONTEXT_KEY)
    if context is None:
        raise TargetError(
            f"the attention {ATTENTION_NAME!r} runs inside HFTarget.forward alone: call close() on the target before "
            "using its model directly"
        )
    layer = module.layer_idx
    spec, cache = context.specs[layer], context.cache
    context.calls += 1
    context.write(cache.flat_keys[layer], key)
    context.write(cache.flat_values[layer], value)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return context._attend_groups(spec, query[0].transpose(0, 1), scale, softcap)[None], None


def register_attention() -> None:
    """Make the attention known to transformers. No mask function goes with it: transformers then builds no masks."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, slots_attention)
