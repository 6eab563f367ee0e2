"""A plugin that raises in each phase, behind the server: its neighbours keep their tokens, and its errors its name.

The plugin's faults depend on what was drafted (a first token of a given value) and on chance; METHOD section 4, rule 6
says what may become of a round in which that happens.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from dspark.api import SpeculativeDecoder
from dspark.capabilities import DrafterCapabilities, EstimatorCapabilities, SchedulerCapabilities
from dspark.errors import RowFault
from dspark.plugins import hookimpl
from dspark.types import DraftBlock, Mode, VerifyPlan
from tests.server.conftest import MODEL, Live

GAMMA = 3
PHASES = ("draft", "confidence", "schedule", "verify", "observe")
DIST = "faulty"


class Trip:
    """Raises in one phase, for rows whose first draft is divisible by ``every``, and at random.

    Args:
        phase: where.
        attributed: name the rows; otherwise say nothing of them.
        every: one first token in so many trips.
        chance: of a row, whatever its token.
    """

    def __init__(self, phase: str, *, attributed: bool, every: int = 11, chance: float = 0.02) -> None:
        self.phase, self.attributed, self.every, self.chance = phase, attributed, every, chance
        self.rng = np.random.default_rng(7)
        self.tripped = 0

    def check(self, phase: str, first: Any) -> None:
        if phase != self.phase:
            return
        rows = [i for i, token in enumerate(first) if int(token) % self.every == 0 or self.rng.random() < self.chance]
        if not rows:
            return
        self.tripped += 1
        if self.attributed:
            raise RowFault("a faulty row", rows)
        raise RuntimeError("a fault")


class Drafter:
    """Samples from a table by the last token; ``last`` is what it drafted."""

    tap_layers: tuple[int, ...] = ()
    max_gamma = None
    default_gamma = GAMMA
    capabilities = DrafterCapabilities()

    def __init__(self, trip: Trip) -> None:
        self.trip = trip
        self.table = torch.from_numpy(np.random.default_rng(1).normal(0, 1, (300, 300)))
        self.last: Any = np.zeros((0, GAMMA))

    def propose(self, batch: Any, sampler: Any) -> DraftBlock:
        lens = np.array([min(batch.gamma, r.max_draft) for r in batch.requests])
        prev = torch.tensor([r.anchor for r in batch.requests])
        for offset in range(batch.gamma):
            prev = sampler.sample(self.table[prev], offset, None)
        block: DraftBlock = sampler.finish(lens)
        self.last = block.token_ids.numpy()
        self.trip.check("draft", self.last[:, 0])
        return block

    def commit(self, committed: Any) -> None: ...

    def release(self, slot: int, generation: int) -> None: ...


@dataclass
class Estimator:
    """0.9 everywhere."""

    trip: Trip
    capabilities = EstimatorCapabilities()

    def estimate(self, batch: Any, draft: DraftBlock) -> Any:
        self.trip.check("confidence", draft.token_ids[:, 0])
        return np.full(tuple(draft.token_ids.shape), 0.9)

    def observe(self, record: Any) -> None: ...

    def release(self, slot: int, generation: int) -> None: ...


@dataclass
class Scheduler:
    """Verifies everything."""

    trip: Trip
    drafter: Drafter
    capabilities = SchedulerCapabilities()

    def plan(self, batch: Any, cost: Any = None) -> VerifyPlan:
        self.trip.check("schedule", self.drafter.last[:, 0])
        return VerifyPlan(batch.max_lens.copy(), float(len(batch.max_lens)), float("nan"), "fixed-length")

    def release(self, slot: int, generation: int) -> None: ...


@dataclass
class Verifier:
    """The one that ships, with a fault before it."""

    inner: Any
    trip: Trip

    @property
    def capabilities(self) -> Any:
        return self.inner.capabilities

    def verify(self, batch: Any) -> Any:
        drafted = batch.draft_ids.shape[1] > 0
        first = (
            [int(t) if n else 1 for t, n in zip(batch.draft_ids[:, 0], batch.verify_lens, strict=True)]
            if drafted
            else []
        )
        self.trip.check("verify", first)
        return self.inner.verify(batch)


@dataclass
class Observer:
    """Sees every round."""

    trip: Trip

    def on_round(self, record: Any) -> None:
        if record.draft is not None:
            self.trip.check("observe", record.draft.token_ids[:, 0])

    def on_finish(self, request: Any, reason: str) -> None: ...


class Plugin:
    """Offers them, as a third party's package would."""

    DSPARK_API = 1

    def __init__(self, trip: Trip) -> None:
        self.trip = trip
        self.drafter = Drafter(trip)

    @hookimpl
    def dspark_register_drafters(self, register: Any) -> None:
        register("draft", lambda config, context: self.drafter, config=None, capabilities=DrafterCapabilities())

    @hookimpl
    def dspark_register_confidence_estimators(self, register: Any) -> None:
        build = lambda config, context: Estimator(self.trip)  # noqa: E731
        register("guess", build, config=None, capabilities=EstimatorCapabilities())

    @hookimpl
    def dspark_register_schedulers(self, register: Any) -> None:
        build = lambda config, context: Scheduler(self.trip, self.drafter)  # noqa: E731
        register("plan", build, config=None, capabilities=SchedulerCapabilities())

    @hookimpl
    def dspark_make_observers(self, config: Any) -> Any:
        return [Observer(self.trip)]


