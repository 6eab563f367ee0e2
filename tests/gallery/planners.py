"""Estimators, calibrators and schedulers that break a promise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dspark.capabilities import CalibratorCapabilities, EstimatorCapabilities, SchedulerCapabilities
from dspark.plugins import Kind
from dspark.testing.cheats import (
    BucketDown,
    CausalReference,
    MinOverRequests,
    RetreatingLookahead,
    Retrospective,
    VetoingGuard,
    make_plan,
    sps,
)
from dspark.testing.faults import FaultyEstimator, Trip
from dspark.testing.pipeline import CONFIDENCES
from dspark.testing.suites.scheduler import TABLES
from dspark.testing.toys import TableEstimator

from .base import Broken


class Estimator:
    """Sound: the entropy of q's law at each position, which x_{<k} decide; nothing is learned."""

    capabilities = EstimatorCapabilities()

    def __init__(self, config: Any, context: Any) -> None: ...

    def laws(self, draft: Any) -> Any:
        rows, gamma = draft.token_ids.shape
        where = np.divmod(np.arange(rows * gamma), gamma)
        return draft.q.probs(*where).double().reshape(rows, gamma, -1)

    def estimate(self, batch: Any, draft: Any) -> Any:
        laws = self.laws(draft)
        entropy = -(laws * laws.clamp(min=1e-12).log()).sum(-1)
        return np.exp(-entropy.numpy()).clip(0.0, 1.0)

    def observe(self, record: Any) -> None: ...

    def release(self, slot: int, generation: int) -> None: ...


class ReadsTheDraw(Estimator):
    """c_k = q(x_k): the drafter's confidence in what it drew, the obvious choice and a biased one."""

    def estimate(self, batch: Any, draft: Any) -> Any:
        return draft.q.token_probs().numpy().clip(0.0, 1.0)


class OffByOne(Estimator):
    """The features of position k + 1 at k."""

    def estimate(self, batch: Any, draft: Any) -> Any:
        probs = super().estimate(batch, draft)
        return np.concatenate([probs[:, 1:], probs[:, -1:]], axis=1)


class BatchMean(Estimator):
    """Shrinks towards the mean of the batch, in which every row's later positions are."""

    def estimate(self, batch: Any, draft: Any) -> Any:
        probs = super().estimate(batch, draft)
        return 0.8 * probs + 0.2 * probs.mean()


class Logits(Estimator):
    """Forgets the sigmoid."""

    def estimate(self, batch: Any, draft: Any) -> Any:
        return 4.0 * super().estimate(batch, draft) - 1.0


class LearnsWhileAsked(Estimator):
    def __init__(self, config: Any, context: Any) -> None:
        self.mean = 0.5

    def estimate(self, batch: Any, draft: Any) -> Any:
        probs = super().estimate(batch, draft)
        self.mean = 0.9 * self.mean + 0.1 * float(probs[0, 0])
        return 0.5 * probs + 0.5 * self.mean


class NeverReleases(Estimator):
    """A rate by slot, whoever is in it."""

    def __init__(self, config: Any, context: Any) -> None:
        self.rate: dict[int, float] = {}

    def estimate(self, batch: Any, draft: Any) -> Any:
        rates = np.array([[self.rate.get(r.slot, 0.5)] for r in batch.requests])
        return np.repeat(rates, draft.token_ids.shape[1], axis=1)

    def observe(self, record: Any) -> None:
        for done in record.committed:
            self.rate[done.request.slot] = done.accepted / max(done.offered, 1)


class SharedSecretly(NeverReleases):
    """One rate for everybody, declared as if it were each request's."""

    def estimate(self, batch: Any, draft: Any) -> Any:
        mean = (sum(self.rate.values()) + len(batch)) / (len(self.rate) + 2 * len(batch))
        return np.full(tuple(draft.token_ids.shape), mean)


class ExpectsDrafts(Estimator):
    def observe(self, record: Any) -> None:
        self.seen = record.draft.token_ids.sum()


