"""Schedulers that break non-anticipation, so that tests can show that they would notice.

Each is a fault that was or could be shipped. All of them declare ``anticipates=False``: the lie is the point. With
``rejection`` the output law is biased; with ``coupled`` it is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dspark.capabilities import SchedulerCapabilities
from dspark.protocols import VerifyScheduler
from dspark.types import FloatArray, IntArray, ScheduleInput, VerifyPlan

Seconds = Callable[[int], float]
"""Time of a round whose forward executes so many tokens."""

HONEST = SchedulerCapabilities(anticipates=False, needs_cost=False)


def sps(*steps_per_second: float) -> Seconds:
    """Seconds of a round from SPS(1), SPS(2), ..; infinite beyond."""

    def seconds(tokens: int) -> float:
        return 1.0 / steps_per_second[tokens - 1] if tokens <= len(steps_per_second) else math.inf

    return seconds


def admission_order(batch: ScheduleInput) -> list[tuple[int, int]]:
    """Candidates (row, j) in Algorithm 1's order: a descending, j ascending, row ascending; a = 0 left out."""
    cells = [
        (-batch.survival[r, j], j, r)
        for r in range(len(batch.max_lens))
        for j in range(int(batch.max_lens[r]))
        if batch.survival[r, j] > 0.0
    ]
    return [(r, j) for _, j, r in sorted(cells)]


def make_plan(batch: ScheduleInput, lens: Sequence[int] | IntArray, reason: str) -> VerifyPlan:
    """A plan of these lengths."""
    verify = np.minimum(np.asarray(lens, dtype=np.int64), batch.max_lens)
    expected = sum(1.0 + float(batch.survival[r, :n].sum()) for r, n in enumerate(verify))
    return VerifyPlan(verify, expected, math.nan, reason)


def path_throughputs(batch: ScheduleInput, seconds: Seconds) -> list[float]:
    """Theta after 0, 1, .. admissions along the order."""
    tau, tokens = float(len(batch.max_lens)), batch.base_tokens
    thetas = [tau / seconds(tokens)]
    for r, j in admission_order(batch):
        tau, tokens = tau + float(batch.survival[r, j]), tokens + 1
        thetas.append(tau / seconds(tokens))
    return thetas


def first(batch: ScheduleInput, count: int) -> IntArray:
    """Lengths after the first ``count`` admissions."""
    lens = np.zeros(len(batch.max_lens), dtype=np.int64)
    for r, _ in admission_order(batch)[:count]:
        lens[r] += 1
    return lens


class Forgetful:
    """Keeps nothing by request."""

    capabilities = HONEST

    def release(self, slot: int, generation: int) -> None:
        """Nothing to forget."""


class Retrospective(Forgetful):
    """The argmax of Theta over the whole path: x_k decides whether x_k is verified (METHOD, Appendix A)."""

    def __init__(self, seconds: Seconds) -> None:
        self.seconds = seconds

    def plan(self, batch: ScheduleInput, cost: Any | None = None) -> VerifyPlan:
        """The best point of the path, seen from its end."""
        return make_plan(batch, first(batch, int(np.argmax(path_throughputs(batch, self.seconds)))), "retrospective")


class RetreatingLookahead(Forgetful):
    """Walks over dips by running averages, as ``lookahead`` does, but returns to the best point that it passed."""

    def __init__(self, seconds: Seconds, averages: Sequence[float]) -> None:
        self.seconds = seconds
        self.averages = list(averages)

    def plan(self, batch: ScheduleInput, cost: Any | None = None) -> VerifyPlan:
        """Walk while the expected path still improves on the best point; return the best, not the last."""
        thetas = path_throughputs(batch, self.seconds)
        lens = np.zeros(len(batch.max_lens), dtype=np.int64)
        tau, tokens = float(len(lens)), batch.base_tokens
        for count, (r, j) in enumerate(admission_order(batch)):
            if not self._worth(batch, lens, tau, tokens, max(thetas[: count + 1])):
                break
            lens[r] = j + 1
            tau, tokens = tau + float(batch.survival[r, j]), tokens + 1
        return retreat(make_plan(batch, lens, "walked"), batch, self.seconds)

    def _worth(self, batch: ScheduleInput, lens: IntArray, tau: float, tokens: int, best: float) -> bool:
        expected: list[float] = []
        for r, done in enumerate(lens):
            a = 1.0
            for j in range(int(done), int(batch.max_lens[r])):
                a = float(batch.survival[r, j]) if j == done else a * self.averages[j]
                expected.append(a)
        for a in sorted(expected, reverse=True):
            tau, tokens = tau + a, tokens + 1
            if tau / self.seconds(tokens) > best:
                return True
        return False


