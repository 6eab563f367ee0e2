"""Two requests at V = 2 in one batch: their joint law is the product of the target's, whatever they share."""

from __future__ import annotations

from typing import Any

import pytest

from dspark.config import SamplingParams
from dspark.testing import TableDrafter, TableEstimator, TableTarget, law, target_law, total_variation
from dspark.testing.cheats import BucketDown, CausalReference, MinOverRequests, sps
from dspark.testing.toys import random_table

from .harness import build, decode, engine, make_parts, seed_history, sps_table

# Seconds at 1, 2, .. tokens. With c below, Algorithm 1 ends at l = (1, 0) after x_1 = 1 in row 0, at (2, 1) after 0.
SECONDS = (0.7, 0.8, 1.0, 1.285, 1.5, 3.0)
RATES = tuple(1.0 / s for s in SECONDS)
CONFIDENCE = ((0.9, 0.8), (0.95, 0.02))
PROMPTS = ((0,), (1,))


def two_target(ragged: bool = True) -> TableTarget:
    return TableTarget(random_table(3, 2, 2, seed=11, scale=0.8), mix=0.3, ragged=ragged)


def program(make_scheduler: Any, *, tokens: int = 3, ragged: bool = True) -> Any:
    def run(draws: Any) -> tuple[tuple[int, ...], ...]:
        parts = make_parts(
            draws,
            drafter=TableDrafter(random_table(2, 2, seed=12, scale=0.7)),
            estimator=TableEstimator(CONFIDENCE),
            scheduler=make_scheduler(),
            target=two_target(ragged),
            cost=sps_table(RATES),
        )
        params = [SamplingParams(temperature=1.0, max_tokens=tokens, request_key=key) for key in (1, 2)]
        return decode(engine(parts, slots=2), list(zip(PROMPTS, params, strict=True)))

    return run


def wanted(tokens: int = 3) -> dict[tuple[tuple[int, ...], ...], float]:
    params = SamplingParams(temperature=1.0, max_tokens=tokens)
    first, second = (target_law(two_target().next_logits, p, params) for p in PROMPTS)
    return {(a, b): p * q for a, p in first.items() for b, q in second.items()}


def honest(name: str) -> Any:
    settings = {"threshold": {"threshold": 0.5}}.get(name, {})
    made = build("scheduling", name, vocab_size=2, **settings)
    return seed_history(made, sps_table(RATES), rows=2, gamma=2)


@pytest.mark.parametrize("name", ["fixed", "causal", "lookahead", "lagged", "threshold", "off"])
def test_the_joint_law_of_two_tokens(name: str) -> None:
    assert total_variation(law(program(lambda: honest(name), tokens=2)), wanted(2)) <= 1e-9


@pytest.mark.parametrize(
    "name",
    [
        "causal",
        "lookahead",
        "lagged",
        pytest.param("threshold", marks=pytest.mark.slow),
        pytest.param("fixed", marks=pytest.mark.slow),
        pytest.param("off", marks=pytest.mark.slow),
    ],
)
def test_the_joint_law_is_the_product(name: str) -> None:
    assert total_variation(law(program(lambda: honest(name))), wanted()) <= 1e-9


def test_the_joint_law_is_the_product_where_the_longest_is_verified_for_all() -> None:
    """A target without ragged batches: padding up to the longest scheduled length anticipates nothing."""
    assert total_variation(law(program(lambda: honest("causal"), ragged=False)), wanted()) <= 1e-9


@pytest.mark.parametrize(
    "cheat",
    [MinOverRequests, lambda inner: BucketDown(inner, (2, 4, 8))],
    ids=["minimum over requests", "bucket rounded down"],
)
def test_an_edited_plan_is_caught(cheat: Any) -> None:
    biased = law(program(lambda: cheat(CausalReference(sps(*RATES)))))
    assert total_variation(biased, wanted()) > 1e-3
