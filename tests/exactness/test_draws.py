"""No random draw is used twice (METHOD section 4, rule 4): the keys of hundreds of real ``rejection`` rounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dspark.config import SamplingParams
from dspark.sampling.draws import CounterDraws
from dspark.testing import TableDrafter, TableTarget
from dspark.testing.toys import random_table
from dspark.types import DrawKeys

from .harness import build, engine, make_parts, sps_table

V, GAMMA, ROUNDS = 24, 4, 200


class Recording(CounterDraws):
    """Production draws that remember their keys, and the uniforms made of them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int, int, int]] = []
        self.values: list[float] = []

    def categorical(self, keys: DrawKeys, probs: torch.Tensor) -> torch.Tensor:
        self._note(keys)
        return super().categorical(keys, probs)

    def accept(self, keys: DrawKeys, probs: torch.Tensor) -> np.ndarray[Any, Any]:
        self._note(keys)
        return super().accept(keys, probs)

    def _note(self, keys: DrawKeys) -> None:
        rows = zip(keys.request.tolist(), keys.anchor.tolist(), keys.offset.tolist(), strict=True)
        self.seen += [(r, a, o, int(keys.purpose)) for r, a, o in rows]
        self.values += CounterDraws.uniforms(keys).tolist()


def record(prompts: Sequence[Sequence[int]], seed: int = 1) -> tuple[Recording, int]:
    """Decode until ROUNDS rounds of single requests are done; requests come and go in four slots."""
    draws = Recording()
    table = random_table(V, V, seed=51, scale=1.0)
    parts = make_parts(
        draws,
        drafter=TableDrafter(table + random_table(V, V, seed=52, scale=0.5), gamma=GAMMA),
        estimator=build("confidence", "online", V, GAMMA),
        scheduler=build("scheduling", "lookahead", V, GAMMA),
        target=TableTarget(table),
        cost=sps_table([1.0 / (1.0 + 0.02 * n) for n in range(1, 64)]),
        gamma=GAMMA,
    )
    made = engine(parts, slots=4, max_len=64, seed=seed)
    params = SamplingParams(temperature=1.0, max_tokens=20)
    waiting = list(prompts)
    while made.stats.acceptance.rounds < ROUNDS:
        while len(made.live()) < 6:
            made.submit(waiting[len(draws.seen) % len(waiting)], params)
        made.step()
    return draws, made.stats.acceptance.rounds


PROMPTS = ([1, 2, 3], [1, 2, 3], [4], [5, 6, 7, 8])


def test_no_key_repeats_over_200_rounds() -> None:
    draws, rounds = record(PROMPTS)
    repeated = [key for key, count in Counter(draws.seen).items() if count > 1]
    assert rounds >= ROUNDS
    assert len(draws.seen) > 4 * rounds
    assert repeated == []
    assert {purpose for *_, purpose in draws.seen} == {1, 2, 3}


def test_no_two_draws_share_their_uniform() -> None:
    """Distinct keys make distinct randomness: a hash that dropped the anchor or the purpose would repeat values."""
    draws, _ = record(PROMPTS)
    assert len(set(draws.values)) == len(draws.values)


def test_keys_hold_across_engines_of_one_seed_and_differ_between_seeds() -> None:
    first, second, other = (record(PROMPTS, seed)[0].seen for seed in (1, 1, 2))
    assert first == second
    assert not set(first) & set(other)
