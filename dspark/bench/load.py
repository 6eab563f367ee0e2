"""Load on a decoder: a closed loop of so many users, or requests that come at random times."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from dspark.config import SamplingParams
from dspark.engine.engine import Engine
from dspark.engine.stats import EngineStats
from dspark.errors import EvaluationError


@dataclass(frozen=True, slots=True)
class Job:
    """One request.

    Attributes:
        name: of its prompt; outputs of one name can be compared.
        ids: prompt.
        params: how it is decoded.
    """

    name: str
    ids: tuple[int, ...]
    params: SamplingParams


class Event(NamedTuple):
    """Tokens of a job, and when they were out (``time.perf_counter``)."""

    job: int
    ids: tuple[int, ...]
    made: int
    seconds: float
    finished: bool


class Backend(Protocol):
    """What can be put under load. Jobs are named by the caller's numbers."""

    def submit(self, number: int, job: Job) -> None:
        """Queue a job."""
        ...

    def step(self) -> Sequence[Event]:
        """Decode until something is out."""
        ...

    def begin(self) -> None:
        """A run begins: figures are counted anew."""
        ...

    def figures(self) -> Mapping[str, Any]:
        """Figures of the run that only the backend knows."""
        ...


@dataclass(frozen=True, slots=True)
class Closed:
    """So many requests at any time: one is submitted as another ends."""

    concurrency: int

    @property
    def label(self) -> str:
        return str(self.concurrency)

    def as_dict(self) -> dict[str, float]:
        return {"concurrency": self.concurrency}


@dataclass(frozen=True, slots=True)
class Poisson:
    """So many requests a second on average, independently of one another."""

    rate: float
    seed: int = 0

    @property
    def label(self) -> str:
        return f"{self.rate:g}/s"

    def as_dict(self) -> dict[str, float]:
        return {"rate": self.rate}

    def times(self, count: int) -> list[float]:
        """Seconds from the begin of each arrival; the same in every run."""
        gaps = np.random.default_rng(self.seed).exponential(1.0 / self.rate, size=count)
        return [float(t) for t in np.cumsum(gaps)]


Load = Closed | Poisson


@dataclass(slots=True)
class Request:
    """Times of one request, in seconds from the begin of the run; NaN until they come."""

    arrival: float
    first: float = math.nan
    finish: float = math.nan
    tokens: int = 0
    ids: list[int] = field(default_factory=list)

    @property
    def speed(self) -> float:
        """Tokens a second that its user sees, after the first; NaN for a single token or one burst."""
        took = self.finish - self.first
        return (self.tokens - 1) / took if self.tokens > 1 and took > 0 else math.nan


@dataclass(slots=True)
class Run:
    """What a run of a load measured.

    Attributes:
        seconds, tokens: to the last token, and all of them.
        window_seconds, window_tokens: until load fell below what was asked, since there were no more jobs; the whole
            run of a closed loop with less than two jobs a user.
        requests: by the number of their job.
        figures: of the backend.
    """

    seconds: float
    tokens: int
    window_seconds: float
    window_tokens: int
    requests: list[Request]
    figures: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """Figures for JSON; times in seconds, rates in tokens a second."""
        waits = [r.first - r.arrival for r in self.requests]
        return {
            "throughput": self.window_tokens / self.window_seconds,
            "user_speed": median([r.speed for r in self.requests]),
            "user_speed_p10": percentile([r.speed for r in self.requests], 10),
            "first_token": median(waits),
            "first_token_p99": percentile(waits, 99),
            "seconds": self.seconds,
            "tokens": self.tokens,
            "requests": len(self.requests),
            **self.figures,
        }


def median(values: Sequence[float]) -> float:
    """Of the numbers among them; NaN for none."""
    known = [v for v in values if not math.isnan(v)]
    return statistics.median(known) if known else math.nan


def percentile(values: Sequence[float], share: float) -> float:
    """Of the numbers among them; NaN for none."""
    known = [v for v in values if not math.isnan(v)]
    return float(np.percentile(known, share)) if known else math.nan


