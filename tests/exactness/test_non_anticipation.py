"""METHOD section 4, rule 1, on the lengths that enter packing: what lies beyond l_r + 1 decides nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from dspark.config import SamplingParams
from dspark.sampling.draws import CounterDraws
from dspark.testing import TableDrafter, TableEstimator, TableTarget
from dspark.testing.cheats import BucketDown, CausalReference, MinOverRequests, Retrospective, VetoingGuard, sps
from dspark.testing.toys import random_table

from .harness import build, engine, make_parts, seed_history, sps_table

V, GAMMA = 4, 4
STAIRS = tuple(1.0 / (1.0 + 0.15 * n + 0.9 * (n // 6)) for n in range(1, 64))
SMOOTH = tuple(1.0 / (4.0 + 0.8 * n) for n in range(1, 64))
STEEP = tuple(1.0 / (1.0 + 0.35 * n) for n in range(1, 64))


class Given(TableEstimator):
    """c as given, whatever was drafted."""

    def __init__(self, probs: np.ndarray[Any, Any]) -> None:
        super().__init__([[0.0]])
        self.probs = probs

    def estimate(self, batch: Any, draft: Any) -> np.ndarray[Any, Any]:
        return self.probs.copy()


def packed_lengths(make_scheduler: Any, rates: tuple[float, ...], probs: Any, *, ragged: bool = True) -> Any:
    """The lengths of the first round of R requests whose budgets, prompts and hence caps differ."""
    rows = len(probs)
    target = TableTarget(random_table(V, V, seed=61), ragged=ragged)
    parts = make_parts(
        CounterDraws(),
        drafter=TableDrafter(random_table(V, V, seed=62), gamma=GAMMA),
        estimator=Given(np.asarray(probs)),
        scheduler=make_scheduler(rows),
        target=target,
        cost=sps_table(rates),
        gamma=GAMMA,
    )
    made = engine(parts, slots=rows, max_len=32, seed=4)
    prompts = [[1] * (1 + r) for r in range(rows)]
    for r, prompt in enumerate(prompts):
        params = SamplingParams(temperature=1.0, max_tokens=3 + 2 * (r % 3))
        made.submit(prompt, dataclasses.replace(params, temperature=0.0) if r == 2 else params)
    made.step()
    return np.array(target.forwards[0]) - [len(p) for p in prompts]


def violations(make_scheduler: Any, rates: tuple[float, ...], *, trials: int, ragged: bool = True) -> int:
    rng = np.random.default_rng(17)
    broken = 0
    for trial in range(trials):
        rows = 1 + trial % 3
        probs = rng.choice([0.0, 0.3, 0.6, 0.8, 0.9, 0.95, 1.0], size=(rows, GAMMA))
        probs = np.where(rng.random(probs.shape) < 0.5, probs, rng.random(probs.shape))
        lens = packed_lengths(make_scheduler, rates, probs, ragged=ragged)
        beyond = np.arange(GAMMA)[None, :] > lens[:, None]
        for fill in (0.0, 1.0, rng.random(probs.shape)):
            other = packed_lengths(make_scheduler, rates, np.where(beyond, fill, probs), ragged=ragged)
            broken += not np.array_equal(lens, other)
    return broken


def shipped(name: str, rates: tuple[float, ...]) -> Any:
    settings = {"threshold": {"threshold": 0.6}}.get(name, {})

    def make(rows: int) -> Any:
        made = build("scheduling", name, V, GAMMA, **settings)
        return seed_history(made, sps_table(rates), rows=rows, gamma=GAMMA)

    return make


@pytest.mark.parametrize("rates", [STAIRS, SMOOTH, STEEP], ids=["stairs", "smooth", "steep"])
@pytest.mark.parametrize("name", ["causal", "lookahead", "lagged", "fixed", "threshold", "off"])
def test_what_ships_never_anticipates(name: str, rates: tuple[float, ...]) -> None:
    assert violations(shipped(name, rates), rates, trials=30) == 0


@pytest.mark.parametrize("name", ["causal", "lookahead", "lagged"])
def test_padding_to_the_longest_does_not_anticipate(name: str) -> None:
    assert violations(shipped(name, STAIRS), STAIRS, trials=30, ragged=False) == 0


CHEATS = {
    "global": (lambda s, rows: build("scheduling", "global", V, GAMMA), STAIRS),
    "retrospective": (lambda s, rows: Retrospective(s), STAIRS),
    "guard": (lambda s, rows: VetoingGuard(CausalReference(s), s, 1.15), SMOOTH),
    "minimum": (lambda s, rows: MinOverRequests(CausalReference(s)), SMOOTH),
    "bucket": (lambda s, rows: BucketDown(CausalReference(s), (2, 4, 8, 16)), SMOOTH),
}


@pytest.mark.parametrize("name", CHEATS)
@pytest.mark.filterwarnings("ignore:lossless")
def test_the_property_catches_cheats(name: str) -> None:
    """The same trials, over the same packing: every cheat breaks the property somewhere."""
    make, rates = CHEATS[name]
    assert violations(lambda rows: make(sps(*rates), rows), rates, trials=60) > 0
