"""Engines on toys for the field's cases, and drafters whose mistakes are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dspark.config import SamplingParams
from dspark.engine.engine import Engine
from dspark.sampling.draws import CounterDraws
from dspark.testing import TableDrafter, TableEstimator, TableTarget
from dspark.testing.cheats import LengthTable
from dspark.testing.toys import random_table
from dspark.types import RoundRecord
from tests.exactness.harness import decode, engine, make_parts

V = 8
GREEDY = SamplingParams(max_tokens=12)


def make_target(**settings: Any) -> TableTarget:
    return TableTarget(random_table(V + 1, V, V, seed=21), mix=0.6, **settings)


def close_drafter(gamma: int = 3, seed: int = 22) -> TableDrafter:
    """Right about half of the time: the target's mean table and some noise."""
    mean = make_target().table.mean(dim=0)
    return TableDrafter(mean + random_table(V, V, seed=seed, scale=0.6), gamma=gamma)


class Oracle(TableDrafter):
    """Drafts what the target will say, with mistakes at chosen absolute positions."""

    def __init__(self, wrong: Sequence[int] = (), gamma: int = 3) -> None:
        super().__init__(torch.zeros(V, V), gamma=gamma, argmax=True)
        self.wrong = set(wrong)

    def propose(self, batch: Any, sampler: Any) -> Any:
        target = make_target()
        rows = []
        for request in batch.requests:
            ids = list(request.ids)
            for _ in range(batch.gamma):
                token = int(target.next_logits(ids).argmax())
                ids.append((token + 1) % V if len(ids) in self.wrong else token)
            rows.append(ids[len(request.ids) :])
        lens = np.array([min(batch.gamma, r.max_draft) for r in batch.requests])
        return sampler.point_mass(torch.tensor(rows), lens)


def make(
    drafter: Any = None,
    *,
    lens: Sequence[int] = (99,),
    gamma: int = 3,
    target: Any = None,
    slots: int = 4,
    **settings: Any,
) -> Engine:
    parts = make_parts(
        CounterDraws(),
        drafter=drafter if drafter is not None else close_drafter(gamma),
        estimator=TableEstimator([[0.9] * V] * gamma),
        scheduler=settings.pop("scheduler", LengthTable(lens)),
        target=target if target is not None else make_target(),
        gamma=gamma,
        cost=settings.pop("cost", None),
    )
    return engine(parts, slots=slots, max_len=32, **settings)


def plain() -> Engine:
    return make(lens=(0,))


def one(made: Engine, prompt: Sequence[int], params: SamplingParams) -> tuple[int, ...]:
    return decode(made, [(prompt, params)])[0]


PROMPTS = ([1, 2, 3], [4], [5, 6, 7, 0, 2, 2, 1])


SEEDED = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=10)


class Recorder:
    def __init__(self) -> None:
        self.records: list[RoundRecord] = []

    def on_round(self, record: RoundRecord) -> None:
        self.records.append(record)

    def on_finish(self, request: Any, reason: str) -> None:
        pass
