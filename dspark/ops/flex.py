"""Attention of a packed forward over a slot cache through torch's FlexAttention: only the glue is here.

Queries of all sequences are one row of FlexAttention's batch, the slots' keys one long row of keys. A query sees the
positions of its own slot up to its own, as far back as the layer's window. Which blocks of keys a block of queries
touches follows from slots and positions alone, so nothing is read back and no mask [B, keys] is made.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dspark.errors import ConfigError

BLOCK = 128
"""Queries, and keys, of a block."""


def block_mask(slots: Tensor, positions: Tensor, count: int, max_len: int, window: int | None = None) -> Any:
    """FlexAttention's mask of a packed forward.

    Args:
        slots: slot of each query, [B] int64; -1 for padding, which sees nothing.
        positions: absolute position of each query, [B] int64.
        count: slots of the cache.
        max_len: positions of a slot, a multiple of ``BLOCK``.
        window: positions that a query sees, its own included; None for all.

    Raises:
        ConfigError: a slot that ends within a block.
    """
    from torch.nn.attention.flex_attention import BlockMask

    if max_len % BLOCK:
        raise ConfigError(f"flex attention: slots of {max_len} tokens do not end with a block of {BLOCK}")
    per_slot, queries = max_len // BLOCK, slots.shape[0]
    padded = -queries % BLOCK
    slot = torch.nn.functional.pad(slots, (0, padded), value=-1)
    position = torch.nn.functional.pad(positions, (0, padded))
    block = torch.arange(count * per_slot, device=slots.device)
    first = (block % per_slot) * BLOCK
    seen = (block // per_slot == slot[:, None]) & (first <= position[:, None])
    if window is not None:
        seen &= first + BLOCK > (position - window + 1)[:, None]
    touched = seen.view(-1, BLOCK, len(block)).any(dim=1)
    indices = touched.to(torch.int32).argsort(dim=1, descending=True, stable=True).to(torch.int32)
    counts = touched.sum(dim=1, dtype=torch.int32)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        place = key % max_len
        sees = (key // max_len == slot[query]) & (place <= position[query])
        return sees if window is None else sees & (place > position[query] - window)

    return BlockMask.from_kv_blocks(
        counts[None, None],
        indices[None, None],
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(queries, count * max_len),
    )


@cache
def _compiled(dynamic: bool) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=dynamic)


def ragged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Any,
    scale: float,
    softcap: float | None = None,
    *,
    compiled: bool = True,
) -> Tensor:
    """Attention of packed queries over the cache.

    Args:
        query: [B, query_heads, D].
        keys, values: the cache, [slots, kv_heads, max_len, D] and [.., Dv].
        mask: :func:`block_mask` of the forward; one for all layers of one window.
        scale: on the scores.
        softcap: scores become softcap tanh(score / softcap).
        compiled: through ``torch.compile``, which makes it one kernel; without, torch's slow path, for tests.

    Returns:
        [B, query_heads, Dv].
    """
    from torch.nn.attention.flex_attention import flex_attention

    def long_row(cache: Tensor) -> Tensor:
        slots, heads, length, width = cache.shape
        return cache.transpose(0, 1).reshape(1, heads, slots * length, width)

    def capped(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.tanh(score / softcap) * softcap  # type: ignore[operator]

    run: Any = _compiled(True) if compiled else flex_attention
    out: Tensor = run(
        query.transpose(0, 1)[None],
        long_row(keys),
        long_row(values),
        score_mod=None if softcap is None else capped,
        block_mask=mask,
        scale=scale,
        enable_gqa=query.shape[1] != keys.shape[1],
    )
    return out[0].transpose(0, 1)
