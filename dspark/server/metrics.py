"""Prometheus metrics: counters of the engine as they are, and times as clients see them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dspark.engine.engine import Engine

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
"""Up to ``request_timeout`` as it comes."""
_BETWEEN = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class Metrics:
    """The metrics of one server, in a registry of their own.

    Args:
        engine: whose counters are shown.
        queue: returns (running choices, waiting choices).
        guard: returns what is switched off or not as configured, by name.
    """

    def __init__(
        self, engine: Engine, queue: Callable[[], tuple[int, int]], guard: Callable[[], Mapping[str, bool]]
    ) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(engine, queue, guard))
        self.requests = Counter(
            "dspark_http_requests", "Requests that ended, by template of the path and status.", ["route", "status"],
            registry=self.registry,
        )  # fmt: skip
        self.refused = Counter("dspark_refused", "Requests refused because the queue was full.", registry=self.registry)
        self.disconnects = Counter(
            "dspark_disconnects", "Requests whose client left before their end.", registry=self.registry
        )
        self.first_token = Histogram(
            "dspark_time_to_first_token_seconds", "From a request's arrival to its first token.",
            buckets=_SECONDS, registry=self.registry,
        )  # fmt: skip
        self.between = Histogram(
            "dspark_inter_token_latency_seconds",
            "Between tokens of one choice; those of one step share its time.",
            buckets=_BETWEEN,
            registry=self.registry,
        )
        self.duration = Histogram(
            "dspark_request_seconds", "From a request's arrival to its end.", buckets=_SECONDS, registry=self.registry
        )


OUTCOME = "dspark.outcome"
"""Where a scope says that a request ended otherwise than by the status that was sent: 499 where the client left."""
UNKNOWN = "other"
"""The route of paths that are none: a client can't make labels."""


class RequestCounter:
    """ASGI middleware around everything else: counts every request, whoever answers it.

    Args:
        app: what comes behind it.
        routes: returns the routes by whose templates paths are counted.
        requests: a counter with the labels ``route`` and ``status``.
    """

    def __init__(self, app: ASGIApp, routes: Callable[[], Sequence[BaseRoute]], requests: Counter) -> None:
        self._app, self._routes, self._requests = app, routes, requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        route, sent = self._template(scope), 0

        async def noting(message: Message) -> None:
            nonlocal sent
            if message["type"] == "http.response.start":
                sent = message["status"]
            await send(message)

        failed = 499  # cancelled: the connection ended before an answer began
        try:
            await self._app(scope, receive, noting)
        except Exception:
            failed = 500
            raise
        finally:
            if route is None:  # routers inside routers have found it by now
                route = getattr(scope.get("route"), "path", None) or UNKNOWN
            self._requests.labels(route, str(scope.get(OUTCOME) or sent or failed)).inc()

    def _template(self, scope: Scope) -> str | None:
        partial = None
        for route in self._routes():
            match, _ = route.matches(dict(scope))
            path = getattr(route, "path", None)
            if match is Match.FULL:
                return path
            if match is Match.PARTIAL:  # another method
                partial = partial or path
        return partial


class EngineCollector(Collector):
    """Reads the engine's counters when asked; nothing is counted twice."""

    def __init__(
        self, engine: Engine, queue: Callable[[], tuple[int, int]], guard: Callable[[], Mapping[str, bool]]
    ) -> None:
        self._engine, self._queue, self._guard = engine, queue, guard

    def collect(self) -> Iterator[Metric]:
        """All families of the engine."""
        stats = self._engine.stats.as_dict()
        yield from _counters(stats)
        yield from _positions(stats)
        running, waiting = self._queue()
        yield _gauge("dspark_running", "Choices that hold a slot.", running)
        yield _gauge("dspark_waiting", "Choices that wait for a slot.", waiting)
        yield _gauge("dspark_slots", "Slots of the engine.", self._engine.config.max_slots)
        yield _gauge("dspark_accepted_length", "Tokens committed a decoding round.", stats["accepted_length"])
        yield _gauge("dspark_verify_budget", "Drafts verified a decoding round.", stats["verify_budget"])
        yield _gauge("dspark_overhead", "Share of the time of steps outside models.", stats["overhead"])
        yield _gauge("dspark_tasks", "Asynchronous tasks of the server's process.", tasks())
        guard = GaugeMetricFamily("dspark_guard", "1 where the named state holds.", labels=["state"])
        for name, holds in self._guard().items():
            guard.add_metric([name], float(holds))
        yield guard


def tasks() -> int:
    """Tasks of the running event loop; 0 outside one."""
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        return 0


def _gauge(name: str, help_text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, help_text, value=float(value))


_TOTALS = (
    ("dspark_steps", "Target forwards.", "steps"),
    ("dspark_drafting_steps", "Steps that drafted.", "drafting_steps"),
    ("dspark_rounds", "Decoding rounds of requests.", "rounds"),
    ("dspark_output_tokens", "Tokens committed.", "committed"),
    ("dspark_prefill_tokens", "Prompt tokens read.", "prefill_tokens"),
    ("dspark_prefix_hits", "Choices that began with a prefix that another had read.", "prefix_hits"),
    ("dspark_cached_tokens", "Prompt tokens that they did not read.", "cached_tokens"),
    ("dspark_executed_tokens", "Tokens that the target ran.", "executed_tokens"),
    ("dspark_drafted_tokens", "Tokens drafted.", "drafted"),
    ("dspark_verified_tokens", "Drafted tokens verified.", "verified"),
    ("dspark_unproven_rounds", "Rounds that a fault left without a proof of exactness.", "unproven_rounds"),
)


def _counters(stats: Mapping[str, Any]) -> Iterator[Metric]:
    for name, help_text, key in _TOTALS:
        yield CounterMetricFamily(name, help_text, value=stats[key])
    yield CounterMetricFamily("dspark_accepted_tokens", "Drafted tokens accepted.", value=sum(stats["accepted"]))
    for name, help_text, key, label in (
        ("dspark_finished", "Choices ended, by reason.", "finished", "reason"),
        ("dspark_phase_seconds", "Seconds in each phase of a step.", "phase_seconds", "phase"),
        ("dspark_plans", "Plans by why the scheduler stopped.", "stop_reasons", "reason"),
        ("dspark_faults", "Faults by component and phase.", "faults", "where"),
        ("dspark_state_rounds", "Rounds that a named state held.", "states", "state"),
        ("dspark_gamma_rounds", "Rounds by the block size chosen for them.", "gammas", "gamma"),
        ("dspark_gamma_reasons", "Rounds by why that block size was chosen.", "gamma_reasons", "reason"),
    ):
        family = CounterMetricFamily(name, help_text, labels=[label])
        for key_value, count in stats.get(key, {}).items():
            family.add_metric([str(key_value)], count)
        yield family


def _positions(stats: Mapping[str, Any]) -> Iterator[Metric]:
    for name, help_text, key in (
        ("dspark_position_offered", "Drafts verified, by position from 1.", "offered"),
        ("dspark_position_accepted", "Drafts accepted, by position from 1.", "accepted"),
    ):
        family = CounterMetricFamily(name, help_text, labels=["position"])
        for k, count in enumerate(stats[key], start=1):
            family.add_metric([str(k)], count)
        yield family
