"""Engines that choose gamma, on toys: acceptance is drawn from a rate, and time is what a synthetic table says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dspark._sched import CostTable
from dspark.config import SamplingParams
from dspark.engine.engine import Engine
from dspark.sampling.draws import CounterDraws
from dspark.scheduling.gamma_adaptive import AdaptiveConfig, AdaptiveGamma
from dspark.testing import TableDrafter, TableTarget
from dspark.testing.toys import random_table
from dspark.types import RoundRecord
from tests.exactness.harness import build, engine, make_parts

V = 8
CPU = CostTable(
    [(1, 32.0), (2, 33.0), (4, 34.0), (8, 38.0), (16, 46.0), (32, 80.0), (64, 150.0), (128, 290.0), (256, 570.0)],
    draft=[(1, 1, 3.0), (1, 7, 6.0), (32, 1, 10.0), (32, 7, 40.0)],
    glue=1.0,
)
"""Shaped like a small model on a CPU: flat to 16 tokens, then linear. Seconds are arbitrary."""
STEEP = CostTable([(n, 2.0**n) for n in range(1, 24)], draft=[(1, 1, 0.5), (8, 7, 0.5)])
"""No draft pays, whatever is accepted."""


class Rated(TableDrafter):
    """Right with a probability of ``rate`` at each position, by a generator of its own: drafts never read draws.

    Args:
        rate: or a function of the anchor's id.
    """

    def __init__(self, target: TableTarget, rate: Any, gamma: int = 7, seed: int = 5) -> None:
        super().__init__(torch.zeros(V, V), gamma=gamma, argmax=True)
        self.target, self.rate = target, rate
        self.rng = np.random.default_rng(seed)
        self.gammas: list[int] = []
        self.asked: list[int] = []

    def propose(self, batch: Any, sampler: Any) -> Any:
        self.gammas.append(batch.gamma)
        self.asked.append(len(batch))
        rows = []
        for request in batch.requests:
            ids = list(request.ids)
            rate = self.rate(request.anchor) if callable(self.rate) else self.rate
            for _ in range(batch.gamma):
                token = int(self.target.next_logits(ids).argmax())
                ids.append(token if self.rng.random() < rate else (token + 1) % V)
            rows.append(ids[len(request.ids) :])
        lens = np.array([min(batch.gamma, r.max_draft) for r in batch.requests])
        return sampler.point_mass(torch.tensor(rows), lens)


@dataclass
class Timed:
    """What every step took by the table, what it committed, and what a plain step would have taken."""

    cost: CostTable
    seconds: float = 0.0
    tokens: int = 0
    plain: float = 0.0
    rows: int = 0

    def on_round(self, record: RoundRecord) -> None:
        if record.choice is None:
            return
        known, _ = record.choice
        draft = 0.0
        if record.batch is not None:
            draft = self.cost.draft_seconds(len(record.batch), record.batch.gamma)
        self.seconds += self.cost.verify_seconds(record.executed_tokens) + self.cost.glue + draft
        self.plain += self.cost.verify_seconds(known.base_tokens) + self.cost.glue
        self.rows += known.decoding
        self.tokens += sum(len(c.new_ids) for c in record.committed)

    def on_finish(self, request: Any, reason: str) -> None:
        pass

    @property
    def speed(self) -> float:
        """Tokens a second over those of plain steps."""
        return (self.tokens / self.seconds) / (self.rows / self.plain)

    def reset(self) -> None:
        self.seconds = self.plain = 0.0
        self.tokens = self.rows = 0


def adaptive(gamma: int = 7, *, prunes: bool = True, **settings: Any) -> AdaptiveGamma:
    return AdaptiveGamma(AdaptiveConfig(**settings), gamma, prunes=prunes)


def make(
    rate: Any = 0.7,
    *,
    cost: CostTable = CPU,
    policy: Any = "adaptive",
    slots: int = 1,
    gamma: int = 7,
    scheduler: Any = None,
    estimator: Any = None,
    observers: Sequence[Any] = (),
    table: torch.Tensor | None = None,
    **settings: Any,
) -> Engine:
    """An engine on a toy target whose greedy text wanders; long enough for hundreds of rounds."""
    target = TableTarget(random_table(V + 1, V, V, seed=21) if table is None else table, mix=2.0, max_len=1 << 14)
    parts = make_parts(
        CounterDraws(),
        drafter=Rated(target, rate, gamma),
        estimator=estimator if estimator is not None else build("confidence", "online", V, gamma),
        scheduler=scheduler if scheduler is not None else build("scheduling", "causal", V, gamma),
        target=target,
        cost=cost,
        gamma=gamma,
    )
    parts.gamma_policy = adaptive(gamma, **settings) if policy == "adaptive" else policy
    return engine(parts, slots=slots, max_len=1 << 14, observers=observers)


def submit(made: Engine, count: int = 1, tokens: int = 16_000) -> list[str]:
    params = SamplingParams(max_tokens=tokens)
    return [made.submit([1 + i % (V - 1), 2], params) for i in range(count)]


def step(made: Engine, rounds: int) -> list[str]:
    """Run rounds; the reason of each."""
    reasons = []
    for _ in range(rounds):
        before = dict(made.stats.gamma_reasons)
        made.step()
        reasons += [r for r, n in made.stats.gamma_reasons.items() if n > before.get(r, 0)]
    return reasons
