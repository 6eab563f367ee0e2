"""The estimator ``logistic``: c_k = sigmoid(w_m . f_k + w_{m,k} . f_k + b), learned from each finished round.

m is the request's mode and f_k what is known before x_k is drawn (:mod:`dspark_estimator_online.features`), so c_k is a
function of x_{<k} and of history: it does not anticipate. The outcomes that count are those of offered positions up to
and including the first rejection: position k is seen only where x_1..x_{k-1} were accepted, which is the condition that
c_k stands under.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dspark.capabilities import EstimatorCapabilities
from dspark.protocols import BuildContext
from dspark.types import BatchView, DraftBlock, Mode, RequestView, RoundRecord
from dspark_estimator_online.features import LAW_FEATURES, Floats, Standard, law_features, named_features

MODES = {mode: i for i, mode in enumerate(Mode)}


@dataclass(frozen=True, slots=True)
class LogisticConfig:
    """Settings of ``logistic``.

    Attributes:
        prior_mean: c before anything was seen; optimistic, so that positions are offered and learned.
        rate: step of AdaGrad.
        decay: pull of the weights to zero, each outcome.
        request_strength: outcomes that the shared hit rate weighs as much as, in a request's own.
        request_memory: outcomes after which an older one weighs 1/e, in the hit rates.
        explore_every: in each so many-th drafting round one request, chosen by the round's number alone, reports c = 1
            at every position; 0 for never.
        reads: which of ``DraftBlock.features`` are read, where a drafter offers them; [R] or [R, gamma] each.
    """

    prior_mean: float = 0.7
    rate: float = 0.3
    decay: float = 1e-4
    request_strength: float = 8.0
    request_memory: float = 50.0
    explore_every: int = 32
    reads: Sequence[str] = ("match_length", "share")

    def __post_init__(self) -> None:
        _check("prior_mean", self.prior_mean, 0.01, 0.99)
        _check("rate", self.rate, 0.0)
        _check("decay", self.decay, 0.0, 1.0)
        _check("request_strength", self.request_strength, 1e-6)
        _check("request_memory", self.request_memory, 1.0)
        every = self.explore_every
        if not isinstance(every, int) or isinstance(every, bool) or every < 0:
            raise ValueError(f"explore_every: expected an integer of at least 0, got {every!r}")
        if isinstance(self.reads, str) or not all(isinstance(name, str) for name in self.reads):
            raise ValueError(f"reads: expected names of features, got {self.reads!r}")
        object.__setattr__(self, "reads", tuple(self.reads))


def _check(name: str, value: object, low: float, high: float = math.inf) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not low <= value <= high:  # type: ignore[arg-type,operator]
        bound = f"from {low} to {high}" if math.isfinite(high) else f"of at least {low}"
        raise ValueError(f"{name}: expected a finite number {bound}, got {value!r}")


class Weights:
    """Weights of each mode, shared by all positions and for each position, [modes, 1 + gamma, features], by AdaGrad."""

    def __init__(self, size: int, rate: float, decay: float) -> None:
        self._rate, self._decay = rate, decay
        self.values: Floats = np.zeros((len(MODES), 1, size))
        self._squares: Floats = np.ones_like(self.values)

    def reserve(self, gamma: int) -> None:
        """Room for positions up to gamma; a new one begins with the shared weights alone."""
        missing = 1 + gamma - self.values.shape[1]
        if missing > 0:
            pad = ((0, 0), (0, missing), (0, 0))
            self.values = np.pad(self.values, pad)
            self._squares = np.pad(self._squares, pad, constant_values=1.0)

    def logits(self, modes: np.ndarray, features: Floats) -> Floats:
        """[R, gamma] of modes [R] and features [R, gamma, n]."""
        gamma = features.shape[1]
        self.reserve(gamma)
        both = self.values[modes, :1] + self.values[modes, 1 : 1 + gamma]
        sums: Floats = np.einsum("rkn,rkn->rk", both, features)
        return sums

    def learn(self, modes: np.ndarray, positions: np.ndarray, features: Floats, errors: Floats) -> None:
        """One step for n outcomes: modes, positions, prediction minus outcome [n] each, and features [n, size]."""
        gradient = np.zeros_like(self.values)
        each = errors[:, None] * features
        np.add.at(gradient, (modes, np.zeros_like(positions)), each)
        np.add.at(gradient, (modes, 1 + positions), each)
        counts = np.zeros(self.values.shape[:2])
        np.add.at(counts, (modes, np.zeros_like(positions)), 1.0)
        np.add.at(counts, (modes, 1 + positions), 1.0)
        gradient += self._decay * counts[:, :, None] * self.values
        self._squares += gradient**2
        self.values = self.values - self._rate * gradient / np.sqrt(self._squares)


class HitRates:
    """Acceptance of all requests and of each, as decayed sums."""

    def __init__(self, strength: float, memory: float, prior: float) -> None:
        self._strength, self._memory = strength, memory
        self._all = [4.0, 4.0 * prior]
        self._own: dict[tuple[int, int], list[float]] = {}

    def log_odds(self, requests: Sequence[RequestView]) -> Floats:
        """Of each request's rate, [R]: its own outcomes, with the shared rate as prior."""
        mean = self._all[1] / self._all[0]
        own = [self._own.get((r.slot, r.generation), (0.0, 0.0)) for r in requests]
        rates = [(won + self._strength * mean) / (seen + self._strength) for seen, won in own]
        return np.array([log_odds(rate) for rate in rates])

    def learn(self, request: RequestView, seen: int, won: int) -> None:
        """Count one request's round."""
        own = self._own.setdefault((request.slot, request.generation), [0.0, 0.0])
        for sums, memory in ((own, self._memory), (self._all, 10.0 * self._memory)):
            keep = math.exp(-seen / memory)
            sums[0], sums[1] = sums[0] * keep + seen, sums[1] * keep + won

    def release(self, slot: int, generation: int) -> None:
        """Forget a request."""
        self._own.pop((slot, generation), None)


