"""V = 8, gamma = 3: one engine round from ten histories, completed from the target's table, has the target's law."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dspark.config import SamplingParams
from dspark.testing import TableDrafter, law, target_law, total_variation
from dspark.testing.toys import random_table

from .harness import cost_table, engine, make_estimator, make_parts, make_scheduler, target

V, GAMMA = 8, 3
LENGTH = GAMMA + 1
PARAMS = SamplingParams(temperature=1.0, max_tokens=LENGTH, request_key=1)
HISTORIES = tuple(tuple(int(t) for t in row) for row in (torch.arange(50).reshape(10, 5) * 7 + 3) % V)


def draft_table(support: int) -> torch.Tensor:
    """A drafter that gives ``support`` tokens to each context, others than the most likely ones now and then."""
    table = random_table(V, V, seed=5, scale=1.0)
    for v in range(V):
        drop = torch.roll(torch.arange(V), v)[support:]
        table[v, drop] = -torch.inf
    return table


def one_round(history: tuple[int, ...], scheduler: str, support: int) -> dict[tuple[int, ...], float]:
    def program(draws: Any) -> tuple[int, ...]:
        parts = make_parts(
            draws,
            drafter=TableDrafter(draft_table(support), gamma=GAMMA),
            estimator=make_estimator("token", V, GAMMA),
            scheduler=make_scheduler(scheduler, "rising", gamma=GAMMA),
            target=target(V),
            cost=cost_table("rising"),
            gamma=GAMMA,
        )
        made = engine(parts)
        made.submit(history, PARAMS)
        (chunk,) = made.step()
        return chunk.ids

    return law(program)


def completed(committed: dict[tuple[int, ...], float], history: tuple[int, ...]) -> dict[tuple[int, ...], float]:
    """The law of LENGTH tokens, what a round left open taken from the target."""
    result: dict[tuple[int, ...], float] = {}
    for start, mass in committed.items():
        rest = {(): 1.0}
        if len(start) < LENGTH:
            params = SamplingParams(temperature=1.0, max_tokens=LENGTH - len(start))
            rest = target_law(target(V).next_logits, (*history, *start), params)
        for tail, p in rest.items():
            result[(*start, *tail)] = result.get((*start, *tail), 0.0) + mass * p
    return result


@pytest.mark.parametrize(
    ("index", "support"),
    [(i, 2) for i in range(10)] + [pytest.param(i, 4, marks=pytest.mark.slow) for i in range(10)],
)
def test_one_round_from_ten_histories(index: int, support: int) -> None:
    scheduler = ("fixed", "causal", "lookahead", "lagged", "threshold")[index % 5]
    history = HISTORIES[index]
    got = completed(one_round(history, scheduler, support), history)
    assert total_variation(got, target_law(target(V).next_logits, history, PARAMS)) <= 1e-9