class Divides(Estimator):
    """Accepted over offered, of which there may be none."""

    def __init__(self, config: Any, context: Any) -> None:
        self.rate: Any = np.float64(0.5)

    def estimate(self, batch: Any, draft: Any) -> Any:
        return np.full(tuple(draft.token_ids.shape), self.rate)

    def observe(self, record: Any) -> None:
        with np.errstate(invalid="ignore"):
            accepted = np.float64(sum(c.accepted for c in record.committed))
            self.rate = accepted / np.float64(sum(c.offered for c in record.committed))


class ZeroesLens(Estimator):
    def estimate(self, batch: Any, draft: Any) -> Any:
        probs = super().estimate(batch, draft)
        draft.lens[:] = 0
        return probs


class WrongShape(Estimator):
    def estimate(self, batch: Any, draft: Any) -> Any:
        return super().estimate(batch, draft)[:, :1]


class Jitters(Estimator):
    """Breaks ties by noise of its own."""

    def estimate(self, batch: Any, draft: Any) -> Any:
        probs = super().estimate(batch, draft)
        return np.clip(probs + 1e-3 * np.random.default_rng().random(probs.shape), 0.0, 1.0)


class Anything:
    """Settings that take whatever is said."""

    def __init__(self, **settings: Any) -> None:
        self.__dict__ |= settings


@dataclass(frozen=True)
class Unchecked:
    """Settings that nobody looks at."""

    rate: float = 0.5


@dataclass(frozen=True)
class Mumbles:
    """Settings whose error does not say which is wrong."""

    rate: float = 0.5

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise ValueError("out of range")


def ahead(config: Any, context: Any) -> Any:
    made = TableEstimator(np.tile(np.array(CONFIDENCES), (1, 2))[:, :5].repeat(2, axis=0), reads_ahead=True)
    made.capabilities = EstimatorCapabilities(anticipates=False)
    return made


def trips(config: Any, context: Any) -> Any:
    return FaultyEstimator(np.full((4, 5), 0.6), Trip(1, attributed=False))


def estimator(name: str, factory: Any, check: str = "", *words: str, **more: Any) -> Broken:
    return Broken(name, Kind.ESTIMATOR, factory, check, words, **more)


ESTIMATORS = [
    estimator("sound", Estimator),
    estimator("reads q(x_k)", ReadsTheDraw, "test_non_anticipation", "c_1 is", "after x_1 of row 0 changed", "drafts"),
    estimator("reads q(x_k), in law", ReadsTheDraw, "test_exact_law", "total variation"),
    estimator("is off by one", OffByOne, "test_non_anticipation", "after x_1 of row 0"),
    estimator("reads x_k in the place of x_{k-1}", ahead, "test_non_anticipation", "changed from"),
    estimator("averages over the batch", BatchMean, "test_non_anticipation", "c_1 is"),
    estimator("forgets the sigmoid", Logits, "test_values", "c = "),
    estimator("learns while it is asked", LearnsWhileAsked, "test_frozen_within_a_round", "first", "then"),
    estimator("never releases a slot", NeverReleases, "test_slots_are_reused", "slots used before"),
    estimator("shares state undeclared", SharedSecretly, "test_rows_are_apart", "in the batch"),
    estimator("expects a draft in every record", ExpectsDrafts, "test_every_record", "AttributeError"),
    estimator("divides by nothing", Divides, "test_every_record", "not finite"),
    estimator("writes to the block", ZeroesLens, "test_inputs_stay", "wrote to"),
    estimator("gives one column", WrongShape, "test_values", "shape"),
    estimator("raises on a drafted token", trips, "test_non_anticipation", "RuntimeError: x_1 is 1"),
    estimator("breaks ties by noise", Jitters, "test_determinism", "another"),
    estimator(
        "takes any setting", Estimator, "test_unknown_settings_are_refused", "must be a dataclass", config=Anything
    ),
    estimator(
        "takes any value",
        Estimator,
        "test_bad_settings_are_refused",
        "they were accepted",
        config=Unchecked,
        suite={"bad_settings": [{"rate": -1}]},
    ),
    estimator(
        "does not say which setting is wrong",
        Estimator,
        "test_bad_settings_are_refused",
        "the error names none of rate",
        config=Mumbles,
        suite={"bad_settings": [{"rate": -1}]},
    ),
    estimator(
        "anticipates more than it was registered with",
        lambda config, context: TableEstimator([[0.5] * 5], reads_ahead=True),
        "test_it_builds",
        "it anticipates, but was registered as if it did not",
    ),
]


