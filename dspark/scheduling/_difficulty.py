"""Difficulty of the next draft: acceptance of its first position, from what is known before drafting.

Draft cost is paid before acceptance is known; the paper leaves open an early exit that goes by difficulty. What is
known by then: which token the anchor is, how sure the target was at the position that produced it, and its hidden
state there. An online logistic regression takes them up, and is believed only while it predicts outcomes, each before
it learns from it, better than their average does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dspark.types import FloatArray, IntArray

PROJECTED = 16
"""Random directions of the hidden state."""
RATE = 0.15
"""Step of AdaGrad."""
TOKEN_STRENGTH = 4.0
"""Outcomes that the average over all tokens weighs as much as, as prior of one token's."""
TOKEN_MEMORY = 64.0
MOST_TOKENS = 65_536
MEMORY = 512.0
"""Outcomes after which an older one weighs 1/e, in the comparison with the average."""
LEAST_OUTCOMES = 128
LEAST_ADVANTAGE = 0.02
"""Relative fall of the log loss under the average's from which the estimate is believed."""


@dataclass(frozen=True, slots=True)
class Signals:
    """What a request leaves for its next round.

    Attributes:
        token: the anchor's id.
        entropy: of the law that it was decided from, in nats; NaN where unknown.
        hidden: the target's features at that position, [d]; None where the drafter reads none.
    """

    token: int
    entropy: float
    hidden: FloatArray | None = None


class Difficulty:
    """P(x_1 accepted) of each row.

    Features: how often drafts after this token were accepted (log odds against the average), the entropy and its
    square root, and 16 random directions of the hidden state, all standardised by running moments.

    Args:
        seed: of the random directions.
    """

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._directions: FloatArray | None = None
        size = 3 + PROJECTED
        self._weights, self._squares = np.zeros(1 + size), np.full(1 + size, 1e-2)
        self._count, self._mean, self._var = 0.0, np.zeros(size), np.ones(size)
        self._tokens: dict[int, tuple[float, float]] = {}
        self._seen, self._won = 4.0, 2.8
        self._loss, self._base = 0.0, 0.0
        self.outcomes = 0

    @property
    def trusted(self) -> bool:
        """True while the estimate beats the average on outcomes that it had not seen."""
        return self.outcomes >= LEAST_OUTCOMES and self._loss < (1.0 - LEAST_ADVANTAGE) * self._base

    @property
    def advantage(self) -> float:
        """Relative fall of the log loss under the average's; 0 before anything was seen."""
        return 1.0 - self._loss / self._base if self._base else 0.0

    def features(self, rows: list[Signals]) -> FloatArray:
        """Raw features [R, 19]; NaN where unknown."""
        out = np.full((len(rows), 3 + PROJECTED), np.nan)
        average = self._seen, self._won
        for i, row in enumerate(rows):
            seen, won = self._tokens.get(row.token, (0.0, 0.0))
            mean = average[1] / average[0]
            rate = (won + TOKEN_STRENGTH * mean) / (seen + TOKEN_STRENGTH)
            out[i, 0] = _log_odds(rate) - _log_odds(mean)
            if math.isfinite(row.entropy):
                out[i, 1], out[i, 2] = row.entropy, math.sqrt(max(row.entropy, 0.0))
        hidden = [i for i, row in enumerate(rows) if row.hidden is not None]
        if hidden:
            out[hidden, 3:] = self._project(np.stack([h for row in rows if (h := row.hidden) is not None]))
        return out

    def predict(self, features: FloatArray) -> FloatArray:
        """P(x_1 accepted), [R], of raw features [R, 19]."""
        logits = np.clip(self._standard(features) @ self._weights[1:] + self._weights[0], -8.0, 8.0)
        mean: FloatArray = 1.0 / (1.0 + np.exp(-(logits + _log_odds(self._won / self._seen))))
        return mean

    def learn(self, features: FloatArray, tokens: IntArray, accepted: FloatArray) -> None:
        """Judge, then learn from, outcomes of first positions: features [n, 19], anchors [n], 0 or 1 [n]."""
        if not len(accepted):
            return
        predicted = np.clip(self.predict(features), 1e-4, 1 - 1e-4)
        mean = min(max(self._won / self._seen, 1e-4), 1 - 1e-4)
        keep = math.exp(-len(accepted) / MEMORY)
        self._loss = self._loss * keep + float(_log_loss(predicted, accepted).sum())
        self._base = self._base * keep + float(_log_loss(np.full(len(accepted), mean), accepted).sum())
        inputs = np.concatenate([np.ones((len(accepted), 1)), self._standard(features)], axis=1)
        gradient = ((predicted - accepted)[:, None] * inputs).mean(axis=0) + 1e-4 * self._weights
        self._squares += gradient**2
        self._weights -= RATE * gradient / np.sqrt(self._squares)
        self._moments(features)
        for token, won in zip(tokens.tolist(), accepted.tolist(), strict=True):
            self._count_token(token, won)
        self._seen = self._seen * keep + len(accepted)
        self._won = self._won * keep + float(accepted.sum())
        self.outcomes += len(accepted)

    def _project(self, hidden: FloatArray) -> FloatArray:
        """[n, d] of unit length -> [n, 16]."""
        width = hidden.shape[1]
        if self._directions is None or len(self._directions) != width:
            self._directions = self._rng.choice([-1.0, 1.0], size=(width, PROJECTED))
        norms = np.linalg.norm(hidden, axis=1, keepdims=True)
        projected: FloatArray = (hidden / np.maximum(norms, 1e-12)) @ self._directions
        return projected

    def _standard(self, features: FloatArray) -> FloatArray:
        """Standardised; 0 where unknown."""
        scaled = (features - self._mean) / np.sqrt(self._var + 1e-6)
        return np.clip(np.nan_to_num(scaled, nan=0.0, posinf=0.0, neginf=0.0), -4.0, 4.0)

    def _moments(self, features: FloatArray) -> None:
        known = np.isfinite(features)
        values = np.where(known, features, self._mean)
        self._count = min(self._count + len(features), MEMORY)
        step = len(features) / self._count
        delta = values.mean(axis=0) - self._mean
        self._mean = self._mean + step * delta
        spread = ((values - self._mean) ** 2).mean(axis=0)
        self._var = np.where(known.any(axis=0), (1 - step) * self._var + step * spread, self._var)

    def _count_token(self, token: int, won: float) -> None:
        seen, before = self._tokens.pop(token, (0.0, 0.0))  # the latest stands last
        keep = math.exp(-1.0 / TOKEN_MEMORY)
        self._tokens[token] = (seen * keep + 1.0, before * keep + won)
        if len(self._tokens) > MOST_TOKENS:
            del self._tokens[next(iter(self._tokens))]


def _log_odds(rate: float) -> float:
    rate = min(max(rate, 1e-4), 1 - 1e-4)
    return math.log(rate / (1.0 - rate))


def _log_loss(predicted: FloatArray, outcome: FloatArray) -> FloatArray:
    loss: FloatArray = -np.where(outcome > 0.5, np.log(predicted), np.log1p(-predicted))
    return loss
