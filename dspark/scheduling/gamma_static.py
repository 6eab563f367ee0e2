"""The gamma policy ``static``: every round drafts the configured block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dspark.capabilities import GammaCapabilities
from dspark.protocols import BuildContext
from dspark.types import GammaChoice, GammaInput, RoundRecord

CAPABILITIES = GammaCapabilities()


@dataclass(frozen=True, slots=True)
class StaticConfig:
    """``static`` has no settings."""


class StaticGamma:
    """g_r = gamma for all rows: known when the engine is built."""

    capabilities: GammaCapabilities = CAPABILITIES

    def choose(self, batch: GammaInput, cost: Any | None) -> GammaChoice:
        """The block of the engine."""
        return GammaChoice(np.full(len(batch.requests), batch.gamma, dtype=np.int64), "static")

    def observe(self, record: RoundRecord) -> None:
        """Nothing to learn."""

    def release(self, slot: int, generation: int) -> None:
        """Nothing is kept by request."""


def build(config: StaticConfig, context: BuildContext) -> StaticGamma:
    """Factory of ``static``."""
    return StaticGamma()
