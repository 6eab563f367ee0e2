"""What is known of position k before x_k is drawn, as numbers; NaN where it is unknown.

q_k is a function of x_{<k} and of history, and so is everything here: q(x_k), the probability of the token that was
drawn, is never read. Of a point mass, entropy and margin are the same whatever the token is; they count as unknown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dspark.types import BatchView, DraftBlock, Mode

Floats = npt.NDArray[np.float64]

LAW_FEATURES = 3
"""Entropy, margin and largest probability of q_k."""
MOST_MARGIN = 20.0


def law_features(batch: BatchView, block: DraftBlock) -> Floats:
    """Entropy in nats, log margin of the two likeliest tokens, and the largest probability of q_k, [R, gamma, 3]."""
    rows, gamma = block.token_ids.shape
    out = np.full((rows, gamma, LAW_FEATURES), np.nan)
    sampled = np.array([r.mode is not Mode.GREEDY for r in batch.requests])
    lens = np.where(sampled, block.lens, 0)
    for k in range(int(lens.max(initial=0))):  # one position at a time: a law of all of them is [R, gamma, V]
        drafted = np.flatnonzero(lens > k)
        laws = block.q.probs(drafted, np.full(len(drafted), k, dtype=np.int64)).double()
        entropy = torch.special.entr(laws).sum(-1)
        top = laws.topk(min(2, laws.shape[-1]), dim=-1).values
        first, second = top[:, 0], top[:, -1]
        margin = (first / second.clamp(min=1e-300)).log().clamp(max=MOST_MARGIN)
        out[drafted, k] = torch.stack([entropy, margin, first], dim=-1).cpu().numpy()
    return out


def named_features(block: DraftBlock, names: Sequence[str]) -> Floats:
    """Those of ``block.features``, [R, gamma, n]: shares from 0 to 1 as they are, larger numbers on a log scale."""
    rows, gamma = block.token_ids.shape
    out = np.full((rows, gamma, len(names)), np.nan)
    for i, name in enumerate(names):
        found = _array(block.features, name)
        if found is None:
            continue
        if found.shape not in ((rows,), (rows, gamma)):
            raise ValueError(f"features[{name!r}] is {list(found.shape)}, expected [{rows}] or [{rows}, {gamma}]")
        out[:, :, i] = np.log1p(found if found.ndim == 2 else found[:, None])
    return out


def _array(features: Mapping[str, Any], name: str) -> Floats | None:
    found = features.get(name)
    if found is None:
        return None
    host = found.detach().double().cpu().numpy() if isinstance(found, torch.Tensor) else found
    return np.maximum(np.asarray(host, dtype=np.float64), 0.0)


class Standard:
    """Running mean and variance of each feature, from outcomes; unknown values count as the mean.

    Args:
        size: number of features.
        memory: outcomes after which an older one weighs 1/e.
    """

    def __init__(self, size: int, memory: float = 2000.0) -> None:
        self._memory = memory
        self._count: Floats = np.zeros(size)
        self._mean: Floats = np.zeros(size)
        self._var: Floats = np.ones(size)

    def __call__(self, features: Floats) -> Floats:
        """[.., size] -> the same, of mean 0 and variance 1, within 4 standard deviations; 0 where unknown."""
        scaled = (features - self._mean) / np.sqrt(self._var + 1e-4)
        bounded: Floats = np.clip(np.nan_to_num(scaled, nan=0.0, posinf=4.0, neginf=-4.0), -4.0, 4.0)
        return bounded

    def learn(self, features: Floats) -> None:
        """Take in [n, size]."""
        known = np.isfinite(features)
        new = known.sum(axis=0)
        count = np.minimum(self._count * math.exp(-len(features) / self._memory) + new, self._memory)
        step = np.minimum(new / np.maximum(count, 1.0), 1.0)
        values = np.where(known, features, self._mean)
        shift = (values - self._mean).sum(axis=0) / np.maximum(new, 1)
        spread = (((values - self._mean) ** 2) * known).sum(axis=0) / np.maximum(new, 1)
        self._mean = self._mean + step * shift
        self._var = np.maximum(self._var + step * (spread - step * shift**2 - self._var), 0.0)
        self._count = count
