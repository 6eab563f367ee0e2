"""*coupled*, path by path: whatever the schedule, y_n = argmax(log p_t(. | y_<n) + g_n), for 10,000 noise tables."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from dspark.config import SamplingParams
from dspark.testing import TableDrafter, TableNoise, TableTarget
from dspark.testing.cheats import ReadsEverything, Retrospective, sps
from dspark.testing.oracle import coupled_output
from dspark.testing.toys import law_table, random_table

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
def wanted(sampling: str, tables: int = TABLES) -> tuple[tuple[int, ...], ...]:
    seen: dict[tuple[int, ...], torch.Tensor] = {}
    made = target()
    params = params_of(sampling, 0)
    return tuple(coupled_output(made.next_logits, PROMPT, params, table, cache=seen) for table in noise()[:tables])


def params_of(sampling: str, seed: int) -> SamplingParams:
    import dataclasses

    return dataclasses.replace(SAMPLING[sampling], max_tokens=TOKENS, seed=seed)


def outputs(
    scheduler: str, drafter: str, sampling: str, estimator: str, tables: int = TABLES
) -> tuple[tuple[int, ...], ...]:
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
    requests = [(PROMPT, params_of(sampling, seed)) for seed in range(tables)]
    return decode(engine(parts, slots=SLOTS, step_tokens=4 * SLOTS), requests)


@pytest.mark.parametrize("scheduler", [*SHIPPED, "adversarial", "retrospective"])
def test_every_schedule_gives_the_same_tokens(scheduler: str) -> None:
    assert outputs(scheduler, "table", "T=1", "token") == wanted("T=1")


@pytest.mark.parametrize(
    ("drafter", "sampling"), [("ngram", "top_p"), ("bad", "penalties"), ("table", "min_p"), ("table", "T=.7")]
)
def test_every_drafter_and_sampling_gives_the_same_tokens(drafter: str, sampling: str) -> None:
    tables = 1500
    assert outputs("lookahead", drafter, sampling, "online", tables) == wanted(sampling, tables)


def test_an_equal_drafter_is_always_accepted() -> None:
    """q = p under one noise: every draft is the target's token. A shift of the noise by a position would show here."""
    table = random_table(3, 3, seed=41)
    parts = make_parts(
        TableNoise(noise()),
        drafter=TableDrafter(table),
        estimator=make_estimator("constant"),
        scheduler=make_scheduler("fixed", rows=8),
        target=TableTarget(table),
    )
    made = engine(parts, slots=8)
    decode(made, [(PROMPT, params_of("T=.7", seed)) for seed in range(64)])
    assert made.stats.acceptance.accepted == made.stats.acceptance.offered
    assert sum(made.stats.acceptance.offered) > 64


def test_pruned_drafts_use_the_noise_of_their_target_ids() -> None:
    """A drafter of two of three tokens, otherwise the target's law: it is accepted wherever the third does not win."""
    table = law_table((0.45, 0.1, 0.45))
    kept = torch.tensor([2, 0])
    parts = make_parts(
        TableNoise(noise()),
        drafter=TableDrafter(table[:, kept], token_map=kept),
        estimator=make_estimator("constant"),
        scheduler=make_scheduler("fixed", rows=8),
        target=TableTarget(table),
    )
    made = engine(parts, slots=8)
    outputs = decode(made, [(PROMPT, params_of("T=1", seed)) for seed in range(400)])
    accepted, reached = made.stats.acceptance.accepted[0], made.stats.acceptance.reached[0]
    third = sum(out.count(1) for out in outputs) / sum(len(out) for out in outputs)
    assert accepted / reached == pytest.approx(1 - third, abs=0.05)
    assert accepted / reached > 0.85
