"""Rounds whose true probabilities are known: confidence logits that are right up to a temperature a position."""

from __future__ import annotations

import numpy as np

from dspark.evaluation.rounds import Rounds
from dspark.types import FloatArray

GAMMA = 7
TEMPERATURES = np.linspace(0.5, 3.0, GAMMA)
"""Of the raw logits; STS has to find them."""


def rounds_of(count: int, *, seed: int = 0, shift: float = 0.0, gamma: int = GAMMA) -> tuple[Rounds, FloatArray]:
    """(rounds, true c). Raw confidences are sigmoid(T * logit); the truth's logits lie ``shift`` beneath."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(1.5, 1.5, size=(count, 1)) * 0.6 + rng.normal(0.5, 1.2, size=(count, gamma))
    true = 1 / (1 + np.exp(-(logits - shift)))
    raw = 1 / (1 + np.exp(-logits * TEMPERATURES[:gamma]))
    accepted = np.logical_and.accumulate(rng.random((count, gamma)) < true, axis=1).sum(1)
    return Rounds(raw, np.full(count, gamma, dtype=np.int64), accepted, accepted + 1), true


def by_prompt(rounds: Rounds, size: int = 40) -> list[Rounds]:
    """Prompts of ``size`` rounds each."""
    return [rounds.take(np.arange(i, min(i + size, len(rounds)))) for i in range(0, len(rounds), size)]
