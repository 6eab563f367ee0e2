"""Acceptance of a drafter: by data set, by position and by threshold, with bootstrap intervals over prompts.

Accepted length is the mean over rounds of committed tokens (paper, footnote 3). A bootstrap replicate draws prompts of
each data set with replacement, and takes the ratio of their sums; the macro average is the mean over data sets. The
draws are a function of seed and data set alone, so drafters are compared on the same replicates.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dspark.errors import EvaluationError
from dspark.evaluation.rounds import Rounds
from dspark.types import FloatArray, IntArray

THRESHOLDS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
REPLICATES = 2000
LEVEL = 0.95

ByPrompt = Mapping[str, Sequence[Rounds]]
"""Data set -> the rounds of each of its prompts, in one order for all drafters."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure, its interval, and its bootstrap replicates."""

    value: float
    low: float
    high: float
    replicates: FloatArray

    @classmethod
    def of(cls, value: float, replicates: FloatArray) -> Estimate:
        """With the percentile interval."""
        tail = (1 - LEVEL) / 2 * 100
        low, high = np.percentile(replicates, [tail, 100 - tail])
        return cls(float(value), float(low), float(high), replicates)

    def as_list(self) -> list[float]:
        """[value, low, high]."""
        return [self.value, self.low, self.high]


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """Draws prompts with replacement; the same ones for the same seed and data set."""

    replicates: int = REPLICATES
    seed: int = 0

    def __post_init__(self) -> None:
        if self.replicates < 1:
            raise EvaluationError(f"bootstrap: expected at least 1 replicate, got {self.replicates}")

    def counts(self, dataset: str, prompts: int) -> IntArray:
        """How often each prompt is in each replicate, [replicates, prompts]."""
        rng = np.random.default_rng([self.seed, zlib.crc32(dataset.encode())])
        return rng.multinomial(prompts, np.full(prompts, 1 / prompts), size=self.replicates)

    def ratio(self, dataset: str, above: FloatArray, below: FloatArray) -> Estimate:
        """sum(above) / sum(below) over prompts [n]; a replicate without any ``below`` counts as 0."""
        counts = self.counts(dataset, len(above))
        return Estimate.of(_ratio(above.sum(), below.sum()), _ratio(counts @ above, counts @ below))

    def macro(self, estimates: Sequence[Estimate]) -> Estimate:
        """The mean over data sets."""
        value = float(np.mean([e.value for e in estimates]))
        return Estimate.of(value, np.mean([e.replicates for e in estimates], axis=0))


def _ratio(above: Any, below: Any) -> Any:
    return np.where(np.asarray(below) > 0, above / np.maximum(below, 1e-300), 0.0)


def accepted_lengths(data: ByPrompt, bootstrap: Bootstrap) -> dict[str, Estimate]:
    """Accepted length of each data set, and ``macro``.

    Raises:
        EvaluationError: no data set, or one that is called ``macro``.
    """
    if not data or "macro" in data:
        raise EvaluationError("expected at least one data set, and none of the name 'macro'")
    found = {}
    for dataset, prompts in data.items():
        committed = np.array([float(p.committed.sum()) for p in prompts])
        rounds = np.array([float(len(p)) for p in prompts])
        found[dataset] = bootstrap.ratio(dataset, committed, rounds)
    return {**found, "macro": bootstrap.macro(list(found.values()))}


def gain(own: Estimate, other: Estimate) -> Estimate:
    """own / other - 1, on the same replicates."""
    return Estimate.of(own.value / other.value - 1, own.replicates / other.replicates - 1)


@dataclass(frozen=True, slots=True)
class Positions:
    """Counts by position, [gamma]: rounds that offered position k, that offered it after accepting all before it, and
    that accepted it."""

    offered: IntArray
    reached: IntArray
    accepted: IntArray

    @classmethod
    def of(cls, rounds: Rounds) -> Positions:
        """Counted over rounds."""
        offered = rounds.weight
        accepted = np.arange(rounds.gamma) < rounds.accepted[:, None]
        reached = offered & (np.arange(rounds.gamma) <= rounds.accepted[:, None])
        return cls(offered.sum(0), reached.sum(0), accepted.sum(0))

    def as_dict(self) -> dict[str, Any]:
        """With the rates; None where nothing was offered or reached."""
        rates = {"acceptance": self.offered, "conditional_acceptance": self.reached}
        return {
            "offered": self.offered.tolist(),
            "reached": self.reached.tolist(),
            "accepted": self.accepted.tolist(),
            **{
                name: [a / n if n else None for a, n in zip(self.accepted.tolist(), below.tolist(), strict=True)]
                for name, below in rates.items()
            },
        }


def threshold_sweep(rounds: Rounds, thresholds: Sequence[float] = THRESHOLDS) -> list[dict[str, float | None]]:
    """What a static threshold on c_k would have verified and accepted of these full-length rounds.

    The rounds are those of full verification: under a threshold, decoding would stop at other anchors now and then.

    Returns:
        For each threshold: ``threshold``; ``verified``, drafts verified a round; ``acceptance``, the share of them that
        was accepted (None where none was verified); ``accepted_length``.
    """
    out: list[dict[str, float | None]] = []
    steps = np.arange(rounds.gamma)
    for threshold in thresholds:
        keeps = (rounds.probs >= threshold) | (steps >= rounds.offered[:, None])
        first = np.where(keeps.all(1), rounds.gamma, keeps.argmin(1))
        offered = np.minimum(first, rounds.offered)
        accepted = np.minimum(offered, rounds.accepted)
        committed = rounds.committed - (rounds.accepted - accepted)
        count = max(1, len(rounds))
        out.append(
            {
                "threshold": float(threshold),
                "verified": float(offered.sum() / count),
                "acceptance": float(accepted.sum() / offered.sum()) if offered.any() else None,
                "accepted_length": float(committed.sum() / count),
            }
        )
    return out
