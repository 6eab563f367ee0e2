"""A sweep: every system under every load, repetitions interleaved, so that a slow minute of the machine hits all."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dspark.bench.load import Backend, Closed, Job, Load, Run, median, run_load
from dspark.bench.systems import PLAIN, System, left_out
from dspark.errors import EvaluationError

REPLICATES, LEVEL = 2000, 0.95
WARM_TOKENS = 4


@dataclass(slots=True)
class Cell:
    """One system under one load: the figures of each repetition.

    Attributes:
        runs: one a repetition.
        same: requests whose tokens are those of plain decoding, and how many were compared.
    """

    runs: list[dict[str, Any]] = field(default_factory=list)
    same: list[int] = field(default_factory=lambda: [0, 0])

    def middle(self, name: str) -> float:
        """Median of a figure over the repetitions; NaN where it is not measured."""
        values = [run[name] for run in self.runs if isinstance(run.get(name), (int, float))]
        return median([float(v) for v in values])

    def throughputs(self) -> list[float]:
        return [float(run["throughput"]) for run in self.runs]


def ratio(mine: Sequence[float], theirs: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """Median over median with a 95 % interval: bootstrap over repetitions, paired where both have as many."""
    if not mine or not theirs:
        return math.nan, math.nan, math.nan
    rng = np.random.default_rng(seed)
    a, b = np.asarray(mine, dtype=np.float64), np.asarray(theirs, dtype=np.float64)
    picks = rng.integers(0, len(a), size=(REPLICATES, len(a)))
    others = picks if len(a) == len(b) else rng.integers(0, len(b), size=(REPLICATES, len(b)))
    drawn = np.median(a[picks], axis=1) / np.median(b[others], axis=1)
    low, high = np.percentile(drawn, [50 * (1 - LEVEL), 50 * (1 + LEVEL)])
    return float(np.median(a) / np.median(b)), float(low), float(high)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run.

    Attributes:
        systems: in order.
        loads: in order.
        jobs: (number of jobs, repetition) -> the jobs; the same for every system.
        repeats: repetitions that count.
        requests_per_user: jobs of a run, by concurrency.
        least_requests: jobs of a run at least, so that few users are not few prompts.
        open_requests: jobs of an open-loop run.
        greedy: requests are greedy, so that outputs can be compared.
    """

    systems: Sequence[System]
    loads: Sequence[Load]
    jobs: Callable[[int, int], list[Job]]
    repeats: int = 3
    requests_per_user: int = 2
    open_requests: int = 64
    greedy: bool = True
    least_requests: int = 1

    def count(self, load: Load) -> int:
        """Jobs of a run."""
        if not isinstance(load, Closed):
            return self.open_requests
        return max(self.least_requests, load.concurrency * self.requests_per_user)


@dataclass(slots=True)
class Sweep:
    """Runs a plan.

    Args:
        plan: what is run.
        open_backend: the backend of a system; a string says why there is none here.
        tell: called with (load, system, repetition) before each run; repetition -1 warms up.

    Attributes:
        cells: (system, load's label) -> its figures.
        skipped: what was left out, and why.
    """

    plan: Plan
    open_backend: Callable[[System], Backend | str]
    tell: Callable[[Load, System, int], None] = lambda load, system, repetition: None
    cells: dict[tuple[str, str], Cell] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    _backends: dict[str, Backend] = field(default_factory=dict)

    def run(self) -> Sweep:
        """Run everything; the sweep itself.

        Raises:
            EvaluationError: no system is left, or a request failed.
        """
        for system in self.plan.systems:
            found = self.open_backend(system)
            if isinstance(found, str):
                self.skipped.append(f"{system.name}: {found}")
            else:
                self._backends[system.name] = found
        if not self._backends:
            raise EvaluationError(f"no system can run here: {'; '.join(self.skipped)}")
        for load in self.plan.loads:
            self._load(load)
        return self

    def _load(self, load: Load) -> None:
        taking = []
        for system in self.plan.systems:
            if system.name not in self._backends:
                continue
            why = left_out(system, load, greedy=self.plan.greedy)
            if why:
                self.skipped.append(f"{system.name} at {load.label}: {why}")
            else:
                taking.append(system)
        for system in taking:
            self.tell(load, system, -1)
            self._warm(system, load)
        for repetition in range(self.plan.repeats):
            start = repetition % max(1, len(taking))
            outputs: dict[str, Run] = {}
            for system in (*taking[start:], *taking[:start]):
                self.tell(load, system, repetition)
                jobs = self.plan.jobs(self.plan.count(load), repetition)
                outputs[system.name] = run_load(self._backends[system.name], jobs, load)
                cell = self.cells.setdefault((system.name, load.label), Cell())
                cell.runs.append(outputs[system.name].as_dict())
            if self.plan.greedy:
                self._compare(outputs, load)

    def _warm(self, system: System, load: Load) -> None:
        count = load.concurrency if isinstance(load, Closed) else 1
        jobs = [
            dataclasses.replace(job, params=dataclasses.replace(job.params, max_tokens=WARM_TOKENS))
            for job in self.plan.jobs(count, 0)
        ]
        run_load(self._backends[system.name], jobs, Closed(count))

    def _compare(self, outputs: Mapping[str, Run], load: Load) -> None:
        plain = outputs.get(PLAIN)
        if plain is None:
            return
        for name, run in outputs.items():
            same = self.cells[name, load.label].same
            for mine, theirs in zip(run.requests, plain.requests, strict=True):
                if mine.ids:
                    same[0] += mine.ids == theirs.ids
                    same[1] += 1

    def result(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """Everything for JSON: figures by load and system, with ratios over plain decoding and its rivals."""
        return {
            **about,
            "loads": [load.as_dict() | {"label": load.label} for load in self.plan.loads],
            "systems": [
                {"name": s.name, "about": s.about, "settings": dict(s.settings)}
                for s in self.plan.systems
                if s.name in self._backends
            ],
            "skipped": self.skipped,
            "rows": [row for load in self.plan.loads for row in self._rows(load)],
        }

    def _rows(self, load: Load) -> list[dict[str, Any]]:
        mine = {s.name: self.cells[s.name, load.label] for s in self.plan.systems if (s.name, load.label) in self.cells}
        rivals = self._rivals(mine)
        rows = []
        for name, cell in mine.items():
            figures = (
                "throughput", "user_speed", "user_speed_p10", "first_token", "first_token_p99", "accepted_length",
                "verify_budget", "overhead", "planning", "draft_share",
            )  # fmt: skip
            row: dict[str, Any] = {"load": load.label, **load.as_dict(), "system": name}
            row |= {figure: cell.middle(figure) for figure in figures}
            row |= {f"over_{what}": ratio(cell.throughputs(), other.throughputs()) for what, other in rivals.items()}
            row["same_as_plain"] = list(cell.same) if cell.same[1] else None
            row["runs"] = cell.runs
            rows.append(row)
        return rows

    def _rivals(self, cells: Mapping[str, Cell]) -> dict[str, Cell]:
        """``plain``; the best ``static`` gamma, plain decoding among them; the best plain decoding of others."""
        by_name = {s.name: s for s in self.plan.systems}
        groups = {
            "plain": [PLAIN],
            "static": [name for name in cells if by_name[name].static_gamma is not None],
            "external": [name for name in cells if name in ("generate", "vllm")],
        }
        found = {}
        for what, names in groups.items():
            some = [cells[name] for name in names if name in cells]
            if some:
                found[what] = max(some, key=lambda cell: cell.middle("throughput"))
        return found
