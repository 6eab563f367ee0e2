"""Gamma policies that break a promise."""

from __future__ import annotations

from typing import Any

import numpy as np

from dspark.capabilities import GammaCapabilities
from dspark.plugins import Kind
from dspark.types import GammaChoice

from .base import Broken


class Policy:
    """Sound: half of gamma for everybody."""

    capabilities = GammaCapabilities()

    def __init__(self, config: Any, context: Any) -> None: ...

    def gammas(self, batch: Any) -> Any:
        return np.full(len(batch.requests), (batch.gamma + 1) // 2, dtype=np.int64)

    def choose(self, batch: Any, cost: Any) -> GammaChoice:
        return GammaChoice(self.gammas(batch), "half")

    def observe(self, record: Any) -> None: ...

    def release(self, slot: int, generation: int) -> None: ...


class Longer(Policy):
    def gammas(self, batch: Any) -> Any:
        return super().gammas(batch) * 3


class NeedsATable(Policy):
    def choose(self, batch: Any, cost: Any) -> GammaChoice:
        cost.verify_seconds(batch.base_tokens)
        return super().choose(batch, cost)


class Guesses(Policy):
    rounds = 0

    def gammas(self, batch: Any) -> Any:
        type(self).rounds += 1
        return super().gammas(batch) - type(self).rounds % 2


class ExpectsDrafts(Policy):
    def observe(self, record: Any) -> None:
        self.drafted = int(record.draft.lens.sum())


def policy(name: str, factory: Any, check: str = "", *words: str) -> Broken:
    return Broken(name, Kind.GAMMA, factory, check, words)


POLICIES = [
    policy("sound", Policy),
    policy("drafts more than it may", Longer, "test_choices", "gammas are [3]"),
    policy("needs a table", NeedsATable, "test_choices", "cost = False"),
    policy("shares a counter", Guesses, "test_determinism", "another"),
    policy("expects a draft in every record", ExpectsDrafts, "test_every_record", "NoneType"),
]
