"""Replays of a trace under loads and policies: points, frontiers, service levels, and the price of a lag."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dspark import _sched
from dspark.bench.load import Closed, Load, median, percentile
from dspark.bench.trace import AcceptanceTrace
from dspark.errors import ConfigError

SCHEDULERS = ("off", "fixed", "threshold", "causal", "lookahead", "lagged", "global", "clairvoyant")


@dataclass(frozen=True, slots=True)
class Policy:
    """Who decides how much is drafted and verified.

    Attributes:
        scheduler: one of ``SCHEDULERS``; ``clairvoyant`` verifies only what will be accepted.
        gamma: drafted tokens a round; None for the trace's; 0 is plain decoding.
        adaptive: choose gamma up to that by cost and history; the value is the guard's threshold.
        threshold: of the scheduler ``threshold``.
        confidence: ``recorded``, ``learned`` or ``oracle``; None for what fits the trace.
    """

    scheduler: str = "causal"
    gamma: int | None = None
    adaptive: float | None = None
    threshold: float = 0.5
    confidence: str | None = None

    def __post_init__(self) -> None:
        if self.scheduler not in SCHEDULERS:
            raise ConfigError(f"scheduler {self.scheduler!r}: expected one of {', '.join(SCHEDULERS)}")

    @property
    def label(self) -> str:
        """For tables."""
        if self.gamma == 0 or self.scheduler == "off":
            return "plain"
        if self.adaptive is not None:
            return f"{self.scheduler}, adaptive gamma"
        return self.scheduler if self.gamma is None else f"{self.scheduler}, gamma {self.gamma}"


@dataclass(frozen=True, slots=True)
class World:
    """What does not change between the points of a simulation.

    Attributes:
        trace: what is replayed.
        cost: what schedulers plan with and, without ``roofline``, what steps take.
        roofline: what steps really take.
        replicas, max_slots, step_tokens, kv_tokens, extra_prompt, shuffle, seed: see ``dspark._sched.simulate``.
        requests_per_user: requests of a run, by concurrency; open loops get as many as for ``max_slots`` users.
        least_requests: at least so many.
    """

    trace: AcceptanceTrace
    cost: _sched.CostTable
    roofline: _sched.Roofline | None = None
    replicas: int = 1
    max_slots: int = 64
    step_tokens: int = 512
    kv_tokens: int | None = None
    extra_prompt: int = 0
    shuffle: bool = False
    seed: int = 0
    requests_per_user: int = 8
    least_requests: int = 32
    _native: list[_sched.Trace] = field(default_factory=list, repr=False, compare=False)

    def native(self) -> _sched.Trace:
        """The trace in Rust, made once."""
        if not self._native:
            self._native.append(self.trace.native())
        return self._native[0]


@dataclass(frozen=True, slots=True)
class Point:
    """One replay.

    Attributes:
        policy, load: what was replayed.
        figures: totals as ``dspark._sched.simulate`` gives them.
        speeds: tokens a second of each user, after the first token.
        waits: seconds to each first token.
    """

    policy: Policy
    load: Load
    figures: Mapping[str, Any]
    speeds: tuple[float, ...]
    waits: tuple[float, ...]

    @property
    def throughput(self) -> float:
        """Tokens a second of all users."""
        return float(self.figures["throughput"])

    @property
    def user_speed(self) -> float:
        """Median tokens a second of a user."""
        return median(self.speeds)

    def attained(self, speed: float) -> float:
        """Share of the requests whose user got this speed at least."""
        known = [s for s in self.speeds if not math.isnan(s)]
        return sum(s >= speed for s in known) / len(known) if known else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "policy": dataclasses.asdict(self.policy),
            "label": self.policy.label,
            **self.load.as_dict(),
            "user_speed": self.user_speed,
            "user_speed_p10": percentile(self.speeds, 10),
            "first_token": median(self.waits),
            "first_token_p99": percentile(self.waits, 99),
            **self.figures,
        }


def replay(world: World, policy: Policy, load: Load, requests: int | None = None) -> Point:
    """Simulate one policy under one load.

    Raises:
        ConfigError: settings that are out of range or do not fit the trace.
    """
    closed = isinstance(load, Closed)
    users = load.concurrency if isinstance(load, Closed) else world.max_slots
    count = requests or max(world.least_requests, users * world.requests_per_user)
    try:
        found = _sched.simulate(
            world.native(),
            world.cost,
            requests=count,
            concurrency=users if closed else None,
            rate=None if isinstance(load, Closed) else load.rate,
            scheduler=policy.scheduler,
            gamma=policy.gamma,
            adaptive=policy.adaptive,
            threshold=policy.threshold,
            confidence=policy.confidence or world.trace.confidence,
            roofline=world.roofline,
            shuffle=world.shuffle,
            replicas=world.replicas,
            max_slots=world.max_slots,
            step_tokens=world.step_tokens,
            kv_tokens=world.kv_tokens,
            extra_prompt=world.extra_prompt,
            seed=world.seed,
        )
    except ValueError as err:
        raise ConfigError(f"simulation: {err}") from err
    records = found.pop("records")
    times = list(zip(records["arrival"], records["first"], records["finish"], records["tokens"], strict=True))
    speeds = tuple((n - 1) / (end - first) if n > 1 and end > first else math.nan for _, first, end, n in times)
    waits = tuple(first - arrival for arrival, first, _, _ in times)
    return Point(policy, load, found, speeds, waits)


def sweep(world: World, policies: Iterable[Policy], loads: Sequence[Load]) -> list[Point]:
    """Every policy under every load."""
    return [replay(world, policy, load) for policy in policies for load in loads]


def frontier(points: Iterable[Point]) -> list[Point]:
    """The points that no other beats in both throughput and speed of a user, from the fastest user on."""
    best = -math.inf
    kept = []
    known = (p for p in points if not math.isnan(p.user_speed))
    for point in sorted(known, key=lambda p: (-p.user_speed, -p.throughput)):
        if point.throughput > best:
            best = point.throughput
            kept.append(point)
    return kept


def tiers(points: Iterable[Point], speeds: Sequence[float], share: float = 0.9) -> dict[float, dict[str, Point | None]]:
    """Service levels: for each speed, each policy's point of most throughput at which ``share`` of the users get it."""
    by_policy: dict[str, list[Point]] = {}
    for point in points:
        by_policy.setdefault(point.policy.label, []).append(point)

    def best(some: list[Point], speed: float) -> Point | None:
        return max((p for p in some if p.attained(speed) >= share), key=lambda p: p.throughput, default=None)

    return {speed: {label: best(some, speed) for label, some in by_policy.items()} for speed in speeds}


def lag_price(world: World, loads: Sequence[Load], gamma: int | None = None) -> list[tuple[Load, float]]:
    """What planning from survivals of two rounds ago costs, under each load: throughput of ``lagged`` over that of the
    same rule with the present survivals (``global``), minus 1."""
    prices = []
    for load in loads:
        late, now = (replay(world, Policy(name, gamma), load).throughput for name in ("lagged", "global"))
        prices.append((load, late / now - 1.0))
    return prices