def decoder_with(make_decoder: Callable[..., SpeculativeDecoder], trip: Trip) -> SpeculativeDecoder:
    decoder = make_decoder(
        drafter=f"{DIST}/draft", estimator=f"{DIST}/guess", scheduler=f"{DIST}/plan", gamma=GAMMA,
        extra_plugins={DIST: Plugin(trip)},
    )  # fmt: skip
    parts = decoder.engine.parts
    parts.verifiers = {mode: Verifier(verifier, trip) for mode, verifier in parts.verifiers.items()}
    return decoder


SAMPLING: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 1.0, "seed": 5}, {"temperature": 1.0})


def jobs(count: int) -> list[dict[str, Any]]:
    """Greedy, seeded and unseeded requests in turn, over ten prompts."""
    return [
        {"prompt": [5 + i % 10, 6, 7], "max_tokens": 10, "ignore_eos": True, **SAMPLING[i % 3]} for i in range(count)
    ]


def run(live: Live, asked: list[dict[str, Any]]) -> list[Any]:
    """(status, JSON) of all, eight at a time."""

    def one(job: dict[str, Any]) -> Any:
        answer = live.post("/v1/completions", {"model": MODEL, "return_token_ids": True, **job})
        return answer.status_code, answer.json()

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(one, asked))


def check(live: Live, alone: SpeculativeDecoder, asked: list[dict[str, Any]], got: list[Any], phase: str) -> int:
    """Exactness of what was answered and attribution of what was not; how many ended with an error."""
    expected: dict[str, list[int]] = {}
    failed = 0
    for job, (status, body) in zip(asked, got, strict=True):
        if status == 200:
            ids = body["choices"][0]["token_ids"]
            assert len(ids) == job["max_tokens"]
            if job["temperature"] == 0 or "seed" in job:
                key = repr(job)
                if key not in expected:
                    sampling = {k: v for k, v in job.items() if k != "prompt"}
                    expected[key] = alone.generate([job["prompt"]], **sampling)[0].ids
                assert ids == expected[key]
            continue
        failed += 1
        assert status == 500
        error = body["error"]
        assert error["code"] == "component_error"
        assert error["dspark"]["phase"] == phase
        assert error["dspark"]["component"].startswith("dspark/" if phase == "verify" else f"{DIST}/")
        assert "request" in error["message"]
    live.settled()
    return failed


@pytest.mark.parametrize("phase", PHASES)
def test_attributed_faults_end_their_requests_alone(
    serving: Callable[..., Any], make_decoder: Any, alone: SpeculativeDecoder, phase: str
) -> None:
    attributed_faults(serving, make_decoder, alone, phase, 45)


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_attributed_faults_over_a_thousand_requests(
    serving: Callable[..., Any], make_decoder: Any, alone: SpeculativeDecoder, phase: str
) -> None:
    attributed_faults(serving, make_decoder, alone, phase, 1000)


def attributed_faults(serving: Any, make_decoder: Any, alone: SpeculativeDecoder, phase: str, count: int) -> None:
    trip = Trip(phase, attributed=True)
    asked = jobs(count)
    with warnings.catch_warnings(record=True), serving(decoder=decoder_with(make_decoder, trip)) as live:
        failed = check(live, alone, asked, run(live, asked), phase)
        stats, parts = live.decoder.engine.stats, live.decoder.engine.parts
        assert trip.tripped > 0
        assert parts.drafting
        assert parts.planning
        if phase == "observe":  # reported once and dropped
            assert failed == 0
            assert trip.tripped == 1
        else:
            assert 0 < failed < count
            assert stats.finished["error"] == failed
        assert stats.unproven_rounds == 0
        assert sum(stats.faults.values()) == trip.tripped


@pytest.mark.parametrize("phase", PHASES)
def test_faults_of_a_whole_batch(
    serving: Callable[..., Any], make_decoder: Any, alone: SpeculativeDecoder, phase: str
) -> None:
    trip = Trip(phase, attributed=False)
    asked = jobs(45)
    with warnings.catch_warnings(record=True), serving(decoder=decoder_with(make_decoder, trip)) as live:
        failed = check(live, alone, asked, run(live, asked), phase)
        stats, parts = live.decoder.engine.stats, live.decoder.engine.parts
        assert trip.tripped > 0
        if phase == "verify":  # nothing can stand in for it: every row that the call was for ends
            assert 0 < failed < len(asked)
        else:
            assert failed <= 1  # a batch of one rejection row is that row's fault
            assert trip.tripped == 1
        assert parts.drafting is (phase != "draft")
        assert parts.planning is (phase not in ("confidence", "schedule"))
        assert stats.unproven_rounds <= 1
        assert live.get("/health").status_code == 200


def test_every_mode_is_among_them(make_decoder: Any) -> None:
    trip = Trip("none", attributed=True)
    decoder = decoder_with(make_decoder, trip)
    modes = set()
    for job in jobs(3):
        name = decoder.engine.submit(job["prompt"], params_of(job))
        modes.add(next(r.mode for r in decoder.engine.live() if r.request_id == name))
    assert modes == set(Mode)
    decoder.close()


def params_of(job: dict[str, Any]) -> Any:
    from dspark.config import SamplingParams

    return SamplingParams(**{k: v for k, v in job.items() if k != "prompt"})
