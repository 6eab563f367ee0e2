"""Ragged attention through FlexAttention's glue against attention computed sequence by sequence."""

from __future__ import annotations

import pytest
import torch

from dspark.errors import ConfigError
from dspark.ops.flex import BLOCK, block_mask, ragged_attention


def plain(query, keys, values, slots, positions, window, scale, softcap):
    out = torch.zeros(*query.shape[:2], values.shape[3])
    fold = query.shape[1] // keys.shape[1]
    for i, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        if slot < 0:
            continue
        first = 0 if window is None else max(0, position - window + 1)
        k = keys[slot, :, first : position + 1].repeat_interleave(fold, 0)
        v = values[slot, :, first : position + 1].repeat_interleave(fold, 0)
        scores = torch.einsum("hd,hkd->hk", query[i], k) * scale
        scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
        out[i] = torch.einsum("hk,hkd->hd", scores.softmax(-1), v)
    return out


@pytest.mark.parametrize("window", [None, 40, 200])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_each_query_sees_its_own_slot_up_to_itself(window: int | None, softcap: float | None) -> None:
    g = torch.Generator().manual_seed(0)
    slots = torch.tensor([2] * 5 + [0] * 140 + [3] + [-1] * 2)
    positions = torch.cat((torch.arange(250, 255), torch.arange(3, 143), torch.tensor([128]), torch.zeros(2).long()))
    keys, values = torch.randn(4, 2, 2 * BLOCK, 16, generator=g), torch.randn(4, 2, 2 * BLOCK, 8, generator=g)
    query = torch.randn(len(slots), 6, 16, generator=g)
    mask = block_mask(slots, positions, 4, 2 * BLOCK, window)
    got = ragged_attention(query, keys, values, mask, 0.25, softcap, compiled=False)
    want = plain(query, keys, values, slots, positions, window, 0.25, softcap)
    torch.testing.assert_close(got[:-2], want[:-2], atol=1e-5, rtol=1e-5)
    assert not torch.isnan(got).any()


def test_blocks_that_nobody_sees_are_not_touched() -> None:
    mask = block_mask(torch.tensor([1, 1]), torch.tensor([127, 128]), 4, 4 * BLOCK)
    assert mask.kv_num_blocks.tolist() == [[[2]]]
    assert sorted(mask.kv_indices[0, 0, 0, :2].tolist()) == [4, 5]
    short = block_mask(torch.tensor([1]), torch.tensor([300]), 4, 4 * BLOCK, 10)
    assert short.kv_indices[0, 0, 0, :1].tolist() == [6]


def test_slots_that_end_within_a_block_are_refused() -> None:
    with pytest.raises(ConfigError, match="100"):
        block_mask(torch.tensor([0]), torch.tensor([0]), 1, 100)
