"""Survivals of recent drafts, and what budgets of draft tokens are expected to bring of them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Recent:
    """The last drafts of one group of rows and gamma: survivals [n, gamma], NaN where a draft was shorter.

    Args:
        gamma: block size.
        memory: how many are kept.
        prior: survival from one position to the next, for what was never seen.
    """

    def __init__(self, gamma: int, memory: int, prior: float) -> None:
        self._prior: Floats = prior ** np.arange(1.0, gamma + 1.0)
        self._rows: Floats = np.full((memory, gamma), np.nan)
        self._next = self._count = 0

    def learn(self, survival: Floats, lens: Ints) -> None:
        """Add drafts [R, gamma], each as far as its length."""
        gamma = self._rows.shape[1]
        known = np.where(np.arange(gamma) < lens[:, None], survival, np.nan)[-len(self._rows) :]
        at = (self._next + np.arange(len(known))) % len(self._rows)
        self._rows[at] = known
        self._next = int((self._next + len(known)) % len(self._rows))
        self._count = min(self._count + len(known), len(self._rows))

    def column(self, k: int) -> Floats:
        """Survivals up to position k (0-based) that were seen; the prior where none was."""
        seen = self._rows[: self._count, k]
        seen = seen[~np.isnan(seen)]
        return seen if len(seen) else self._prior[k : k + 1]


def expected_gains(pools: list[tuple[Recent, Ints]], gamma: int) -> tuple[Floats, Floats]:
    """What admitting the likeliest tokens of a batch like the recent ones brings.

    Args:
        pools: of each group of rows in the batch, its recent drafts and its rows' max_lens.
        gamma: block size.

    Returns:
        Tokens admitted so far, rising, and the tokens expected of them, [n] each: the points of a concave curve from
        (0, 0), whose last is the whole batch. A row that may verify m tokens counts for the first m positions.
    """
    values, weights = [np.zeros(0)], [np.zeros(0)]
    for recent, lens in pools:
        for k in range(gamma):
            rows = int((lens > k).sum())
            if rows:
                seen = recent.column(k)
                values.append(seen)
                weights.append(np.full(len(seen), rows / len(seen)))
    flat, weight = np.concatenate(values), np.concatenate(weights)
    order = np.argsort(-flat, kind="stable")
    return np.cumsum(weight[order]), np.cumsum(flat[order] * weight[order])
