"""What a scheduler is held to."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np

from dspark._sched import CostTable
from dspark.plugins import Kind
from dspark.testing.cheats import schedule_input
from dspark.testing.contracts import NotApplicable, Seen, contract
from dspark.testing.pipeline import HISTORY, check_law, cost_table, make_parts, sps_table
from dspark.testing.suite import ComponentSuite
from dspark.types import FloatArray, IntArray, ScheduleInput, VerifyPlan

TABLES = {
    "stairs": tuple(1.0 / (1.0 + 0.15 * n + 0.9 * (n // 6)) for n in range(1, 64)),
    "smooth": tuple(1.0 / (4.0 + 0.8 * n) for n in range(1, 64)),
    "steep": tuple(1.0 / (1.0 + 0.35 * n) for n in range(1, 64)),
    "jagged": tuple(1.0 / (2.0 + 0.1 * n + (1.6 if n % 4 == 2 else 0.0)) for n in range(1, 64)),
    "Appendix A": (1.0, 0.5, 0.45, 0.40, 0.38, 0.36, 0.35, 0.34),
}
"""Steps per second by executed tokens: what makes early stopping, walking over dips and retreating pay in turn."""

LEVELS = (0.0, 0.3, 0.6, 0.8, 0.9, 0.95, 1.0)


class SchedulerSuite(ComponentSuite):
    """Holds a scheduler to ``dspark.protocols.VerifyScheduler``.

    Attributes:
        gamma: the largest block size tried.
        trials: random confidences for each cost table.
    """

    kind: ClassVar[Kind] = Kind.SCHEDULER
    gamma: int = 4
    trials: int = 40

    def scheduler(self, cost: CostTable | None, rows: int, gamma: int) -> Any:
        """A scheduler whose averages have begun: two equal ones each time."""
        made = self.build()
        if made.capabilities.needs_cost and cost is None:
            return made
        for seen in HISTORY:
            made.plan(schedule_input(np.tile(np.resize(np.array(seen), gamma), (rows, 1))), cost)
        return made

    def examples(self, purpose: str) -> Iterator[tuple[str, CostTable, FloatArray]]:
        """(name of a cost table, the table, c [R, gamma]): random, with ties and certainties, small ones first."""
        rng = self.random(purpose)
        for name, rates in TABLES.items():
            table = sps_table(rates)
            for trial in range(self.trials):
                rows, gamma = 1 + trial % 3, 1 + trial % self.gamma
                probs = rng.choice(LEVELS, size=(rows, gamma))
                yield name, table, np.where(rng.random(probs.shape) < 0.5, probs, rng.random(probs.shape))

    def lens(self, cost: CostTable | None, batch: ScheduleInput) -> IntArray:
        """Lengths that a scheduler with two rounds of history plans."""
        rows, gamma = batch.probs.shape
        plan = self.scheduler(cost, rows, gamma).plan(batch, cost)
        return np.array(plan.verify_lens)

    @contract("a plan has integers from 0 to max_lens [R], its expected tokens, a throughput or NaN, and a reason")
    def test_plans(self) -> None:
        for name, table, probs in self.examples("plans"):
            rng = self.random(f"limits {probs.shape}")
            limits = rng.integers(0, probs.shape[1] + 1, size=len(probs)).tolist()
            batch = schedule_input(probs, max_lens=limits, base_tokens=len(probs) + int(rng.integers(0, 5)))
            plan = self.scheduler(table, *probs.shape).plan(batch, table)
            _check_plan(plan, batch, {"cost_table": name, "c": probs, "max_lens": limits})

    @contract("it plans for what is rare: no room, no hope, certainty, ties, one row, a prompt in the same step")
    def test_edges(self) -> None:
        table = sps_table(TABLES["stairs"])
        for probs, limits, base in (
            ([[0.0, 0.0]], [2], 1),
            ([[1.0, 1.0]], [2], 1),
            ([[0.5, 0.5], [0.5, 0.5]], [2, 2], 2),
            ([[0.9, 0.9]], [0], 1),
            ([[0.9, 0.9]], [2], 40),
            ([[0.9]], [1], 1),
        ):
            batch = schedule_input(probs, max_lens=limits, base_tokens=base)
            self.case = {"c": probs, "max_lens": limits, "base_tokens": base}
            plan = self.scheduler(table, len(probs), len(probs[0])).plan(batch, table)
            _check_plan(plan, batch, self.case)

    @contract("without `needs_cost` it plans without a cost table")
    def test_without_a_cost_table(self) -> None:
        made = self.build()
        if made.capabilities.needs_cost:
            raise NotApplicable("it declares needs_cost=True; the engine then verifies a fixed length")
        batch = schedule_input([[0.9, 0.4], [0.7, 0.2]])
        _check_plan(made.plan(batch, None), batch, {"c": batch.probs, "cost": None})

    @contract("l_r >= k is decided by x_{<k} and admitted tokens: what lies beyond l_r + 1 changes no length (rule 1)")
    def test_non_anticipation(self) -> None:
        if self.build().capabilities.anticipates:
            raise NotApplicable("it declares anticipates=True, and is refused with `rejection`")
        for name, table, probs in self.examples("anticipation"):
            found = self._anticipates(table, probs)
            if found is not None:
                smaller, changed = shrunk(probs, lambda c, t=table: self._anticipates(t, c))  # type: ignore[misc]
                before, after = (self.lens(table, schedule_input(c)) for c in (smaller, changed))
                raise Seen(
                    f"it verifies {before.tolist()}; with other confidences beyond that and one more, {after.tolist()}",
                    cost_table=name,
                    c=smaller,
                    changed=changed,
                )

    def _anticipates(self, table: CostTable, probs: FloatArray) -> FloatArray | None:
        """Confidences that agree with ``probs`` up to l_r + 1 and get other lengths; None where there are none."""
        lens = self.lens(table, schedule_input(probs))
        beyond = np.arange(probs.shape[1])[None, :] > lens[:, None]
        if not beyond.any():
            return None
        rng = np.random.default_rng(self.seed)
        for fill in (np.zeros_like(probs), np.ones_like(probs), rng.random(probs.shape)):
            other = np.where(beyond, fill, probs)
            if not np.array_equal(self.lens(table, schedule_input(other)), lens):
                return other
        return None

    @contract("it is a function of what it was given so far: a second one plans the same")
    def test_determinism(self) -> None:
        for name, table, probs in self.examples("determinism"):
            batch = schedule_input(probs)
            first, second = (self.lens(table, batch) for _ in range(2))
            if not np.array_equal(first, second):
                raise Seen(f"one plans {first.tolist()}, another {second.tolist()}", cost_table=name, c=probs)

    @contract("it changes none of its inputs")
    def test_inputs_stay(self) -> None:
        for name, table, probs in self.examples("inputs"):
            batch = schedule_input(probs)
            kept = {f.name: _copied(getattr(batch, f.name)) for f in dataclasses.fields(batch)}
            self.scheduler(table, *probs.shape).plan(batch, table)
            for field, value in kept.items():
                if not np.array_equal(getattr(batch, field), value):
                    raise Seen(f"`{field}` became {getattr(batch, field)}", cost_table=name, c=probs)

    @contract("the lengths that it gives are its own: a later plan does not change an earlier one")
    def test_plans_stay(self) -> None:
        table = sps_table(TABLES["smooth"])
        made = self.scheduler(table, 2, 2)
        first = made.plan(schedule_input([[0.9, 0.9], [0.9, 0.9]]), table)
        kept = np.array(first.verify_lens)
        made.plan(schedule_input([[0.0, 0.0], [0.1, 0.0]]), table)
        if not np.array_equal(first.verify_lens, kept):
            raise Seen(f"the earlier plan became {first.verify_lens.tolist()}, it was {kept.tolist()}")

    @contract("it goes on when requests leave, when others take their slots, and when the batch changes its size")
    def test_requests_come_and_go(self) -> None:
        table = sps_table(TABLES["stairs"])
        made, rng = self.build(), self.random("requests")
        made.release(5, 1)
        for generation, rows in enumerate((2, 1, 3, 1, 2), start=1):
            for _ in range(3):
                batch = schedule_input(rng.random((rows, self.gamma)), generation=generation)
                self.case = {"generation": generation, "rows": rows, "c": batch.probs}
                _check_plan(made.plan(batch, table), batch, self.case)
            for slot in range(rows):
                made.release(slot, generation)

    @contract("scheduled by it, a whole engine emits the target's law, by enumeration under `rejection`")
    def test_exact_law(self) -> None:
        if self.build().capabilities.anticipates:
            raise NotApplicable("it declares anticipates=True")
        for name in ("dip", "rising"):
            table = cost_table(name)

            def make(draws: Any, table: CostTable = table) -> Any:
                return make_parts(draws, scheduler=self.scheduler(table, 1, 2), cost=table)

            check_law(make, cost_table=f"Appendix A's shape ({name})")


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value


def _check_plan(plan: VerifyPlan, batch: ScheduleInput, case: dict[str, Any]) -> None:
    lens = np.asarray(plan.verify_lens)
    if lens.shape != batch.max_lens.shape or lens.dtype.kind not in "iu":
        raise Seen(f"verify_lens are {lens.tolist()} ({lens.dtype})", **case)
    if (lens < 0).any() or (lens > batch.max_lens).any():
        raise Seen(f"verify_lens {lens.tolist()} are outside 0..{batch.max_lens.tolist()}", **case)
    expected = len(lens) + sum(float(batch.survival[r, :n].sum()) for r, n in enumerate(lens))
    if not math.isclose(plan.expected_accepts, expected, rel_tol=1e-9, abs_tol=1e-9):
        raise Seen(f"expected_accepts is {plan.expected_accepts:.6g}; {lens.tolist()} gives {expected:.6g}", **case)
    if not (math.isnan(plan.throughput) or plan.throughput > 0):
        raise Seen(f"throughput is {plan.throughput}", **case)
    if not isinstance(plan.stop_reason, str) or not plan.stop_reason:
        raise Seen(f"stop_reason is {plan.stop_reason!r}", **case)


def shrunk(probs: FloatArray, fails: Callable[[FloatArray], FloatArray | None]) -> tuple[FloatArray, FloatArray]:
    """A smaller c that still fails, and what it fails with: rows and positions are dropped, values rounded."""
    best, partner, again = probs, fails(probs), True
    while again:
        again = False
        for candidate in _smaller(best):
            found = fails(candidate)
            if found is not None:
                best, partner, again = candidate, found, True
                break
    if partner is None:
        raise Seen("the failure does not repeat: the plan depends on more than its input", c=probs)
    return best, partner


def _smaller(probs: FloatArray) -> Iterator[FloatArray]:
    rows, gamma = probs.shape
    if rows > 1:
        yield from (np.delete(probs, r, axis=0) for r in range(rows))
    if gamma > 1:
        yield probs[:, :-1]
    for index in np.ndindex(probs.shape):
        for value in (0.0, 1.0, round(float(probs[index]), 1)):
            if probs[index] not in (0.0, 1.0, value):
                other = probs.copy()
                other[index] = value
                yield other
