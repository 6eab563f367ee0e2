"""The drafter ``none``: plain decoding. Every round has gamma = 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dspark.capabilities import DrafterCapabilities
from dspark.protocols import BuildContext, DraftSampler
from dspark.types import BatchView, Committed, DraftBlock

CAPABILITIES = DrafterCapabilities(max_gamma=0, point_mass=True)


@dataclass(frozen=True, slots=True)
class NoneConfig:
    """``none`` has no settings."""


class NoDrafter:
    """Drafts nothing: a block of no columns, whatever gamma is asked."""

    max_gamma: int | None = 0
    default_gamma: int = 0
    tap_layers: tuple[int, ...] = ()
    capabilities: DrafterCapabilities = CAPABILITIES

    def __init__(self, device: Any = None) -> None:
        self._device = torch.device(device if device is not None else "cpu")

    def propose(self, batch: BatchView, sampler: DraftSampler) -> DraftBlock:
        """A block with token_ids [R, 0] and lens [R] = 0."""
        empty = torch.zeros((len(batch), 0), dtype=torch.int64, device=self._device)
        return sampler.point_mass(empty, np.zeros(len(batch), dtype=np.int64))

    def commit(self, committed: Sequence[Committed]) -> None:
        """Nothing to learn."""

    def release(self, slot: int, generation: int) -> None:
        """Nothing to forget."""


def build(config: NoneConfig, context: BuildContext) -> NoDrafter:
    """Factory of ``none``."""
    return NoDrafter(context.device)