class _Driver:
    """Submits jobs and takes events in."""

    def __init__(self, backend: Backend, jobs: Sequence[Job]) -> None:
        self.backend, self.jobs = backend, jobs
        self.requests: list[Request] = []
        self.live = self.tokens = 0
        self.window: tuple[float, int] | None = None
        backend.begin()
        self.began = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self.began

    def submit(self, arrival: float) -> None:
        number = len(self.requests)
        self.requests.append(Request(arrival))
        self.live += 1
        self.backend.submit(number, self.jobs[number])

    @property
    def left(self) -> bool:
        return len(self.requests) < len(self.jobs)

    def step(self) -> int:
        """Requests that ended."""
        ended = 0
        for event in self.backend.step():
            request, at = self.requests[event.job], event.seconds - self.began
            if event.made and math.isnan(request.first):
                request.first = at
            request.tokens += event.made
            request.ids += event.ids
            self.tokens += event.made
            if event.finished:
                request.finish = at
                ended += 1
        self.live -= ended
        return ended

    def close_window(self) -> None:
        if self.window is None:
            self.window = (self.now(), self.tokens)

    def result(self) -> Run:
        if not self.tokens:
            raise EvaluationError("a run gave no tokens")
        seconds = self.now()
        window = self.window if self.window is not None and self.window[1] else (seconds, self.tokens)
        return Run(seconds, self.tokens, *window, self.requests, dict(self.backend.figures()))


def run_load(backend: Backend, jobs: Sequence[Job], load: Load) -> Run:
    """Put a backend under load until every job is done.

    Raises:
        EvaluationError: no jobs, or none gave a token.
    """
    if not jobs:
        raise EvaluationError("a run needs at least one request")
    return _closed(backend, jobs, load) if isinstance(load, Closed) else _open(backend, jobs, load)


def _closed(backend: Backend, jobs: Sequence[Job], load: Closed) -> Run:
    driver = _Driver(backend, jobs)
    # with fewer jobs the window would be the reading of prompts and little else, the shorter the better drafts are
    steady = len(jobs) >= 2 * load.concurrency
    while driver.left and driver.live < load.concurrency:
        driver.submit(driver.now())
    while driver.live:
        for _ in range(driver.step()):
            if driver.left:
                driver.submit(driver.now())
            elif steady:
                driver.close_window()
    return driver.result()


def _open(backend: Backend, jobs: Sequence[Job], load: Poisson) -> Run:
    times = load.times(len(jobs))
    driver = _Driver(backend, jobs)
    while driver.left or driver.live:
        while driver.left and times[len(driver.requests)] <= driver.now():
            driver.submit(times[len(driver.requests)])
            if not driver.left:
                driver.close_window()
        if driver.live:
            driver.step()
        elif driver.left:
            time.sleep(max(0.0, times[len(driver.requests)] - driver.now()))
    return driver.result()


class EngineBackend:
    """dspark's own engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._numbers: dict[str, int] = {}

    def begin(self) -> None:
        """Count anew; what was learned stays."""
        self.engine.stats = EngineStats()

    def submit(self, number: int, job: Job) -> None:
        """Queue a job."""
        self._numbers[self.engine.submit(job.ids, job.params)] = number

    def step(self) -> list[Event]:
        """One step of the engine.

        Raises:
            EvaluationError: a request failed.
        """
        chunks = self.engine.step()
        now = time.perf_counter()
        events = []
        for chunk in chunks:
            if chunk.error is not None:
                raise EvaluationError(f"a request failed under load: {chunk.error}")
            ended = chunk.finish_reason is not None
            number = self._numbers.pop(chunk.request_id) if ended else self._numbers[chunk.request_id]
            events.append(Event(number, tuple(chunk.ids), len(chunk.ids), now, ended))
        return events

    def figures(self) -> dict[str, Any]:
        """Acceptance, verify budget, gammas and where the time went."""
        stats = self.engine.stats
        phases = stats.phase_seconds
        step = phases.get("step", 0.0)
        planning = sum(phases.get(name, 0.0) for name in ("gamma", "confidence", "schedule"))
        return {
            "accepted_length": stats.acceptance.accepted_length,
            "verify_budget": stats.verify_budget,
            "steps": stats.steps,
            "overhead": stats.overhead,
            "planning": planning / step if step else 0.0,
            "draft_share": phases.get("draft", 0.0) / step if step else 0.0,
            "gammas": {str(g): n for g, n in sorted(stats.gammas.items())},
            "gamma_reasons": dict(stats.gamma_reasons),
            "states": dict(stats.states),
        }
