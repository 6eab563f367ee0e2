"""Attention of a packed forward over a slot cache, as transformers calls it.

``SlotContext`` plans one forward; every attention layer then writes its keys and values into the cache and attends
group by group. The context reaches the layers as a keyword argument of ``model(...)``: there is no global state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.errors import TargetError
from dspark.targets.cache import LayerSpec, SlotCache
from dspark.targets.plan import LONG_QUERY, AttentionCost, Group, plan_groups
from dspark.types import IntArray, VerifyLayout

ATTENTION_NAME = "dspark_slots"
CONTEXT_KEY = "dspark_context"

# Batched key lengths are rounded up to this: CPU matrix kernels are compiled once a shape, and lengths grow every step.
_KEY_STEP = 32


class GroupState:
    """What one group needs in every layer: where its rows and keys are, and its masks."""

    def __init__(self, group: Group, layout: VerifyLayout, query_lens: IntArray, cache: SlotCache, fused: bool) -> None:
        self.group, self.max_len, self.fused = group, cache.max_len, fused
        self.device = device = cache.device
        self.single = group.q_len > LONG_QUERY
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
        offset = self.group.first_slot * stride[0] + low * stride[2]
        return cache.as_strided((self.group.num_slots, heads, high - low, dim), stride, offset)


def fuses(group: Group, kernel: str, specs: Mapping[int, LayerSpec], device: str) -> bool:
    """Whether a group takes torch's fused attention: a function of its size alone.

    On a CPU the two products win in 16 bits between what fits the first caches (where calls dominate) and what exceeds
    the last one; measured on 3 key-value heads of width 64.
    """
    first = next(iter(specs.values()))
    if kernel != "auto" or any(spec.softcap for spec in specs.values()):
        return kernel == "sdpa" and not any(spec.softcap for spec in specs.values())
    if device != "cpu" or first.dtype.itemsize > 2:
        return True
    keys = group.batch * group.k_len * first.bytes_per_token // 768
    return keys <= 1024 or keys > 24576


class SlotContext:
    """One packed forward over a cache.

    Attributes:
        taps: layer -> its captured output [B, d], for the layers in ``wanted``.
        calls: attention layers that ran.
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
        planned = plan_groups(layout.slots.tolist(), layout.starts.tolist(), query_lens.tolist(), cost)
        self.groups = [
            GroupState(group, layout, query_lens, cache, fuses(group, kernel, specs, device)) for group in planned
        ]
        whole = len(self.groups) == 1 and self.groups[0].rows is None
        self.whole = whole
        sequence = np.repeat(np.arange(len(layout.slots)), query_lens)
        inside = np.arange(self.num_tokens) - layout.cu_query_lens[sequence]
        self._positions = layout.starts[sequence] + inside
        self._slots = layout.slots[sequence]
        self.longest = int(self._positions.max()) + 1
        self._cache_rows: dict[tuple[int, bool], Tensor] = {}

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
    window = context.window_of(spec)
    keys, values = cache.keys[layer], cache.values[layer]
    if context.whole:
        only = context.groups[0]
        return _attend(only, query.transpose(1, 2), keys, values, window, scale, softcap)[None], None
    rows = query[0].transpose(0, 1)
    out = query.new_empty(context.num_tokens, spec.query_heads, spec.value_dim)
    for state in context.groups:
        part = _attend(state, rows, keys, values, window, scale, softcap)
        if state.rows is None:
            out[state.first_row : state.first_row + part.shape[0]] = part
        else:
            out.index_copy_(0, state.out_rows, part.index_select(0, state.valid))
    return out[None], None


def _attend(
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
    """A long query: fused attention over a view, key-value heads as the batch and their queries as the heads."""
    fold, dim = queries.shape[1], queries.shape[3]
    k = k[:, None].expand(-1, fold, -1, -1)
    v = v[:, None].expand(-1, fold, -1, -1)
    if window is None and state.lowest == 0 and dim == v.shape[3]:
        return F.scaled_dot_product_attention(queries, k, v, is_causal=True, scale=scale)
    mask = state.mask(window, 1, queries.dtype)
    if dim != v.shape[3]:
        return _plain_attention(queries, k, v, mask, scale, None)
    return F.scaled_dot_product_attention(queries, k, v, attn_mask=state.mask_across(mask), scale=scale)


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


def register_attention() -> None:
    """Make the attention known to transformers. No mask function goes with it: transformers then builds no masks."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, slots_attention)
