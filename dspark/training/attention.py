"""Attention of packed sequences: blocks over their sequence's context and themselves, and EAGLE-3's unrolled steps.

What may be seen is decided by ``dspark.drafters.block.visible``, as at inference. There, keys lie in a cache; here all
blocks of a sequence share its context's keys, in one product.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.checkpoints import DrafterConfig, LayerConfig
from dspark.drafters.block import visible
from dspark.drafters.rope import RopeTable
from dspark.training.blocks import Blocks

Mask = tuple[Tensor, Tensor]
"""Additive masks of one sequence: of its context [A, size or 1, S], and of the blocks themselves [size or 1, size]."""


class Turns:
    """Cosines and sines of each kind of layer."""

    def __init__(self, config: DrafterConfig, device: torch.device, dtype: torch.dtype) -> None:
        self._layers = config.layers
        kinds = {(layer.rope, layer.head_dim) for layer in config.layers}
        self._tables = {kind: RopeTable(*kind, device, dtype) for kind in kinds}

    def at(self, positions: Tensor) -> dict[LayerConfig, tuple[Tensor, Tensor]]:
        """Those of positions [n], [n, 1, D / 2] each, by layer."""
        for table in self._tables.values():
            table.reserve(int(positions.max()) + 1)
        found = {kind: table.at(positions) for kind, table in self._tables.items()}
        return {layer: found[layer.rope, layer.head_dim] for layer in self._layers}


def block_masks(spec: LayerConfig, anchors: Tensor, blocks: Blocks, size: int, dtype: torch.dtype) -> list[Mask]:
    """What slots of a kind of layer may not see, for each sequence.

    Args:
        anchors: position of each block's anchor, [A].
        size: inputs of a block.
    """
    out = []
    own = additive(visible(spec, anchors.new_zeros(1), size, 0, size, None)[0], dtype)
    for part, length in zip(torch.split(anchors, blocks.counts.tolist()), blocks.lengths, strict=True):
        context = visible(spec, part, size, 0, length, None)
        below = torch.arange(length, device=anchors.device) < part[:, None, None]
        out.append((additive(context & below, dtype), own))
    return out


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where ``seen``, else -inf."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))


def attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, blocks: Blocks, masks: Sequence[Mask]
) -> Tensor:
    """Attention of every block to its sequence's context and to itself, [A * size, heads * D].

    Args:
        q: scaled queries [A * size, heads, D], blocks in the order of their sequences.
        k, v: the blocks' own, [A * size, kv_heads, D].
        keys, values: of the context, [T, kv_heads, D], packed by sequence.
        masks: see :func:`block_masks`.
    """
    size = len(q) // len(blocks)
    cuts = (blocks.counts * size).tolist()
    own = (torch.split(t, cuts) for t in (q, k, v))
    context = (torch.split(t, blocks.lengths) for t in (keys, values))
    return torch.cat([_attend_sequence(*part, size=size) for part in zip(*own, *context, masks, strict=True)])


def _attend_sequence(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, masks: Mask, *, size: int
) -> Tensor:
    heads, kv, dim = q.shape[1], k.shape[1], q.shape[2]
    count, fold, length = len(q) // size, heads // kv, len(keys)
    # [kv, A, fold, size, D]: query heads that share keys are folded into the rows of one product.
    own = q.view(count, size, kv, fold, dim).permute(2, 0, 3, 1, 4)
    k, v = (t.view(count, size, kv, dim).permute(2, 0, 1, 3) for t in (k, v))
    far = torch.matmul(own.reshape(kv, -1, dim), keys.permute(1, 2, 0)).view(kv, count, fold, size, length)
    near = torch.matmul(own.reshape(kv, count, fold * size, dim), k.transpose(2, 3)).view(kv, count, fold, size, size)
    far = far + masks[0].to(far.dtype)[None, :, None]
    near = near + masks[1].to(near.dtype)
    far, near = torch.split(torch.softmax(torch.cat([far, near], dim=-1), dim=-1), [length, size], dim=-1)
    y = torch.matmul(far.reshape(kv, -1, length), values.permute(1, 0, 2)).view(kv, count, fold * size, dim)
    y = y + torch.matmul(near.reshape(kv, count, fold * size, size), v)
    return y.view(kv, count, fold, size, dim).permute(1, 3, 0, 2, 4).reshape(count * size, heads * dim)


def attend_steps(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    """Attention of EAGLE-3's training-time test, [T, heads * D]: entry i sees the entries 0..i of the first step, and
    of every later step the one that continued it.

    Args:
        q: scaled queries [T, heads, D], packed by sequence.
        keys, values: of each step so far, [T, kv_heads, D]; the last are this step's own.
        lengths: of the sequences.
    """
    split_keys, split_values = ([torch.split(t, list(lengths)) for t in step] for step in (keys, values))
    out = []
    for s, part in enumerate(torch.split(q, list(lengths))):
        out.append(_attend_unrolled(part, [k[s] for k in split_keys], [v[s] for v in split_values]))
    return torch.cat(out)


def _attend_unrolled(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    length, heads, dim = q.shape
    kv = keys[0].shape[1]
    fold = heads // kv
    own = q.view(length, kv, fold, dim).permute(1, 2, 0, 3)  # [kv, fold, S, D]
    first = torch.matmul(own.reshape(kv, fold * length, dim), keys[0].permute(1, 2, 0)).view(kv, fold, length, length)
    causal = torch.ones(length, length, dtype=torch.bool, device=q.device).tril_()
    scores = [first + additive(causal, first.dtype)]
    scores += [(own * k.permute(1, 0, 2).unsqueeze(1)).sum(-1, keepdim=True).to(first.dtype) for k in keys[1:]]
    weights = torch.softmax(torch.cat(scores, dim=-1), dim=-1)
    seen = weights[..., :length].reshape(kv, fold * length, length)
    y = torch.matmul(seen, values[0].permute(1, 0, 2)).view(kv, fold, length, dim)
    for i, v in enumerate(values[1:]):
        y = y + weights[..., length + i : length + i + 1] * v.permute(1, 0, 2).unsqueeze(1)
    return y.permute(2, 0, 1, 3).reshape(length, heads * dim)