class Calibrator:
    """Sound: a fixed power."""

    capabilities = CalibratorCapabilities()

    def __init__(self, config: Any, context: Any) -> None: ...

    def calibrate(self, probs: Any, batch: Any) -> Any:
        return probs**1.3


class Normalises(Calibrator):
    def calibrate(self, probs: Any, batch: Any) -> Any:
        return probs / np.maximum(probs.max(axis=1, keepdims=True), 1e-9)


class Falls(Calibrator):
    def calibrate(self, probs: Any, batch: Any) -> Any:
        return 4.0 * probs * (1.0 - probs)


class CalibratesInPlace(Calibrator):
    def calibrate(self, probs: Any, batch: Any) -> Any:
        probs **= 1.3
        return probs


class Certain(Calibrator):
    """The logit of certainty is infinite, and infinity minus infinity no number."""

    def calibrate(self, probs: Any, batch: Any) -> Any:
        with np.errstate(all="ignore"):
            logit = np.log(probs) - np.log1p(-probs)
            return 1.0 / (1.0 + np.exp(-(logit - 0.1 * logit)))


class Ranks(Calibrator):
    """A rank within the batch."""

    def calibrate(self, probs: Any, batch: Any) -> Any:
        return probs.argsort(axis=0).argsort(axis=0) / max(len(probs), 1)


def calibrator(name: str, factory: Any, check: str = "", *words: str, **more: Any) -> Broken:
    return Broken(name, Kind.CALIBRATOR, factory, check, words, **more)


CALIBRATORS = [
    calibrator("sound", Calibrator),
    calibrator("normalises by the row's largest", Normalises, "test_prefix_causality", "moved c'"),
    calibrator("is not monotone", Falls, "test_monotone_is_true", "becomes"),
    calibrator("writes to c", CalibratesInPlace, "test_inputs_stay", "c became"),
    calibrator("makes NaN of certainty", Certain, "test_values", "nan"),
    calibrator("ranks within the batch", Ranks, "test_rows_are_apart", "in the batch"),
]

STAIRS, SMOOTH, JAGGED = (sps(*TABLES[name]) for name in ("stairs", "smooth", "jagged"))


class Scheduler:
    """Sound: verifies up to the first c_k below one half."""

    capabilities = SchedulerCapabilities()

    def __init__(self, config: Any, context: Any) -> None: ...

    def lens(self, batch: Any) -> Any:
        return np.cumprod(batch.probs >= 0.5, axis=1).sum(axis=1)

    def plan(self, batch: Any, cost: Any) -> Any:
        return make_plan(batch, self.lens(batch), "threshold")

    def release(self, slot: int, generation: int) -> None: ...


class CountsAll(Scheduler):
    """As many as there are good ones, wherever they are."""

    def lens(self, batch: Any) -> Any:
        return (batch.probs >= 0.5).sum(axis=1)


class SkipsTheLast(Scheduler):
    """Does not verify a draft's last token unless it is certain: looks at c_k itself, but drops what was admitted."""

    def lens(self, batch: Any) -> Any:
        lens = super().lens(batch)
        return np.where(batch.survival.min(axis=1) > 0.2, lens, 0)


class BeyondTheRoom(Scheduler):
    def plan(self, batch: Any, cost: Any) -> Any:
        plan = super().plan(batch, cost)
        return replace(plan, verify_lens=np.full(len(batch.max_lens), batch.gamma))


class Optimist(Scheduler):
    """Predicts what it drafts, not what is accepted."""

    def plan(self, batch: Any, cost: Any) -> Any:
        plan = super().plan(batch, cost)
        return replace(plan, expected_accepts=float(len(batch.max_lens) + plan.verify_lens.sum()))


class OneBuffer(Scheduler):
    """Hands out the array that it will write to again."""

    def __init__(self, config: Any, context: Any) -> None:
        self.buffer = np.zeros(64, dtype=np.int64)

    def plan(self, batch: Any, cost: Any) -> Any:
        plan = super().plan(batch, cost)
        self.buffer[: len(plan.verify_lens)] = plan.verify_lens
        return replace(plan, verify_lens=self.buffer[: len(plan.verify_lens)])


