"""Drafters that draft a token a forward, as toys: EAGLE-3 in both norm variants, and a draft model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from dspark.drafters.draft_model import ModelDraft
from dspark.testing.toys import random_table
from tests.drafters.eagle import VARIANTS, toy_eagle
from tests.drafters.exact import Cell, toy_target
from tests.drafters.toys import FeatureTarget

KINDS = (*VARIANTS, "model")
"""``eagle3`` as DeepSpec and as speculators norm it, and ``draft-model``."""


def toy_model(vocab: int = 3, *, seed: int = 5, **settings: Any) -> FeatureTarget:
    """A draft model whose law depends on all that it has read, so that a stale entry shows."""
    return FeatureTarget(random_table(vocab + 1, vocab, vocab, seed=seed, scale=1.0), mix=0.5, **settings)


def toy_stepwise(
    kind: str, target: Any, *, vocab: int = 3, gamma: int = 2, slots: int = 4, seed: int = 0, **settings: Any
) -> Any:
    """A drafter of one of ``KINDS`` on a toy target."""
    if kind == "model":
        return ModelDraft(toy_model(vocab, seed=5 + seed), target, slots=slots, gamma=gamma)
    return toy_eagle(kind, target, vocab=vocab, gamma=gamma, seed=seed, **settings)


@cache
def drafter_of(kind: str) -> Any:
    """One for all runs of a cell: every run begins in a slot that its predecessor left."""
    return toy_stepwise(kind, toy_target())


@dataclass(frozen=True)
class StepCell(Cell):
    """A cell of the exact matrix with one of ``KINDS`` in the place of a head."""

    @property
    def drafter(self) -> Any:
        return drafter_of(self.head)

    def __str__(self) -> str:
        return f"{self.head}-{self.estimator}-{self.scheduler}-{self.cost}-{self.sampling}"
