"""*coupled*, path by path: whatever the schedule, y_n = argmax(log p_t(. | y_<n) + g_n), for 10,000 noise tables."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from dspark.config import SamplingParams
from dspark.testing import TableNoise
from dspark.testing.cheats import ReadsEverything, Retrospective, sps
from dspark.testing.oracle import coupled_output

from .harness import (
    GAMMA,
    PROMPT,
    SAMPLING,
    decode,
    engine,
    make_drafter,
    make_estimator,
    make_parts,
    make_scheduler,
    sps_table,
    target,
)

TABLES, TOKENS, SLOTS = 10_000, 4, 500
SHIPPED = ("causal", "lookahead", "lagged", "global", "fixed", "threshold", "off")
RATES = tuple(1.0 / (1.0 + 0.004 * n + 0.5 * (n // 300)) for n in range(1, 4 * SLOTS))


@cache
def noise() -> torch.Tensor:
    shape = (TABLES, len(PROMPT) + TOKENS + GAMMA + 1, 3)
    return torch.from_numpy(np.random.default_rng(3).gumbel(size=shape))


@cache
def wanted(sampling: str) -> tuple[tuple[int, ...], ...]:
    seen: dict[tuple[int, ...], torch.Tensor] = {}
    made = target()
    params = params_of(sampling, 0)
    return tuple(coupled_output(made.next_logits, PROMPT, params, table, cache=seen) for table in noise())


def params_of(sampling: str, seed: int) -> SamplingParams:
    import dataclasses

    return dataclasses.replace(SAMPLING[sampling], max_tokens=TOKENS, seed=seed)


def outputs(scheduler: str, drafter: str, sampling: str, estimator: str) -> tuple[tuple[int, ...], ...]:
    made_drafter = make_drafter(drafter)
    made: Any
    if scheduler == "adversarial":
        made = ReadsEverything(lambda: made_drafter.last_block.token_ids)
    elif scheduler == "retrospective":
        made = Retrospective(sps(*RATES))
    else:
        made = make_scheduler(scheduler, rows=SLOTS)
    parts = make_parts(
        TableNoise(noise()),
        drafter=made_drafter,
        estimator=make_estimator(estimator),
        scheduler=made,
        target=target(),
        cost=sps_table(RATES),
    )
    requests = [(PROMPT, params_of(sampling, seed)) for seed in range(TABLES)]
    return decode(engine(parts, slots=SLOTS, step_tokens=4 * SLOTS), requests)


@pytest.mark.parametrize("scheduler", [*SHIPPED, "adversarial", "retrospective"])
def test_every_schedule_gives_the_same_tokens(scheduler: str) -> None:
    assert outputs(scheduler, "table", "T=1", "token") == wanted("T=1")


@pytest.mark.parametrize(
    ("drafter", "sampling"), [("ngram", "top_p"), ("bad", "penalties"), ("table", "min_p"), ("table", "T=.7")]
)
def test_every_drafter_and_sampling_gives_the_same_tokens(drafter: str, sampling: str) -> None:
    assert outputs("lookahead", drafter, sampling, "online") == wanted(sampling)
