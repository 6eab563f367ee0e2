"""The output law with DSpark and DFlash drafters in the real engine, by enumeration: the target's, whatever the head.

The drafters read the target's features through their own cache, so a stale entry, a misplaced feature or a q that was
not sampled from moves the law or the acceptance. Whole generations run for a rotation of the matrix; the full product
(``slow``) enumerates one round after a drafted one, which is exact whatever the round before was.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from dspark.config import SamplingParams
from dspark.plugins.kinds import Kind
from dspark.plugins.manager import load_plugins
from dspark.sampling.draws import CounterDraws
from dspark.testing.cheats import RetreatingLookahead, Retrospective, sps
from dspark.types import Mode
from tests.drafters.exact import ESTIMATORS, HEADS, SAMPLED, SCHEDULERS, Cell, Lengths, one_round, toy_target, whole
from tests.drafters.toys import toy_drafter
from tests.exactness.harness import COSTS, GAMMA, SAMPLING, decode, engine, make_estimator, make_parts, make_scheduler

LAYOUTS = (True, False)
WIDE = ("T=1", "T=.7", "penalties")
"""Samplings that keep all three tokens."""
SHORT = (("off", "dip"), ("causal", "dip"))
"""Schedules that verify no draft here: most rounds, hence most paths. Where all tokens are likely, two are drafted."""


def estimators(head: str) -> tuple[str, ...]:
    """All of them; ``linear`` is a part of the checkpoint, which DFlash's do not have."""
    return ESTIMATORS if head != "none" else ESTIMATORS[:-1]


@cache
def rotation() -> dict[Cell, bool]:
    """Cells for whole generations, and whether they run always: each scheduler with each head and layout."""
    out: dict[Cell, bool] = {}
    for i, head in enumerate(HEADS):
        names = estimators(head)
        for anchor_first in LAYOUTS:
            for k, (scheduler, cost) in enumerate(SCHEDULERS):
                turn = 2 * i + anchor_first + k
                estimator, sampling = names[turn % len(names)], SAMPLED[(turn + k) % len(SAMPLED)]
                kept = 2 if turn % 2 == 0 or (sampling in WIDE and (scheduler, cost) in SHORT) else None
                out[Cell(head, anchor_first, estimator, scheduler, cost, sampling, kept)] = turn % 3 == 0
            for scheduler in ("fixed", "global"):
                out[Cell(head, anchor_first, "constant", scheduler, "dip", "greedy")] = True
    return out


def cells() -> list[Any]:
    return [
        pytest.param(cell, id=str(cell), marks=[] if always else [pytest.mark.slow])
        for cell, always in rotation().items()
    ]


@pytest.mark.parametrize("cell", cells())
def test_the_output_law_is_the_targets(cell: Cell) -> None:
    assert whole(cell) <= 1e-9
    assert cell.drafter.rows_without_context == 0


def test_the_cells_that_always_run_meet_everything() -> None:
    always = [cell for cell, mine in rotation().items() if mine]
    assert {(c.head, c.anchor_first) for c in always} == {(head, first) for head in HEADS for first in LAYOUTS}
    assert {(c.scheduler, c.cost) for c in always} == {*SCHEDULERS, ("global", "dip")}
    assert {c.estimator for c in always} == set(ESTIMATORS)
    assert {c.sampling for c in always} == set(SAMPLING)
    assert {c.candidates for c in always} == {None, 2}


PRODUCT = [
    (head, anchor_first, estimator, scheduler, cost)
    for head in HEADS
    for anchor_first in LAYOUTS
    for estimator in estimators(head)
    for scheduler, cost in (*SCHEDULERS, ("global", "dip"))
]


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(PRODUCT)), ids=lambda i: "-".join(map(str, PRODUCT[i])))
def test_one_round_of_the_whole_product(index: int) -> None:
    """Every sampling. ``global`` is admitted for greedy requests alone; candidates alternate over the product."""
    head, anchor_first, estimator, scheduler, cost = PRODUCT[index]
    for k, sampling in enumerate(SAMPLING if scheduler != "global" else ("greedy",)):
        kept = 2 if (index + k) % 2 else None
        cell = Cell(head, anchor_first, estimator, scheduler, cost, sampling, kept)
        assert one_round(cell, key=1 + len(SAMPLING) * index + k) <= 1e-9, str(cell)
        assert cell.drafter.rows_without_context == 0


def test_the_matrix_meets_every_scheduler_that_ships() -> None:
    shipped = [r for r in load_plugins().catalog.of(Kind.SCHEDULER) if r.dist == "dspark"]
    assert {r.name for r in shipped if not r.capabilities.anticipates} == {name for name, _ in SCHEDULERS}
    assert {r.name for r in shipped if r.capabilities.anticipates} == {"global"}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("anchor_first", LAYOUTS)
def test_drafts_of_every_length_are_verified_and_rejected(head: str, anchor_first: bool) -> None:
    """What the enumeration passes through: each verify length, and each number of accepted drafts."""
    fixed = Cell(head, anchor_first, "token", "fixed", "dip", "top_k")
    for run in (whole, one_round):
        seen = Lengths()
        run(fixed, observers=[seen])
        assert {(GAMMA, accepted) for accepted in range(GAMMA + 1)} <= seen.seen
    seen = Lengths()
    one_round(Cell(head, anchor_first, "token", "causal", "rising", "T=1"), observers=[seen])
    assert {length for length, _ in seen.seen} == {1, 2}


CHEATS = {
    "retrospective": ("dip", lambda s: Retrospective(s)),
    "retreating lookahead": ("dip", lambda s: RetreatingLookahead(s, (0.85, 0.9))),
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_the_matrix_catches_schedulers_that_cheat(cheat: str) -> None:
    cost, make = CHEATS[cheat]
    cell = Cell("gated", True, "token", "off", cost, "T=1")
    assert whole(cell, scheduler=lambda: make(sps(*COSTS[cost]))) > 1e-3
    assert one_round(cell, scheduler=lambda: make(sps(*COSTS[cost]))) > 1e-3


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("anchor_first", [True, False])
def test_batches_and_seeds(head: str, anchor_first: bool) -> None:
    """Greedy and seeded requests give the tokens of plain decoding: alone, together, joining late, in reused slots."""
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
    ids, target = list(prompt), toy_target()
    for _ in range(params.max_tokens):
        logits = target.next_logits(ids).double()
        if params.mode is Mode.COUPLED:
            seed = np.array([params.seed], dtype=np.uint64)
            noise = CounterDraws().gumbel(seed, np.array([len(ids)]), 3)[0]
            logits = logits.log_softmax(-1) + noise
        ids.append(int(logits.argmax()))
    return tuple(ids[len(prompt) :])
