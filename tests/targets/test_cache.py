"""Slots of the target's cache: what one takes over from another, and what must not be passed on."""

from __future__ import annotations

import numpy as np
import torch

from dspark.targets.cache import LayerSpec, SlotCache


def make() -> SlotCache:
    """Two layers, three slots of eight tokens, all written."""
    specs = [LayerSpec(i, 2, 4, 4, 4, None, torch.float32) for i in range(2)]
    cache = SlotCache(specs, 3, 8, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for tensor in (*cache.keys.values(), *cache.values.values()):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return cache


def same(cache: SlotCache, other: SlotCache, slot: int, source: int, start: int, end: int) -> bool:
    pairs = [(cache.keys, other.keys), (cache.values, other.values)]
    return all(
        torch.equal(mine[i][slot, :, start:end], theirs[i][source, :, start:end])
        for mine, theirs in pairs
        for i in mine
    )


def test_a_prefix_is_handed_on_where_it_is_sound() -> None:
    cache, before = make(), make()
    assert cache.copy_prefix(0, 2, 5)
    assert same(cache, before, 2, 0, 0, 5)
    assert same(cache, before, 2, 2, 5, 8), "what lies behind it is stale, and stays"
    assert cache.copy_prefix(0, 0, 5)
    assert same(cache, before, 0, 0, 0, 8)
    cache.values[1][0, 1, 3] = torch.nan
    assert not cache.copy_prefix(0, 1, 5), "a value in it is no number"
    assert same(cache, before, 1, 1, 0, 8)
    assert cache.copy_prefix(0, 1, 3)
    cache.suspect = (np.array([0, 2]), torch.tensor([1.0, torch.nan]))
    assert not cache.copy_prefix(2, 1, 2), "its logits were no numbers"
    cache.keys[0][2, :, 4:] = torch.inf
    assert cache.copy_prefix(1, 2, 3), "what is written may have been anything"
    assert same(cache, before, 2, 0, 0, 3)
    assert not any(bool(t[2, :, 3:].any()) for t in (*cache.keys.values(), *cache.values.values()))
    assert cache.copy_prefix(2, 1, 2), "and is sound from then on"


def test_a_slot_of_no_numbers_is_wiped_when_somebody_begins_there() -> None:
    cache, before = make(), make()
    cache.suspect = (np.array([1, 0]), torch.tensor([torch.inf, 0.5]))
    cache.clean(np.array([0, 2]))
    assert same(cache, before, 1, 1, 0, 8), "nobody began there"
    cache.clean(np.array([1]))
    assert not any(bool(t[1].any()) for t in (*cache.keys.values(), *cache.values.values()))
    assert same(cache, before, 0, 0, 0, 8)
