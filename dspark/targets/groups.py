"""Attention of one group of sequences over the slot cache: its rows, keys and masks, and the products.

A group's sequences are batched and padded to its longest query and context (``dspark.targets.plan``); a long query, as
of a prompt's chunk, is a group alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.ops.packed import matrix_tiles
from dspark.targets.cache import LayerSpec, SlotCache
from dspark.targets.plan import LONG_QUERY, Group
from dspark.types import IntArray, VerifyLayout

# Batched key lengths are rounded up to this: CPU matrix kernels are compiled once a shape, and lengths grow every step.
_KEY_STEP = 32
# Queries of a long one that attend together: few enough to skip most keys that they can't see.
_PART = 128


class GroupState:
    """What one group needs in every layer: where its rows and keys are, and its masks."""

    def __init__(
        self, group: Group, layout: VerifyLayout, query_lens: IntArray, cache: SlotCache, *, fused: bool, in_parts: bool
    ) -> None:
        self.group, self.max_len, self.fused = group, cache.max_len, fused
        self.device = device = cache.device
        self.single = group.q_len > LONG_QUERY
        self.in_parts = self.single and in_parts
        seqs = np.asarray(group.seqs)
        starts, lens, first_rows = layout.starts[seqs], query_lens[seqs], layout.cu_query_lens[seqs]
        places = np.arange(len(seqs)) if group.gathered else layout.slots[seqs] - group.first_slot
        batch, width = group.batch, group.q_len
        # queries that pad a sequence repeat its last one: they attend to something, and are dropped
        offsets = np.minimum(np.arange(width), lens[:, None] - 1)
        self.q_positions = np.full((batch, width), group.k_len - 1, dtype=np.int64)
        self.q_positions[places] = starts[:, None] + offsets
        self.lowest = int(starts.min())
        packed = first_rows[:, None] + offsets
        self.first_row = int(packed[0, 0])
        dense = batch == len(seqs) and bool((packed.ravel() == self.first_row + np.arange(batch * width)).all())
        self.rows: Tensor | None = None
        if not dense:
            rows = np.full((batch, width), self.first_row, dtype=np.int64)
            rows[places] = packed
            self.rows = torch.from_numpy(rows.ravel()).to(device)
            valid = np.zeros((batch, width), dtype=bool)
            valid[places] = np.arange(width) < lens[:, None]
            self.valid = torch.from_numpy(np.flatnonzero(valid)).to(device)
            self.out_rows = torch.from_numpy(rows.ravel()[valid.ravel()]).to(device)
        self.slot_ids = torch.from_numpy(layout.slots[seqs].astype(np.int64)).to(device) if group.gathered else None
        self._masks: dict[tuple[int | None, int, torch.dtype], Tensor | None] = {}
        self._across: dict[int, Tensor] = {}
        self._parts: dict[tuple[int, int, int | None], Tensor] = {}

    def key_range(self, window: int | None) -> tuple[int, int]:
        """First and one past the last key that is read: all that any query of the group sees."""
        low = 0 if window is None else max(0, self.lowest - window + 1)
        if self.single or self.fused:
            return low, self.group.k_len
        return low - low % _KEY_STEP, min(self.group.k_len + -self.group.k_len % _KEY_STEP, self.max_len)

    def mask(self, window: int | None, fold: int, dtype: torch.dtype) -> Tensor | None:
        """0 where a query sees a key, -inf where not, [batch, 1, keys, fold * q_len]; None where all see all."""
        key = (window, fold, dtype)
        if key not in self._masks:
            self._masks[key] = self._build_mask(window, fold, dtype)
        return self._masks[key]

    def mask_across(self, mask: Tensor | None) -> Tensor | None:
        """A mask of ``mask`` with queries first, as fused attention takes it; made once, and dense for its sake."""
        if mask is None:
            return None
        found = self._across.get(id(mask))
        if found is None:
            found = self._across[id(mask)] = mask.transpose(-1, -2).contiguous()
        return found

    def part_mask(self, rows: int, keys: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """[rows, keys] of a part whose last query is at the last key."""
        found = self._parts.get((rows, keys, window))
        if found is None:
            mask = torch.full((rows, keys), float("-inf"), dtype=dtype, device=self.device)
            found = mask.triu_(keys - rows + 1)
            if window is not None:
                found = found + torch.full_like(mask, float("-inf")).tril_(keys - rows - window)
            self._parts[rows, keys, window] = found
        return found

    def _build_mask(self, window: int | None, fold: int, dtype: torch.dtype) -> Tensor | None:
        low, high = self.key_range(window)
        q_pos = self.q_positions
        if q_pos.min() == high - 1 and (window is None or high - low <= window):
            return None
        queries = torch.from_numpy(q_pos).to(self.device)[:, None, :]
        keys = torch.arange(low, high, device=self.device)[:, None]
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        mask = torch.zeros(hidden.shape, dtype=dtype, device=self.device).masked_fill_(hidden, float("-inf"))
        return mask.repeat(1, 1, fold)[:, None]

    def keys_of(self, cache: Tensor, window: int | None) -> Tensor:
        """[batch, kv_heads, keys, dim] of a layer's cache: a view, or a copy where the slots lie apart."""
        low, high = self.key_range(window)
        if self.slot_ids is not None:
            return cache[:, :, low:high].index_select(0, self.slot_ids)
        # one call instead of two slices: at one row a call costs more than what it does
        _, heads, _, dim = cache.shape
        stride = cache.stride()
        offset = cache.storage_offset() + self.group.first_slot * stride[0] + low * stride[2]
        return cache.as_strided((self.group.num_slots, heads, high - low, dim), stride, offset)


