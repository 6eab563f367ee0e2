"""Anchors and blocks."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch

from dspark.training.blocks import candidates, make_blocks, sample_anchors
from dspark.training.samples import Sample


def test_an_anchor_and_the_token_after_it_are_the_assistants() -> None:
    mask = np.array([0, 1, 1, 0, 1, 1, 1, 0, 1], dtype=bool)
    assert candidates(mask).tolist() == [1, 4, 5]


def test_anchors_are_drawn_evenly_without_repeats() -> None:
    mask = np.arange(30) >= 10
    random, seen = np.random.default_rng(0), Counter[int]()
    for _ in range(3000):
        at = sample_anchors(mask, 5, random.random(29))
        assert len(set(at.tolist())) == 5
        assert at.tolist() == sorted(at.tolist())
        seen.update(at.tolist())
    assert set(seen) == set(range(10, 29))
    assert all(abs(n - 3000 * 5 / 19) < 120 for n in seen.values())
    assert sample_anchors(mask, 99, random.random(29)).tolist() == list(range(10, 29))


def test_blocks_of_packed_sequences() -> None:
    """Rows count from each sequence's start; a gap in the mask ends its block."""
    first = Sample(np.arange(100, 108), np.array([0, 0, 1, 1, 1, 0, 1, 1], dtype=bool))
    second = Sample(np.arange(200, 205), np.ones(5, dtype=bool))
    blocks = make_blocks([first, second], [np.array([2, 3]), np.array([3])], 3)
    assert blocks.starts.tolist() == [0, 8, 13]
    assert blocks.counts.tolist() == [2, 1]
    assert blocks.lengths == [8, 5]
    assert blocks.anchor_ids.tolist() == [102, 103, 203]
    assert blocks.labels.tolist() == [[103, 104, 105], [104, 105, 106], [204, 0, 0]]
    assert blocks.prev.tolist() == [[102, 103, 104], [103, 104, 105], [203, 204, 0]]
    assert blocks.valid.tolist() == [[True, True, False], [True, False, False], [True, False, False]]
    assert blocks.teacher[blocks.valid].tolist() == [2, 3, 3, 8 + 3]
    assert blocks.labels.dtype == torch.int64
