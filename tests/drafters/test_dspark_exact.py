"""The output law with DSpark and DFlash drafters in the real engine, by enumeration: the target's, whatever the head.

Every draw of a whole generation is branched on. The drafters read the target's features through their own cache, so a
stale entry, a misplaced feature or a q that was not sampled from moves the law or the acceptance.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from dspark.confidence.linear import LinearConfidence
from dspark.config import SamplingParams
from dspark.testing import law, target_law, total_variation
from dspark.testing.toys import random_table
from dspark.types import Mode
from tests.drafters.toys import FeatureTarget, toy_drafter
from tests.exactness.harness import (
    PROMPT,
    SAMPLING,
    TOKENS,
    cost_table,
    decode,
    engine,
    make_estimator,
    make_parts,
    make_scheduler,
)

torch.set_num_threads(1)

HEADS = ("markov", "gated", "rnn", "none")
ESTIMATORS = ("linear", "token", "online", "constant")
SCHEDULERS = (
    *((name, cost) for name in ("causal", "lookahead", "lagged") for cost in ("rising", "dip")),
    *((name, "dip") for name in ("fixed", "threshold", "off")),
)
SAMPLED = tuple(name for name in SAMPLING if name != "greedy")


def cells() -> list[Any]:
    """(head, anchor-first, estimator, (scheduler, cost), sampling, candidates); a third of them runs always."""
    out = []
    for i, head in enumerate(HEADS):
        names = ESTIMATORS if head != "none" else ESTIMATORS[1:]
        for anchor_first in (True, False):
            for k, scheduler in enumerate(SCHEDULERS):
                turn = 2 * i + anchor_first + k
                estimator, sampling = names[turn % len(names)], SAMPLED[(turn + k) % len(SAMPLED)]
                cell = (head, anchor_first, estimator, scheduler, sampling, 2 if turn % 5 == 0 else None)
                out.append(cell if turn % 3 == 0 else pytest.param(cell, marks=pytest.mark.slow))
            out.append((head, anchor_first, "constant", ("fixed", "dip"), "greedy", None))
    return out


def toy_target() -> FeatureTarget:
    return FeatureTarget(random_table(4, 3, 3, seed=1, scale=1.0), mix=0.4)


@cache
def wanted(sampling: str) -> dict[tuple[int, ...], float]:
    return target_law(toy_target().next_logits, PROMPT, parameters(sampling))


def parameters(sampling: str) -> SamplingParams:
    import dataclasses

    return dataclasses.replace(SAMPLING[sampling], max_tokens=TOKENS, request_key=1)


def estimator_of(name: str, drafter: Any) -> Any:
    if name == "linear":
        weights = drafter.confidence_weights
        return LinearConfidence(weights["weight"] * 4, weights["bias"])
    return make_estimator(name)


@pytest.mark.parametrize("cell", cells(), ids=lambda cell: "-".join(map(str, cell)))
def test_the_output_law_is_the_targets(cell: tuple[Any, ...]) -> None:
    head, anchor_first, estimator, (scheduler, cost), sampling, candidates = cell
    drafter = toy_drafter(head, toy_target(), anchor_first=anchor_first, candidates=candidates)

    def run(draws: Any) -> tuple[int, ...]:
        parts = make_parts(
            draws,
            drafter=drafter,
            estimator=estimator_of(estimator, drafter),
            scheduler=make_scheduler(scheduler, cost),
            target=toy_target(),
            cost=cost_table(cost),
        )
        return decode(engine(parts), [(PROMPT, parameters(sampling))])[0]

    assert total_variation(law(run), wanted(sampling)) <= 1e-9
    assert drafter.rows_without_context == 0


def test_the_cells_that_always_run_meet_everything() -> None:
    always = [c for c in cells() if not hasattr(c, "marks")]
    assert {(c[0], c[1]) for c in always} == {(head, first) for head in HEADS for first in (True, False)}
    assert {c[3] for c in always} == set(SCHEDULERS)
    assert {c[2] for c in always} == set(ESTIMATORS)
    assert {c[4] for c in always} == set(SAMPLING)
    assert {c[5] for c in always} == {None, 2}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("anchor_first", [True, False])
def test_batches_and_seeds(head: str, anchor_first: bool) -> None:
    """Greedy and seeded requests give the tokens of plain decoding: alone, together, joining late, in reused slots."""
    from dspark.sampling.draws import CounterDraws

    prompts = [(0, 1, 2, 0), (2,), (1, 1, 0), (0, 2, 2, 1, 0, 1), (2, 0)]
    sampling = [
        SamplingParams(max_tokens=9, temperature=0.0 if i % 2 else 1.0, seed=None if i % 2 else 7 + i)
        for i in range(len(prompts))
    ]

    def run(slots: int, drafter: Any, which: list[int]) -> list[tuple[int, ...]]:
        parts = make_parts(
            CounterDraws(),
            drafter=drafter,
            estimator=make_estimator("constant"),
            scheduler=make_scheduler("fixed", rows=1),
            target=toy_target(),
        )
        made = engine(parts, slots=slots, max_len=24)
        return list(decode(made, [(prompts[i], sampling[i]) for i in which]))

    drafter = toy_drafter(head, toy_target(), anchor_first=anchor_first)
    everyone = list(range(len(prompts)))
    alone = [run(1, drafter, [i])[0] for i in everyone]
    assert run(2, drafter, everyone) == alone
    assert run(5, drafter, everyone) == alone
    none = [_plain(prompts[i], sampling[i]) for i in everyone]
    assert alone == none


def _plain(prompt: tuple[int, ...], params: SamplingParams) -> tuple[int, ...]:
    """One-by-one argmax of log p (and shared noise): what greedy and ``coupled`` must give."""
    import numpy as np

    from dspark.sampling.draws import CounterDraws

    ids, target = list(prompt), toy_target()
    for _ in range(params.max_tokens):
        logits = target.next_logits(ids).double()
        if params.mode is Mode.COUPLED:
            seed = np.array([params.seed], dtype=np.uint64)
            noise = CounterDraws().gumbel(seed, np.array([len(ids)]), 3)[0]
            logits = logits.log_softmax(-1) + noise
        ids.append(int(logits.argmax()))
    return tuple(ids[len(prompt) :])
