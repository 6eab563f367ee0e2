"""The output law of requests that begin with what others have read: exactly the target's, by enumeration.

Cells of the matrix, in a slot that holds the prefix with rejected drafts behind it, or by a copy from a request that
runs; and two requests of one prompt, of which the second takes over what the first has read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dspark.config import SamplingParams
from dspark.engine.engine import Engine
from dspark.testing import law, target_law, total_variation

from .harness import (
    PROMPT,
    SAMPLING,
    Case,
    cost_table,
    decode,
    engine,
    make_drafter,
    make_estimator,
    make_parts,
    make_scheduler,
    target,
)
from .test_matrix import everywhere, wanted

GREEDY = SamplingParams(max_tokens=5)
LONG = replace(GREEDY, max_tokens=9)
CELLS = [c for c, mine in everywhere().items() if mine and c.sampling != "greedy"][::2]
FAST = CELLS[::3]


def build(case: Case, draws: Any, slots: int) -> Engine:
    parts = make_parts(
        draws,
        drafter=make_drafter(case.drafter),
        estimator=make_estimator(case.estimator),
        scheduler=make_scheduler(case.scheduler, case.cost),
        target=target(),
        cost=cost_table(case.cost),
    )
    return engine(parts, slots=slots, prefix_min_tokens=1)


def in_place(case: Case, draws: Any) -> tuple[int, ...]:
    """A request has left the one slot: PROMPT, its output, and what was drafted for it and rejected."""
    made = build(case, draws, 1)
    decode(made, [(PROMPT, GREEDY)])
    out = decode(made, [(PROMPT, case.params)])[0]
    assert made.stats.cached_tokens == len(PROMPT) - 1
    return out


def by_copy(case: Case, draws: Any) -> tuple[int, ...]:
    """A request of another prompt that begins alike is running in the slot beside it."""
    made = build(case, draws, 2)
    made.submit((*PROMPT[:3], 1), LONG)
    while made.stats.steps < 2:
        made.step()
    out = decode_only(made, case.params)
    assert made.stats.cached_tokens == 3
    return out


def decode_only(made: Engine, params: SamplingParams) -> tuple[int, ...]:
    name = made.submit(PROMPT, params)
    return tuple(i for chunk in made.run() if chunk.request_id == name for i in chunk.ids)


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=str(c), marks=() if c in FAST else pytest.mark.slow) for c in CELLS]
)
def test_the_output_law_is_the_targets(case: Case) -> None:
    program = (in_place, by_copy)[CELLS.index(case) % 2]
    assert total_variation(law(lambda draws: program(case, draws)), wanted(case.sampling)) <= 1e-9


def test_the_cells_meet_everything() -> None:
    assert {c.drafter for c in CELLS} == {"table", "ngram", "bad"}
    assert len({c.scheduler for c in CELLS}) >= 6
    assert {c.sampling for c in CELLS} >= set(SAMPLING) - {"greedy"}


@pytest.mark.parametrize("scheduler", ["causal", "lookahead", "threshold"])
@pytest.mark.parametrize("late", [False, True], ids=["together", "later"])
def test_two_requests_of_one_prompt_are_independent(scheduler: str, late: bool) -> None:
    """The second begins with what the first has read, and neither tells of the other."""
    case = Case("table", "token", scheduler, "T=1", "rising")
    params = [replace(SAMPLING["T=1"], max_tokens=2, request_key=key) for key in (1, 2)]

    def program(draws: Any) -> tuple[tuple[int, ...], ...]:
        made = build(case, draws, 2)
        if late:  # the first has left
            outputs = tuple(decode(made, [(PROMPT, one)])[0] for one in params)
        else:
            outputs = decode(made, [(PROMPT, one) for one in params])
        assert made.stats.cached_tokens == len(PROMPT) - 1
        return outputs

    one = target_law(target().next_logits, PROMPT, replace(params[0]))
    both = {(a, b): p * q for a, p in one.items() for b, q in one.items()}
    assert total_variation(law(program), both) <= 1e-9


def test_a_prefix_that_is_too_long_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs above can fail: one position too many is one that the target never read."""
    from dspark.engine import prefix

    honest: Callable[..., int] = prefix.common
    monkeypatch.setattr(prefix, "common", lambda a, b, most: honest(a, b, most) and honest(a, b, most) + 1)
    case = Case("table", "token", "fixed", "T=1", "dip")

    def program(draws: Any) -> tuple[int, ...]:
        made = build(case, draws, 1)
        decode(made, [((*PROMPT[:2], 1, 1), GREEDY)])
        return decode(made, [(PROMPT, case.params)])[0]

    assert total_variation(law(program), wanted(case.sampling)) > 1e-3
