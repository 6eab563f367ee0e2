"""A drafter for checks: it knows the outputs and errs now and then, so that every schedule has drafts to plan.

Sampled text leaves ``ngram`` little to copy; without drafts that are accepted and rejected in turn, a check of
schedules would check little. The module is a plugin, for ``extra_plugins`` of an engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dspark.capabilities import DrafterCapabilities
from dspark.ops.noise import row_keys
from dspark.plugins import hookimpl
from dspark.protocols import BuildContext, DraftSampler
from dspark.types import BatchView, Committed, DraftBlock

DSPARK_API = 1
CAPABILITIES = DrafterCapabilities(point_mass=True)


@dataclass(frozen=True, slots=True)
class RecallConfig:
    """Settings of ``recall``.

    Attributes:
        answers: (seed, prompt ids) -> output ids. Requests that are not in it get no drafts.
        faults: share of drafted tokens that are wrong.
        gamma: tokens drafted a round.
    """

    answers: Mapping[tuple[int | None, tuple[int, ...]], Sequence[int]] = field(default_factory=dict)
    faults: float = 0.2
    gamma: int = 7


class RecallDrafter:
    """Proposes the known output from where the request stands; which tokens are wrong follows from their position."""

    max_gamma: int | None = None
    tap_layers: tuple[int, ...] = ()
    capabilities: DrafterCapabilities = CAPABILITIES

    def __init__(self, config: RecallConfig) -> None:
        self.config = config
        self.default_gamma = config.gamma

    def propose(self, batch: BatchView, sampler: DraftSampler) -> DraftBlock:
        """Point masses; each row as long as its known output goes on."""
        tokens = np.zeros((len(batch), batch.gamma), dtype=np.int64)
        lens = np.zeros(len(batch), dtype=np.int64)
        for r, request in enumerate(batch.requests):
            prompt = tuple(request.ids[: request.prompt_len])
            answer = self.config.answers.get((request.params.seed, prompt), ())
            done = len(request.ids) - request.prompt_len
            known = np.array(answer[done : done + min(batch.gamma, request.max_draft)], dtype=np.int64)
            places = len(request.ids) + np.arange(len(known))
            luck = row_keys(99, request.params.seed or 0, places) / 2.0**64
            lens[r] = len(known)
            tokens[r, : len(known)] = np.where(luck < self.config.faults, (known + 1) % 1000, known)
        return sampler.point_mass(torch.from_numpy(tokens), lens)

    def commit(self, committed: Sequence[Committed]) -> None:
        """Nothing to learn."""

    def release(self, slot: int, generation: int) -> None:
        """Nothing to forget."""


def build(config: RecallConfig, context: BuildContext) -> RecallDrafter:
    """Factory of ``recall``."""
    return RecallDrafter(config)


@hookimpl
def dspark_register_drafters(register: Any) -> None:
    """The hook."""
    register("recall", build, config=RecallConfig, capabilities=CAPABILITIES)
