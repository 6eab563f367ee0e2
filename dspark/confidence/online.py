"""The estimator ``online``: c_k learned from outcomes, so that any drafter can be scheduled.

Averages per mode, bucket of the match length and position. What counts is each offered position up to and including
the first rejection (METHOD section 4, rule 5): position k is seen only where x_1..x_{k-1} were accepted, so the
average estimates the conditional probability that c_k stands for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from dspark.capabilities import EstimatorCapabilities
from dspark.errors import ConfigError
from dspark.protocols import BuildContext
from dspark.types import BatchView, BoolArray, DraftBlock, FloatArray, IntArray, Mode, RoundRecord

CAPABILITIES = EstimatorCapabilities(shared_state=True)

_MODES = {mode: i for i, mode in enumerate(Mode)}


@dataclass(frozen=True, slots=True)
class OnlineConfig:
    """Settings of ``online``.

    Attributes:
        prior_mean: c before anything was seen; optimistic, so that positions are offered and learned.
        prior_strength: outcomes that the prior weighs as much as; also of a mode's average as prior of its buckets.
        memory: outcomes after which an older one weighs 1/e, by position.
        request_strength: acceptances expected of a request until its own record weighs as much as the shared averages;
            None for shared averages alone.
        request_memory: as ``memory``, for the averages of one request.
        match_edges: lower bounds of the buckets of ``features["match_length"]``, rising; empty for one bucket.
            Drafts without that feature share one bucket.
        explore_every: in each so many-th drafting round one request, chosen by the round's number alone, reports
            c = 1 at every position, so that positions that are no longer offered can recover; 0 for never.
    """

    prior_mean: float = 0.7
    prior_strength: float = 4.0
    memory: float = 500.0
    request_strength: float | None = 16.0
    request_memory: float = 50.0
    match_edges: Sequence[int] = (2, 3, 4, 8, 16)
    explore_every: int = 32

    def __post_init__(self) -> None:
        _number("prior_mean", self.prior_mean, low=0.0, high=1.0)
        _number("prior_strength", self.prior_strength, low=1e-6)
        _number("memory", self.memory, low=1.0)
        _number("request_memory", self.request_memory, low=1.0)
        if self.request_strength is not None:
            _number("request_strength", self.request_strength, low=1e-6)
        every = self.explore_every
        if not isinstance(every, int) or isinstance(every, bool) or every < 0:
            raise ConfigError(f"OnlineConfig.explore_every: expected an integer of at least 0, got {every!r}")
        edges = self.match_edges
        whole = isinstance(edges, Sequence) and all(isinstance(e, int) and not isinstance(e, bool) for e in edges)
        if not whole or any(b <= a for a, b in pairwise(edges)):
            raise ConfigError(f"OnlineConfig.match_edges: expected rising integers, got {edges!r}")
        object.__setattr__(self, "match_edges", tuple(edges))


def _number(name: str, value: object, *, low: float, high: float = math.inf) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or not low <= value <= high:  # type: ignore[arg-type,operator]
        bound = f"from {low} to {high}" if math.isfinite(high) else f"of at least {low}"
        raise ConfigError(f"OnlineConfig.{name}: expected a finite number {bound}, got {value!r}")


class _Averages:
    """Decayed sums of acceptances and of their weights, [keys, gamma] each, grown as keys and positions appear."""

    def __init__(self, memory: float, keys: int = 1) -> None:
        self._keep = math.exp(-1.0 / memory)
        self.seen: FloatArray = np.zeros((keys, 0))
        self.accepted: FloatArray = np.zeros((keys, 0))

    def reserve(self, keys: int, gamma: int) -> None:
        """Make room, with zeros."""
        old_keys, old_gamma = self.seen.shape
        if keys > old_keys or gamma > old_gamma:
            pad = ((0, max(0, keys - old_keys)), (0, max(0, gamma - old_gamma)))
            self.seen, self.accepted = np.pad(self.seen, pad), np.pad(self.accepted, pad)

    def update(self, keys: IntArray, seen: BoolArray, won: BoolArray, weights: FloatArray | None = None) -> None:
        """Forget by, then add, one round's outcomes: keys [n]; masks, and weights (1 by default) [n, gamma]."""
        gamma = seen.shape[1]
        self.reserve(int(keys.max()) + 1, gamma)
        counts, weighted, accepted = (np.zeros_like(self.seen) for _ in range(3))
        np.add.at(counts[:, :gamma], keys, seen)
        np.add.at(weighted[:, :gamma], keys, seen if weights is None else seen * weights)
        np.add.at(accepted[:, :gamma], keys, seen & won)
        kept = self._keep**counts
        self.seen = self.seen * kept + weighted
        self.accepted = self.accepted * kept + accepted

    def posterior(self, keys: IntArray, prior: FloatArray, strength: float) -> FloatArray:
        """(accepted + strength * prior) / (seen + strength) of each key, [n, gamma]: a Beta posterior mean."""
        gamma = prior.shape[1]
        self.reserve(int(keys.max(initial=-1)) + 1, gamma)
        mean: FloatArray = (self.accepted[keys, :gamma] + strength * prior) / (self.seen[keys, :gamma] + strength)
        return mean

    def ratio(self, keys: IntArray, gamma: int, strength: float) -> FloatArray:
        """(accepted + strength) / (weight + strength) of each key, [n, gamma]: 1 where nothing was seen."""
        self.reserve(int(keys.max(initial=-1)) + 1, gamma)
        value: FloatArray = (self.accepted[keys, :gamma] + strength) / (self.seen[keys, :gamma] + strength)
        return value


