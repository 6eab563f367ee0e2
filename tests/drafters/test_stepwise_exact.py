"""The output law with EAGLE-3 and draft-model drafters in the real engine, by enumeration: the target's.

The same matrix as the block drafters'. Both kinds keep what they read in slots of their own, write drafts into them,
and overwrite what was rejected: what is stale must show in neither q nor acceptance.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from dspark.config import SamplingParams
from dspark.sampling.draws import CounterDraws
from dspark.testing.cheats import RetreatingLookahead, Retrospective, sps
from tests.drafters.exact import SAMPLED, SCHEDULERS, Lengths, one_round, toy_target, whole
from tests.drafters.stepwise import KINDS, StepCell, toy_stepwise
from tests.drafters.test_dspark_exact import _plain
from tests.exactness.harness import COSTS, GAMMA, SAMPLING, decode, engine, make_estimator, make_parts, make_scheduler

torch.set_num_threads(1)
ESTIMATORS = ("constant", "online", "token")


def cell(kind: str, estimator: str, scheduler: str, cost: str, sampling: str) -> StepCell:
    return StepCell(kind, True, estimator, scheduler, cost, sampling)


@cache
def rotation() -> dict[StepCell, bool]:
    """Cells for whole generations, and whether they run always: each scheduler with each kind."""
    out: dict[StepCell, bool] = {}
    for i, kind in enumerate(KINDS):
        for k, (scheduler, cost) in enumerate(SCHEDULERS):
            estimator, sampling = ESTIMATORS[(i + k // 3) % 3], SAMPLED[(2 * i + k) % len(SAMPLED)]
            out[cell(kind, estimator, scheduler, cost, sampling)] = (i + k) % 3 == 0
        for scheduler in ("fixed", "global"):
            out[cell(kind, "constant", scheduler, "dip", "greedy")] = True
    return out


def cells() -> list[Any]:
    return [pytest.param(c, id=str(c), marks=[] if mine else [pytest.mark.slow]) for c, mine in rotation().items()]


def complete(drafter: Any) -> bool:
    """No row had to do without its context."""
    left_out: int = getattr(drafter, "rows_without_context", 0) + getattr(drafter, "rows_left_out", 0)
    return left_out == 0


@pytest.mark.parametrize("one", cells())
def test_the_output_law_is_the_targets(one: StepCell) -> None:
    assert whole(one) <= 1e-9
    assert complete(one.drafter)


def test_the_cells_that_always_run_meet_everything() -> None:
    always = [c for c, mine in rotation().items() if mine]
    assert {c.head for c in always} == set(KINDS)
    assert {(c.scheduler, c.cost) for c in always} == {*SCHEDULERS, ("global", "dip")}
    assert {c.estimator for c in always} == set(ESTIMATORS)
    assert {c.sampling for c in always} == set(SAMPLING)


PRODUCT = [
    (kind, estimator, scheduler, cost)
    for kind in KINDS
    for estimator in ESTIMATORS
    for scheduler, cost in (*SCHEDULERS, ("global", "dip"))
]


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(PRODUCT)), ids=lambda i: "-".join(map(str, PRODUCT[i])))
def test_one_round_of_the_whole_product(index: int) -> None:
    """Every sampling; ``global`` is admitted for greedy requests alone."""
    kind, estimator, scheduler, cost = PRODUCT[index]
    for k, sampling in enumerate(SAMPLING if scheduler != "global" else ("greedy",)):
        one = cell(kind, estimator, scheduler, cost, sampling)
        assert one_round(one, key=1 + len(SAMPLING) * index + k) <= 1e-9, str(one)
        assert complete(one.drafter)


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_of_every_length_are_verified_and_rejected(kind: str) -> None:
    """What the enumeration passes through: each verify length, and each number of accepted drafts."""
    for run in (whole, one_round):
        seen = Lengths()
        run(cell(kind, "token", "fixed", "dip", "top_k"), observers=[seen])
        assert {(GAMMA, accepted) for accepted in range(GAMMA + 1)} <= seen.seen
    seen = Lengths()
    one_round(cell(kind, "token", "causal", "rising", "T=1"), observers=[seen])
    assert {length for length, _ in seen.seen} == {1, 2}


CHEATS = {
    "retrospective": ("dip", lambda s: Retrospective(s)),
    "retreating lookahead": ("dip", lambda s: RetreatingLookahead(s, (0.85, 0.9))),
}


@pytest.mark.parametrize("cheat", CHEATS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_matrix_catches_schedulers_that_cheat(kind: str, cheat: str) -> None:
    cost, make = CHEATS[cheat]
    one = cell(kind, "token", "off", cost, "T=1")
    assert one_round(one, scheduler=lambda: make(sps(*COSTS[cost]))) > 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_batches_and_seeds(kind: str) -> None:
    """Greedy and seeded requests give the tokens of plain decoding: alone, together, joining late, in reused slots."""
    prompts = [(0, 1, 2, 0), (2,), (1, 1, 0), (0, 2, 2, 1, 0, 1), (2, 0)]
    sampling = [
        SamplingParams(max_tokens=9, temperature=0.0 if i % 2 else 1.0, seed=None if i % 2 else 7 + i)
        for i in range(len(prompts))
    ]

    def run(slots: int, which: list[int]) -> list[tuple[int, ...]]:
        parts = make_parts(
            CounterDraws(),
            drafter=drafter,
            estimator=make_estimator("constant"),
            scheduler=make_scheduler("fixed", rows=1),
            target=target,
        )
        made = engine(parts, slots=slots, max_len=24)
        return list(decode(made, [(prompts[i], sampling[i]) for i in which]))

    target = toy_target()
    target.allocate(5, 24)
    drafter = toy_stepwise(kind, target, slots=5)
    everyone = list(range(len(prompts)))
    plain = [_plain(prompts[i], sampling[i]) for i in everyone]
    assert [run(1, [i])[0] for i in everyone] == plain
    assert run(2, everyone) == plain
    assert run(5, everyone) == plain
