"""The output law of three tokens, exactly, for every admitted combination: total variation to the target's under 1e-9.

One cell decodes PROMPT by the real engine, once for each way that its draws can fall. The full matrix is ``slow``; a
subset that meets every drafter, estimator, scheduler, cost table and sampling runs always, and so do the cheats that
the matrix must catch.
"""

from __future__ import annotations

from functools import cache

import pytest

from dspark.plugins.kinds import Kind
from dspark.plugins.manager import load_plugins
from dspark.testing import law, target_law, total_variation
from dspark.testing.cheats import CausalReference, RetreatingLookahead, Retrospective, VetoingGuard, sps
from dspark.testing.toys import TableEstimator

from .harness import COSTS, PROMPT, SAMPLING, TOKEN_C, Case, target
from .test_coupled import SHIPPED

DRAFTERS = ("table", "ngram", "bad")
ESTIMATORS = ("constant", "online", "token")
SCHEDULERS = (
    *((name, cost) for name in ("causal", "lookahead", "lagged") for cost in ("rising", "dip")),
    *((name, "dip") for name in ("fixed", "threshold", "off")),
)
SAMPLED = tuple(name for name in SAMPLING if name != "greedy")


def everywhere() -> dict[Case, bool]:
    """Every cell, and whether it belongs to the subset."""
    cells: dict[Case, bool] = {}
    for j, drafter in enumerate(DRAFTERS):
        for m, estimator in enumerate(ESTIMATORS):
            for k, (scheduler, cost) in enumerate(SCHEDULERS):
                for sampling in SAMPLING:
                    diagonal = m == (j + k) % 3 and sampling == SAMPLED[(k + 2 * j) % 6]
                    adverse = sampling == "T=1" and drafter == "table" and estimator == "token"
                    chosen = diagonal or adverse or sampling == "greedy"
                    cells[Case(drafter, estimator, scheduler, sampling, cost)] = chosen
            cells[Case(drafter, estimator, "global", "greedy", "dip")] = True
    return cells


@cache
def wanted(sampling: str) -> dict[tuple[int, ...], float]:
    params = Case("table", "token", "off", sampling).params
    return target_law(target().next_logits, PROMPT, params)


def distance(case: Case, **program: object) -> float:
    return total_variation(law(case.program(**program)), wanted(case.sampling))  # type: ignore[arg-type]


def cells(chosen: bool) -> list[object]:
    return [pytest.param(case, id=str(case)) for case, mine in everywhere().items() if mine is chosen]


@pytest.mark.parametrize("case", cells(True))
def test_the_output_law_is_the_targets(case: Case) -> None:
    assert distance(case) <= 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("case", cells(False))
def test_the_output_law_is_the_targets_everywhere(case: Case) -> None:
    assert distance(case) <= 1e-9


def test_the_subset_meets_everything() -> None:
    chosen = [case for case, mine in everywhere().items() if mine and case.sampling != "greedy"]
    assert {c.drafter for c in chosen} == set(DRAFTERS)
    assert {c.estimator for c in chosen} == set(ESTIMATORS)
    assert {(c.scheduler, c.cost) for c in chosen} == set(SCHEDULERS)
    assert {(c.drafter, c.sampling) for c in chosen} >= {(d, s) for d in DRAFTERS for s in SAMPLED}


def test_the_matrix_meets_every_scheduler_that_ships() -> None:
    """A scheduler that is added must be proven: ``rejection``'s here, retrospective ones path by path."""
    shipped = [r for r in load_plugins().catalog.of(Kind.SCHEDULER) if r.dist == "dspark"]
    admitted = {r.name for r in shipped if not r.capabilities.anticipates}
    assert admitted == {name for name, _ in SCHEDULERS}
    assert {r.name for r in shipped} == set(SHIPPED)


CHEATS = {
    "retrospective": ("dip", lambda s: Retrospective(s)),
    "retreating lookahead": ("dip", lambda s: RetreatingLookahead(s, (0.85, 0.9))),
    "vetoing guard": ("rising", lambda s: VetoingGuard(CausalReference(s), s, gain=1.2)),
}


@pytest.mark.parametrize("sampling", ["T=1", "penalties"])
@pytest.mark.parametrize("cheat", CHEATS)
def test_the_matrix_catches_schedulers_that_cheat(cheat: str, sampling: str) -> None:
    cost, make = CHEATS[cheat]
    case = Case("table", "token", "off", sampling, cost)
    assert distance(case, scheduler=lambda: make(sps(*COSTS[cost]))) > 1e-3


def test_the_cheats_run_where_honest_schedulers_are_exact() -> None:
    """The same programs with the honest scheduler that each cheat is made of."""
    case = Case("table", "token", "off", "T=1", "rising")
    assert distance(case, scheduler=lambda: CausalReference(sps(*COSTS["rising"]))) <= 1e-9


def test_the_matrix_catches_an_estimator_that_reads_what_it_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    from . import harness

    monkeypatch.setattr(harness, "make_estimator", lambda kind: _Liar(TOKEN_C[1:] + TOKEN_C[:1]))
    case = Case("table", "token", "causal", "T=1", "rising")
    assert distance(case) > 1e-3


class _Liar(TableEstimator):
    """Reads x_k for c_k, and declares nothing of it."""

    def __init__(self, table: object) -> None:
        super().__init__(table, reads_ahead=True)  # type: ignore[arg-type]
        self.capabilities = type(self.capabilities)()