def retreat(plan: VerifyPlan, batch: ScheduleInput, seconds: Seconds) -> VerifyPlan:
    """Back to the best point that the walk passed: retrospective, whatever found the walk's end."""
    thetas = path_throughputs(batch, seconds)[: int(plan.verify_lens.sum()) + 1]
    return make_plan(batch, first(batch, int(np.argmax(thetas))), "retreated")


def veto(plan: VerifyPlan, batch: ScheduleInput, seconds: Seconds, gain: float) -> VerifyPlan:
    """Nothing at all where a finished plan gains too little over l = 0."""
    theta = plan.expected_accepts / seconds(batch.base_tokens + int(plan.verify_lens.sum()))
    plain = len(batch.max_lens) / seconds(batch.base_tokens)
    return plan if theta >= gain * plain else make_plan(batch, 0 * plan.verify_lens, "vetoed")


def minimum(plan: VerifyPlan, batch: ScheduleInput) -> VerifyPlan:
    """Everybody gets the shortest scheduled length, as a target without ragged batches seems to ask."""
    return make_plan(batch, np.full_like(plan.verify_lens, plan.verify_lens.min(initial=batch.gamma)), "minimum")


def bucket_down(plan: VerifyPlan, batch: ScheduleInput, buckets: Sequence[int]) -> VerifyPlan:
    """Cut the last admitted tokens until the forward fits a bucket, instead of padding up to one."""
    total = batch.base_tokens + int(plan.verify_lens.sum())
    bucket = max([b for b in buckets if b <= total], default=batch.base_tokens)
    admitted = [(r, j) for r, j in admission_order(batch) if j < plan.verify_lens[r]]
    lens = np.zeros_like(plan.verify_lens)
    for r, _ in admitted[: max(bucket - batch.base_tokens, 0)]:
        lens[r] += 1
    return make_plan(batch, lens, "bucket")


class VetoingGuard(Forgetful):
    """A guard that looks at the finished plan of another scheduler and vetoes it when the gain is small."""

    def __init__(self, inner: VerifyScheduler, seconds: Seconds, gain: float) -> None:
        self.inner, self.seconds, self.gain = inner, seconds, gain

    def plan(self, batch: ScheduleInput, cost: Any | None = None) -> VerifyPlan:
        """The inner plan, or nothing."""
        return veto(self.inner.plan(batch, cost), batch, self.seconds, self.gain)


class MinOverRequests(Forgetful):
    """The minimum over the rows of another scheduler's plan."""

    def __init__(self, inner: VerifyScheduler) -> None:
        self.inner = inner

    def plan(self, batch: ScheduleInput, cost: Any | None = None) -> VerifyPlan:
        """One length for all."""
        return minimum(self.inner.plan(batch, cost), batch)


class BucketDown(Forgetful):
    """Another scheduler's plan, rounded down to a bucket of executed tokens."""

    def __init__(self, inner: VerifyScheduler, buckets: Sequence[int]) -> None:
        self.inner, self.buckets = inner, sorted(buckets)

    def plan(self, batch: ScheduleInput, cost: Any | None = None) -> VerifyPlan:
        """The largest bucket that is not above the plan."""
        return bucket_down(self.inner.plan(batch, cost), batch, self.buckets)