def log_odds(rate: float) -> float:
    """log p / (1 - p), for rates that are never quite 0 or 1."""
    rate = min(max(rate, 1e-3), 1.0 - 1e-3)
    return math.log(rate / (1.0 - rate))


class LogisticEstimator:
    """Online logistic regression; see the module. ``rounds`` counts drafting rounds observed."""

    capabilities = EstimatorCapabilities(shared_state=True)

    def __init__(self, config: LogisticConfig) -> None:
        self.config = config
        self.rounds = 0
        self._offset = log_odds(config.prior_mean)
        size = LAW_FEATURES + len(config.reads) + 1
        self.standard = Standard(size)
        self.weights = Weights(1 + size, config.rate, config.decay)
        self.hits = HitRates(config.request_strength, config.request_memory, config.prior_mean)
        self._last: tuple[DraftBlock, Floats] | None = None

    def estimate(self, batch: BatchView, draft: DraftBlock) -> Floats:
        """c, [R, gamma]."""
        raw = self._raw(batch, draft)
        self._last = draft, raw  # what observe would have to compute again; not what c is made from
        probs = self._predict(batch, raw)
        explorer = self.explorer(len(batch))
        if explorer is not None:
            probs[explorer] = 1.0
        return probs

    def explorer(self, rows: int) -> int | None:
        """The row that explores in the coming round, or None: a function of the number of rounds and of rows."""
        every = self.config.explore_every
        if every == 0 or rows == 0 or (self.rounds + 1) % every:
            return None
        return ((self.rounds + 1) // every - 1) % rows

    def observe(self, record: RoundRecord) -> None:
        """Learn from offered positions up to the first rejection. Plain steps and failed requests teach nothing."""
        last, self._last = self._last, None
        batch, draft = record.batch, record.draft
        if batch is None or draft is None:
            return
        self.rounds += 1
        done = [c for c in record.committed if c.row >= 0 and c.finish_reason != "error" and c.offered > 0]
        if not done:
            return
        raw = last[1] if last is not None and last[0] is draft else self._raw(batch, draft)
        rows = np.array([c.row for c in done], dtype=np.int64)
        accepted = np.array([c.accepted for c in done], dtype=np.int64)
        reached = np.minimum([c.offered for c in done], accepted + 1)
        steps = np.arange(raw.shape[1])
        which, positions = np.nonzero(steps < reached[:, None])
        outcomes = (positions < accepted[which]).astype(np.float64)
        errors = self._predict(batch, raw)[rows[which], positions] - outcomes
        seen = raw[rows[which], positions]
        self.weights.learn(_modes(batch)[rows[which]], positions, self._inputs(seen), errors)
        self.standard.learn(seen)
        for one, count in zip(done, reached.tolist(), strict=True):
            self.hits.learn(one.request, count, min(one.accepted, count))

    def release(self, slot: int, generation: int) -> None:
        """Forget a request's hit rate; what all requests taught stays."""
        self.hits.release(slot, generation)

    def _raw(self, batch: BatchView, draft: DraftBlock) -> Floats:
        """Features [R, gamma, n] as they are; NaN where unknown."""
        gamma = int(draft.token_ids.shape[1])
        hits = np.repeat(self.hits.log_odds(batch.requests)[:, None, None], gamma, axis=1)
        return np.concatenate([law_features(batch, draft), named_features(draft, self.config.reads), hits], axis=2)

    def _inputs(self, raw: Floats) -> Floats:
        """[.., n] -> [.., 1 + n]: standardised, behind a constant."""
        return np.concatenate([np.ones((*raw.shape[:-1], 1)), self.standard(raw)], axis=-1)

    def _predict(self, batch: BatchView, raw: Floats) -> Floats:
        logits = self.weights.logits(_modes(batch), self._inputs(raw)) + self._offset
        probs: Floats = 1.0 / (1.0 + np.exp(-np.clip(logits, -12.0, 12.0)))
        return probs


def _modes(batch: BatchView) -> np.ndarray:
    return np.array([MODES[r.mode] for r in batch.requests], dtype=np.int64)


def build(config: LogisticConfig, context: BuildContext) -> LogisticEstimator:
    """Factory of ``logistic``."""
    return LogisticEstimator(config)