def fuses(group: Group, kernel: str, specs: Mapping[int, LayerSpec], device: str) -> bool:
    """Whether a group takes torch's fused attention: a function of its size alone.

    On a CPU without matrix tiles the two products win in 16 bits between what fits the first caches (where
    calls dominate) and what exceeds the last one; measured on 3 key-value heads of width 64. With tiles fused attention
    takes a half to a third of their time at any size, as it reads the cache where it lies.
    """
    first = next(iter(specs.values()))
    if kernel != "auto" or any(spec.softcap for spec in specs.values()):
        return kernel == "sdpa" and not any(spec.softcap for spec in specs.values())
    if device != "cpu" or first.dtype.itemsize > 2 or matrix_tiles(first.dtype):
        return True
    keys = group.batch * group.k_len * first.bytes_per_token // 768
    return keys <= 640 or keys > 24576


def attend_group(
    state: GroupState,
    rows: Tensor,
    keys: Tensor,
    values: Tensor,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Attention of one group, [batch * q_len, query_heads, Dv], from packed queries [(1,) B, query_heads, D]."""
    batch, width = state.group.batch, state.group.q_len
    query_heads, dim = rows.shape[-2:]
    kv_heads, v_dim = keys.shape[1], values.shape[3]
    fold = query_heads // kv_heads
    if state.rows is not None:
        rows = rows.index_select(0, state.rows)
    elif rows.dim() == 3:
        rows = rows[state.first_row : state.first_row + batch * width]
    k, v = state.keys_of(keys, window), state.keys_of(values, window)
    # query heads that share a key-value head become rows of one product
    if width == 1:
        queries = rows.reshape(batch, kv_heads, fold, dim)
    else:
        queries = rows.reshape(batch, width, kv_heads, fold, dim).permute(0, 2, 3, 1, 4)
        if state.single and softcap is None:
            out = _attend_alone(state, queries[0], k[0], v[0], window, scale)
            return out.permute(2, 0, 1, 3).reshape(width, query_heads, v_dim)
        queries = queries.reshape(batch, kv_heads, fold * width, dim)
    mask = state.mask(window, fold, queries.dtype)
    if state.fused and softcap is None:
        out = F.scaled_dot_product_attention(queries, k, v, attn_mask=state.mask_across(mask), scale=scale)
    else:
        out = _plain_attention(queries, k, v, mask, scale, softcap)
    if width > 1:
        out = out.view(batch, kv_heads, fold, width, v_dim).permute(0, 3, 1, 2, 4)
    return out.reshape(batch * width, query_heads, v_dim)


def _attend_alone(state: GroupState, queries: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float) -> Tensor:
    """A long query [kv_heads, fold, q_len, D] over keys of its own: [kv_heads, fold, q_len, Dv]."""
    if state.in_parts:
        return _attend_in_parts(state, queries, k, v, window, scale)
    fold, dim = queries.shape[1], queries.shape[3]
    k = k[:, None].expand(-1, fold, -1, -1)
    v = v[:, None].expand(-1, fold, -1, -1)
    if window is None and state.lowest == 0 and dim == v.shape[3]:
        return F.scaled_dot_product_attention(queries, k, v, is_causal=True, scale=scale)
    mask = state.mask(window, 1, queries.dtype)
    if dim != v.shape[3]:
        return _plain_attention(queries, k, v, mask, scale, None)
    return F.scaled_dot_product_attention(queries, k, v, attn_mask=state.mask_across(mask), scale=scale)


def _attend_in_parts(
    state: GroupState, queries: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float
) -> Tensor:
    """A part of the queries at a time, each over the keys that it can see: two plain products and a softmax.

    In 16 bits on a CPU these take well under half the time of torch's fused attention.
    """
    kv_heads, fold, width, _ = queries.shape
    low, _ = state.key_range(window)
    out = queries.new_empty(kv_heads, fold, width, v.shape[2])
    for first in range(0, width, _PART):
        last = min(first + _PART, width)
        start = state.lowest + first
        begin = 0 if window is None else max(0, start - window + 1 - low)
        end = state.lowest + last - low
        rows = queries[:, :, first:last].reshape(kv_heads, -1, queries.shape[3])
        scores = torch.bmm(rows * scale, k[:, begin:end].transpose(1, 2)).view(kv_heads, fold, last - first, -1)
        scores += state.part_mask(last - first, end - begin, window, queries.dtype)
        weights = torch.softmax(scores, dim=-1).view(kv_heads, -1, end - begin)
        out[:, :, first:last] = torch.bmm(weights, v[:, begin:end]).view(kv_heads, fold, last - first, -1)
    return out


def _plain_attention(
    queries: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """softmax(softcap(scale q k^T) + mask) v; the softmax in float32 at least, as transformers' eager attention.

    The scores are k q^T, keys first: a product with the transposed cache would copy it.
    """
    scores = torch.matmul(k, (queries * scale).transpose(-1, -2))
    if softcap is not None:
        scores = torch.tanh(scores.div_(softcap)).mul_(softcap)
    if mask is not None:
        scores += mask
    precise = torch.float64 if scores.dtype == torch.float64 else torch.float32
    weights = torch.softmax(scores.transpose(-1, -2), dim=-1, dtype=precise)
    return torch.matmul(weights.to(queries.dtype), v)