class OnlineEstimator:
    """Acceptance averages with a Beta prior and exponential forgetting; each level is the prior of the next.

    prior_mean -> mode -> (mode, match bucket); the last is multiplied by how many acceptances the request itself had
    over how many these averages predicted for it, so that an easy request keeps the difference between its buckets.
    All of it is history: draft tokens are never read, and only ``observe``, after a round, changes what ``estimate``
    returns, so within a round c is frozen and can't anticipate.

    Exploration depends on the number of drafting rounds alone. The exploring request's survival is 1 at every
    position, hence first in the order of Algorithm 1: positions are offered until one more token costs more than it
    could bring at best, and where even that does not pay, no other candidate would have been admitted either. The
    predicted gain of such a round is too high by design; its outcomes count like any other's.
    """

    capabilities: EstimatorCapabilities = CAPABILITIES

    def __init__(self, config: OnlineConfig) -> None:
        self.config = config
        self.rounds = 0
        """Drafting rounds observed."""
        self._edges = np.asarray(config.match_edges, dtype=np.int64)
        self._stride = len(config.match_edges) + 2  # bucket 0: no such feature
        self._modes = _Averages(config.memory, len(_MODES))
        self._buckets = _Averages(config.memory, len(_MODES) * self._stride)
        self._requests = _Averages(config.request_memory)
        self._generations: IntArray = np.zeros(0, dtype=np.int64)

    def estimate(self, batch: BatchView, draft: DraftBlock) -> FloatArray:
        """c, [R, gamma]. A function of history, modes, match lengths and the round's number."""
        rows, gamma = len(batch), int(draft.token_ids.shape[1])
        if rows == 0 or gamma == 0:
            return np.zeros((rows, gamma))
        probs = self._shared(*self._keys(batch, draft.features), gamma)
        if self.config.request_strength is not None:
            probs = probs * self._requests.ratio(self._slots(batch), gamma, self.config.request_strength)
        explorer = self.explorer(rows)
        if explorer is not None:
            probs[explorer] = 1.0
        return np.clip(probs, 0.0, 1.0)

    def _shared(self, modes: IntArray, buckets: IntArray, gamma: int) -> FloatArray:
        """The averages of each row's mode and bucket, [R, gamma]."""
        strength = self.config.prior_strength
        probs = np.full((len(modes), gamma), float(self.config.prior_mean))
        probs = self._modes.posterior(modes, probs, strength)
        return self._buckets.posterior(buckets, probs, strength)

    def explorer(self, rows: int) -> int | None:
        """The row of R that explores in the coming round, or None: a function of the number of rounds and R."""
        every = self.config.explore_every
        if every == 0 or rows == 0 or (self.rounds + 1) % every:
            return None
        return ((self.rounds + 1) // every - 1) % rows

    def observe(self, record: RoundRecord) -> None:
        """Count what was offered up to the first rejection. Plain steps and failed requests teach nothing."""
        if record.batch is None or record.draft is None:
            return
        self.rounds += 1
        done = [c for c in record.committed if c.row >= 0 and c.finish_reason != "error"]
        if not done:
            return
        rows = np.array([c.row for c in done], dtype=np.int64)
        offered = np.array([c.offered for c in done], dtype=np.int64)
        accepted = np.array([c.accepted for c in done], dtype=np.int64)
        steps = np.arange(int(record.draft.token_ids.shape[1]))
        seen = steps < np.minimum(offered, accepted + 1)[:, None]
        won = steps < accepted[:, None]
        modes, buckets = (keys[rows] for keys in self._keys(record.batch, record.draft.features))
        if self.config.request_strength is not None:
            predicted = self._shared(modes, buckets, len(steps))
            self._requests.update(self._slots(record.batch)[rows], seen, won, predicted)
        self._modes.update(modes, seen, won)
        self._buckets.update(buckets, seen, won)

    def release(self, slot: int, generation: int) -> None:
        """Forget a request's own averages; the shared ones stay."""
        if slot < len(self._generations) and self._generations[slot] == generation + 1:
            self._clear(slot, 0)

    def _keys(self, batch: BatchView, features: Mapping[str, Any]) -> tuple[IntArray, IntArray]:
        """Keys of each row's mode and of its (mode, bucket), [R] each."""
        modes = np.array([_MODES[r.mode] for r in batch.requests], dtype=np.int64)
        lengths = features.get("match_length")
        if lengths is None:
            return modes, modes * self._stride
        host = np.asarray(lengths.cpu() if hasattr(lengths, "cpu") else lengths)
        return modes, modes * self._stride + 1 + np.searchsorted(self._edges, host, side="right")

    def _slots(self, batch: BatchView) -> IntArray:
        """Slots [R], emptied where a new request has taken one. ``_generations`` holds generation + 1, 0 for none."""
        slots = np.array([r.slot for r in batch.requests], dtype=np.int64)
        generations = np.array([r.generation + 1 for r in batch.requests], dtype=np.int64)
        size = int(slots.max()) + 1
        if size > len(self._generations):
            self._generations = np.pad(self._generations, (0, size - len(self._generations)))
            self._requests.reserve(size, 0)
        for i in np.flatnonzero(self._generations[slots] != generations):
            self._clear(int(slots[i]), int(generations[i]))
        return slots

    def _clear(self, slot: int, generation: int) -> None:
        self._generations[slot] = generation
        self._requests.seen[slot] = 0.0
        self._requests.accepted[slot] = 0.0


def build(config: OnlineConfig, context: BuildContext) -> OnlineEstimator:
    """Factory of ``online``."""
    return OnlineEstimator(config)
