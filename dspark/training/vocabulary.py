"""A pruned draft vocabulary: the tokens that the target says most often."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from dspark.training.samples import Sample
from dspark.types import IntArray


def count_tokens(samples: Iterable[Sample], vocab_size: int) -> tuple[IntArray, IntArray]:
    """How often each token stands in responses and anywhere, [V] each."""
    said, seen = np.zeros(vocab_size, dtype=np.int64), np.zeros(vocab_size, dtype=np.int64)
    for sample in samples:
        said += np.bincount(sample.ids[sample.loss_mask], minlength=vocab_size)
        seen += np.bincount(sample.ids, minlength=vocab_size)
    return said, seen


def choose_vocabulary(said: IntArray, seen: IntArray, size: int, always: Sequence[int] = ()) -> Tensor:
    """Target ids of a draft vocabulary, [size] int64, rising: ``always``, then by count in responses, then anywhere.

    Ties go to the lower id, which in a byte-pair vocabulary is the earlier merge.
    """
    order = np.lexsort((np.arange(len(said)), -seen, -said))
    forced = sorted({int(i) for i in always if 0 <= int(i) < len(said)})
    rest = order[~np.isin(order, forced)]
    return torch.from_numpy(np.sort(np.concatenate([np.array(forced, dtype=np.int64), rest])[:size]).astype(np.int64))


def coverage(said: IntArray, ids: Tensor) -> float:
    """Share of response tokens that a draft vocabulary has."""
    return float(said[ids.numpy()].sum() / max(said.sum(), 1))


def draft_ids(token_map: Tensor | None, vocab_size: int) -> Tensor:
    """Target id -> draft id, [V]; -1 where there is none."""
    if token_map is None:
        return torch.arange(vocab_size)
    out = torch.full((vocab_size,), -1, dtype=torch.int64)
    out[token_map] = torch.arange(len(token_map))
    return out