class NeedsATable(Scheduler):
    def plan(self, batch: Any, cost: Any) -> Any:
        cost.verify_seconds(batch.base_tokens)
        return super().plan(batch, cost)


class Floats(Scheduler):
    def plan(self, batch: Any, cost: Any) -> Any:
        plan = super().plan(batch, cost)
        return replace(plan, verify_lens=plan.verify_lens.astype(np.float64))


class SortsInPlace(Scheduler):
    def lens(self, batch: Any) -> Any:
        lens = super().lens(batch)
        batch.survival.sort(axis=1)
        return lens


class Alternates(Scheduler):
    """Explores by a counter that the process shares."""

    rounds = 0

    def lens(self, batch: Any) -> Any:
        type(self).rounds += 1
        return np.full(len(batch.max_lens), type(self).rounds % 2)


class KnowsItsRequests(Scheduler):
    """Keeps a record of each slot, and expects to know it at release."""

    def __init__(self, config: Any, context: Any) -> None:
        self.seen: dict[tuple[int, int], int] = {}

    def release(self, slot: int, generation: int) -> None:
        del self.seen[slot, generation]


class DividesByRoom(Scheduler):
    def lens(self, batch: Any) -> Any:
        share = [int(b // m) for b, m in zip([batch.gamma] * len(batch.max_lens), batch.max_lens.tolist(), strict=True)]
        return np.minimum(super().lens(batch), share)


def scheduler(name: str, factory: Any, check: str = "", *words: str, **more: Any) -> Broken:
    return Broken(name, Kind.SCHEDULER, factory, check, words, **more)


def around(make: Callable[[], Any]) -> Callable[[Any, Any], Any]:
    return lambda config, context: make()


ANTICIPATES = "test_non_anticipation"
SCHEDULERS = [
    scheduler("sound", Scheduler),
    scheduler("retrospective", around(lambda: Retrospective(JAGGED)), ANTICIPATES, "it verifies", "changed"),
    scheduler(
        "retrospective, in law",
        around(lambda: Retrospective(sps(1.0, 0.5, 0.45, 0.4, 0.2, 0.18, 0.05))),
        "test_exact_law",
        "Appendix A",
        "instead of",
    ),
    scheduler(
        "lookahead that retreats",
        around(lambda: RetreatingLookahead(JAGGED, (0.9, 0.8, 0.7, 0.6))),
        ANTICIPATES,
        "it verifies",
    ),
    scheduler(
        "guard that vetoes",
        around(lambda: VetoingGuard(CausalReference(SMOOTH), SMOOTH, 1.15)),
        ANTICIPATES,
        "it verifies",
    ),
    scheduler("minimum over requests", around(lambda: MinOverRequests(CausalReference(SMOOTH))), ANTICIPATES),
    scheduler("bucket rounded down", around(lambda: BucketDown(CausalReference(SMOOTH), (2, 4, 8))), ANTICIPATES),
    scheduler("counts all good positions", CountsAll, ANTICIPATES, "it verifies [0]"),
    scheduler("drops a doubtful draft", SkipsTheLast, ANTICIPATES, "smallest case"),
    scheduler("verifies beyond the room", BeyondTheRoom, "test_plans", "outside 0.."),
    scheduler("predicts too much", Optimist, "test_plans", "expected_accepts"),
    scheduler("reuses one buffer", OneBuffer, "test_plans_stay", "the earlier plan became"),
    scheduler("needs a table undeclared", NeedsATable, "test_without_a_cost_table", "AttributeError"),
    scheduler("gives floats", Floats, "test_plans", "float64"),
    scheduler("sorts its input", SortsInPlace, "test_inputs_stay", "survival"),
    scheduler("shares a counter", Alternates, "test_determinism", "another"),
    scheduler("expects whom it releases", KnowsItsRequests, "test_requests_come_and_go", "KeyError"),
    scheduler("divides by the room", DividesByRoom, "test_edges", "ZeroDivisionError", "max_lens = [0]"),
    scheduler(
        "registered with another kind's capabilities",
        Scheduler,
        "test_it_builds",
        "capabilities must be SchedulerCapabilities, got EstimatorCapabilities",
        capabilities=EstimatorCapabilities(),
    ),
]
