"""Two requests at V = 2 in one batch: their joint law is the product of the target's, whatever they share."""

from __future__ import annotations

from functools import cache
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


def made_engine(draws: Any, scheduler: Any, *, ragged: bool = True) -> Any:
    parts = make_parts(
        draws,
        drafter=TableDrafter(random_table(2, 2, seed=12, scale=0.7)),
        estimator=TableEstimator(CONFIDENCE),
        scheduler=scheduler,
        target=two_target(ragged),
        cost=sps_table(RATES),
    )
    return engine(parts, slots=2)


def requests(tokens: int) -> list[tuple[tuple[int, ...], SamplingParams]]:
    params = [SamplingParams(temperature=1.0, max_tokens=tokens, request_key=key) for key in (1, 2)]
    return list(zip(PROMPTS, params, strict=True))


def program(make_scheduler: Any, *, tokens: int = 3, ragged: bool = True) -> Any:
    """Both requests to their ends."""
    return lambda draws: decode(made_engine(draws, make_scheduler(), ragged=ragged), requests(tokens))


def one_round(make_scheduler: Any, *, ragged: bool = True, tokens: int = 3) -> dict[Any, float]:
    """Law of ``tokens`` tokens of both requests: one round of the engine, the rest from the target's table."""

    def run(draws: Any) -> tuple[tuple[int, ...], ...]:
        made = made_engine(draws, make_scheduler(), ragged=ragged)
        names = [made.submit(prompt, params) for prompt, params in requests(tokens)]
        ids = {chunk.request_id: chunk.ids for chunk in made.step()}
        return tuple(ids[name] for name in names)

    joint: dict[Any, float] = {}
    for starts, mass in law(run).items():
        for first, p in completed(PROMPTS[0], starts[0], tokens).items():
            for second, q in completed(PROMPTS[1], starts[1], tokens).items():
                joint[first, second] = joint.get((first, second), 0.0) + mass * p * q
    return joint


@cache
def completed(prompt: tuple[int, ...], start: tuple[int, ...], tokens: int) -> dict[tuple[int, ...], float]:
    if len(start) == tokens:
        return {start: 1.0}
    params = SamplingParams(temperature=1.0, max_tokens=tokens - len(start))
    rest = target_law(two_target().next_logits, (*prompt, *start), params)
    return {(*start, *tail): p for tail, p in rest.items()}


def wanted(tokens: int = 3) -> dict[tuple[tuple[int, ...], ...], float]:
    params = SamplingParams(temperature=1.0, max_tokens=tokens)
    first, second = (target_law(two_target().next_logits, p, params) for p in PROMPTS)
    return {(a, b): p * q for a, p in first.items() for b, q in second.items()}


def honest(name: str) -> Any:
    settings = {"threshold": {"threshold": 0.5}}.get(name, {})
    made = build("scheduling", name, vocab_size=2, **settings)
    return seed_history(made, sps_table(RATES), rows=2, gamma=2)


SHIPPED = ("causal", "lookahead", "lagged", "fixed", "threshold", "off")


@pytest.mark.parametrize("name", SHIPPED)
def test_the_joint_law_of_one_round(name: str) -> None:
    assert total_variation(one_round(lambda: honest(name)), wanted()) <= 1e-9


@pytest.mark.filterwarnings("ignore:ragged-padding")
@pytest.mark.parametrize("name", ["causal", "lookahead", "lagged"])
def test_the_joint_law_where_the_longest_is_verified_for_all(name: str) -> None:
    """A target without ragged batches: padding up to the longest scheduled length anticipates nothing."""
    assert total_variation(one_round(lambda: honest(name), ragged=False), wanted()) <= 1e-9


@pytest.mark.parametrize("name", ["causal", *(pytest.param(n, marks=pytest.mark.slow) for n in SHIPPED[1:])])
def test_the_joint_law_is_the_product(name: str) -> None:
    assert total_variation(law(program(lambda: honest(name))), wanted()) <= 1e-9


@pytest.mark.parametrize(
    "cheat",
    [MinOverRequests, lambda inner: BucketDown(inner, (2, 4, 8))],
    ids=["minimum over requests", "bucket rounded down"],
)
def test_an_edited_plan_is_caught(cheat: Any) -> None:
    biased = one_round(lambda: cheat(CausalReference(sps(*RATES))))
    assert total_variation(biased, wanted()) > 1e-3
