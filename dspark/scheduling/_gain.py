"""What a round of a given gamma is expected to bring, from averages and a cost table (METHOD section 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dspark.types import FloatArray, GammaInput, IntArray


@dataclass(frozen=True, slots=True)
class Expected:
    """One kind of round.

    Attributes:
        gamma: longest draft; 0 for a plain round.
        tokens: expected to be committed, tau.
        seconds: T_draft + T_verify + T_glue.
        lens: how much of each row is worth verifying, [R].
    """

    gamma: int
    tokens: float
    seconds: float
    lens: IntArray

    @property
    def rate(self) -> float:
        """Theta."""
        return self.tokens / self.seconds


class Outlook:
    """Seconds of the coming step's forward by drafts verified, looked up once.

    Args:
        batch: the rows that could draft.
        cost: the table.
        filled: share of the rows that draft something where they are asked; the draft's cost is paid for the others
            too.
    """

    def __init__(self, batch: GammaInput, cost: Any, filled: float = 1.0) -> None:
        self.batch, self.cost = batch, cost
        self._filled = max(filled, 0.01)
        self._seconds: list[float] = []
        nobody = np.zeros(len(batch.requests), dtype=np.int64)
        self.plain = Expected(0, float(batch.decoding), self.verify(0), nobody)

    def verify(self, drafts: int) -> float:
        """Seconds of a step that verifies so many drafts, without drafting."""
        while len(self._seconds) <= drafts:
            tokens = self.batch.base_tokens + len(self._seconds)
            self._seconds.append(self.cost.verify_seconds(tokens, self.batch.context) + self.cost.glue)
        return self._seconds[drafts]

    def best(self, survival: FloatArray) -> Expected:
        """The verify lengths of most Theta for rows of these survivals, [R, gamma], and what they bring.

        An average case: who decides in the round sees each draft's own confidences and does no worse.
        """
        order, gains, seconds = self._path(survival)
        theta = (self.plain.tokens + gains) / seconds
        return self._expected(survival, order, gains, seconds, int(np.argmax(theta)))

    def worth(self, survival: FloatArray, rate: float) -> Expected:
        """The verify lengths of most tokens - rate * seconds: time has a price, the rate of the long run.

        The ratio of one round is the wrong thing to maximise where easy and hard rounds alternate: a round is worth its
        time while it brings more than the average round would in as much.
        """
        order, gains, seconds = self._path(survival)
        best = int(np.argmax(gains - rate * seconds))
        if gains[best] - rate * seconds[best] <= -rate * self.plain.seconds:
            return self.plain
        return self._expected(survival, order, gains, seconds, best)

    def _path(self, survival: FloatArray) -> tuple[IntArray, FloatArray, FloatArray]:
        """Candidates in Algorithm 1's order, the tokens that the first 1, 2, .. of them bring, and the seconds."""
        rows, gamma = survival.shape
        flat = survival.ravel()
        order = np.argsort(-flat, kind="stable").astype(np.int64)
        self.verify(len(order))
        draft = self.cost.draft_seconds(rows, gamma) / self._filled
        seconds = np.asarray(self._seconds[1 : len(order) + 1]) + draft
        return order, np.cumsum(flat[order]), seconds

    def _expected(
        self, survival: FloatArray, order: IntArray, gains: FloatArray, seconds: FloatArray, best: int
    ) -> Expected:
        rows, gamma = survival.shape
        lens = np.bincount(order[: best + 1] // gamma, minlength=rows).astype(np.int64)
        return Expected(gamma, self.plain.tokens + float(gains[best]), float(seconds[best]), lens)