class ReadsEverything(Forgetful):
    """Decides by the draft tokens themselves, the worst that a schedule can do; exact with ``coupled`` alone.

    Args:
        drafts: returns the [R, gamma] draft tokens of this round.
    """

    capabilities = SchedulerCapabilities(anticipates=True, needs_cost=False)

    def __init__(self, drafts: Callable[[], Any]) -> None:
        self.drafts = drafts

    def plan(self, batch: ScheduleInput, cost: Any | None = None) -> VerifyPlan:
        """l_r = a hash of all drafts of the row, modulo gamma + 1."""
        tokens = np.asarray(self.drafts(), dtype=np.int64)
        weights = 1 + np.arange(tokens.shape[1]) * 5
        return make_plan(batch, (tokens * weights).sum(axis=1) % (batch.gamma + 1), "adversarial")


class CausalReference(Forgetful):
    """Algorithm 1 written plainly (METHOD section 4): early stopping along the admission order."""

    def __init__(self, seconds: Seconds) -> None:
        self.seconds = seconds

    def plan(self, batch: ScheduleInput, cost: Any | None = None) -> VerifyPlan:
        """Admit while Theta rises."""
        thetas = path_throughputs(batch, self.seconds)
        count = 0
        while count + 1 < len(thetas) and thetas[count + 1] > thetas[count]:
            count += 1
        return make_plan(batch, first(batch, count), "early stop")


class LengthTable(Forgetful):
    """A schedule given in advance: round i verifies ``lens[i]`` drafts of every row (the last entry repeats)."""

    def __init__(self, lens: Sequence[int]) -> None:
        self.lens = list(lens)
        self.round = 0

    def plan(self, batch: ScheduleInput, cost: Any | None = None) -> VerifyPlan:
        """The next entry."""
        length = self.lens[min(self.round, len(self.lens) - 1)]
        self.round += 1
        return make_plan(batch, np.full(len(batch.max_lens), length), "scripted")


def survival(probs: FloatArray, max_lens: IntArray) -> FloatArray:
    """a = cumulative product of c, 0 at and beyond ``max_lens``."""
    out = np.asarray(np.cumprod(probs, axis=1), dtype=np.float64)
    out[np.arange(probs.shape[1])[None, :] >= np.asarray(max_lens)[:, None]] = 0.0
    return out


def schedule_input(
    probs: FloatArray | Sequence[Sequence[float]],
    *,
    base_tokens: int | None = None,
    max_lens: Sequence[int] | None = None,
    generation: int = 1,
) -> ScheduleInput:
    """A batch of R rows in slots 0..R-1 whose anchors are its base tokens."""
    c = np.asarray(probs, dtype=np.float64)
    rows, gamma = c.shape
    limits = np.full(rows, gamma, dtype=np.int64) if max_lens is None else np.asarray(max_lens, dtype=np.int64)
    slots = np.arange(rows, dtype=np.int64)
    return ScheduleInput(
        probs=c,
        survival=survival(c, limits),
        max_lens=limits,
        slots=slots,
        generations=np.full(rows, generation, dtype=np.int64),
        base_tokens=rows if base_tokens is None else base_tokens,
        context=16,
        gamma=gamma,
    )


def non_anticipating(
    plan: Callable[[ScheduleInput], IntArray],
    probs: FloatArray,
    rng: np.random.Generator,
    *,
    trials: int = 8,
) -> bool:
    """METHOD section 4, rule 1: what lies beyond l_r + 1 does not change any length.

    Args:
        plan: the lengths that enter packing, for a schedule input, from frozen state.
        probs: c, [R, gamma].
        trials: random replacements, beside all zeros and all ones.
    """
    lens = np.asarray(plan(schedule_input(probs)))
    beyond = np.arange(probs.shape[1])[None, :] > lens[:, None]
    fills = [np.zeros_like(probs), np.ones_like(probs), *(rng.random(probs.shape) for _ in range(trials))]
    changed = [np.where(beyond, fill, probs) for fill in fills]
    return all((np.asarray(plan(schedule_input(c))) == lens).all() for c in changed)
