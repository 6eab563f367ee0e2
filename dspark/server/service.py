"""Between HTTP and the engine: a bounded queue, time limits, shutdown, and what clients' times were."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from dspark.aio import AsyncFront
from dspark.api import SpeculativeDecoder
from dspark.engine.state import Chunk
from dspark.engine.stats import RequestStats
from dspark.server.config import ServerConfig
from dspark.server.errors import ApiError
from dspark.server.metrics import Metrics
from dspark.server.monitor import Monitor
from dspark.server.prompts import Work

T = TypeVar("T")
Sink = Callable[[int, Chunk], Awaitable[None]]


class _Run:
    """A request that is being decoded: when it must end, and why it was told to end earlier."""

    __slots__ = ("choices", "ended", "last", "limit", "started")

    def __init__(self, choices: int, limit: asyncio.Timeout) -> None:
        self.choices, self.limit = choices, limit
        self.started = self.ended = False
        self.last = [0.0] * choices


class Service:
    """What the routes call. Lives in one event loop.

    Args:
        decoder: whose engine decodes; nothing else may drive it.
        config: the limits.
    """

    def __init__(self, decoder: SpeculativeDecoder, config: ServerConfig) -> None:
        self.engine, self.config = decoder.engine, config
        self._front: AsyncFront = decoder.front
        self.monitor = Monitor()
        self.engine.observe("the server's monitor", self.monitor)
        self.metrics = Metrics(self.engine, self.queue, self.guard)
        self._live = 0
        self._runs: set[_Run] = set()
        self._durations: deque[float] = deque([1.0], maxlen=64)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="dspark-read")
        self._draining = False
        self.stopped = asyncio.Event()

    # state ----------------------------------------------------------------------------------------------------------

    @property
    def draining(self) -> bool:
        """True once the server was told to stop."""
        return self._draining

    @property
    def failure(self) -> str | None:
        """Why nothing can be decoded any more, or None."""
        failure = self._front.failure
        return None if failure is None else str(failure)

    @property
    def live(self) -> int:
        """Choices that wait or run."""
        return self._live

    def queue(self) -> tuple[int, int]:
        """(running, waiting) choices."""
        running = min(len(self.engine.batcher.active), self._live)
        return running, self._live - running

    def guard(self) -> Mapping[str, bool]:
        """What is switched off or not as configured: named states of the engine and of the server."""
        parts = self.engine.parts
        states = {name: count > 0 for name, count in dict(self.engine.stats.states).items()}
        if "flat-cost" in states:  # the one that can end: the table is exchanged
            states["flat-cost"] = bool(getattr(parts.cost, "flat", False))
        return {
            "drafting-off": not parts.drafting,
            "planning-off": not parts.planning,
            "gamma-guard": self.monitor.guarded,
            "draining": self._draining,
            "engine-ended": self._front.failure is not None,
            **states,
        }

    # requests -------------------------------------------------------------------------------------------------------

    async def read(self, reader: Callable[[Any], Work], body: Any) -> Work:
        """Read a request in the worker thread, one at a time."""
        if self._draining:
            raise self._stopping()
        return await asyncio.get_running_loop().run_in_executor(self._worker, reader, body)

    async def decode(self, work: Work, stats: list[RequestStats], sink: Sink, arrived: float) -> None:
        """Decode every choice of a request and hand its chunks to ``sink``.

        Cancelling, or an error of ``sink``, frees the slots at the next step.

        Args:
            work: what to decode.
            stats: filled in, one a choice.
            sink: gets (index of the choice, chunk).
            arrived: when the request came, by ``time.perf_counter``.

        Raises:
            ApiError: the queue is full, the time is up, or the server stops.
            DSparkError: the engine refused or failed it.
        """
        count = len(work.choices)
        self._admit(count)
        loop = asyncio.get_running_loop()
        began = loop.time() - (time.perf_counter() - arrived)
        ends = began + self.config.request_timeout
        limit = asyncio.timeout_at(min(ends, began + self.config.queue_timeout))
        run = _Run(count, limit)
        self._runs.add(run)
        self._live += count
        try:
            async with limit, contextlib.aclosing(self._front.stream_many(work.choices, stats=stats)) as chunks:
                async for index, chunk in chunks:
                    if not run.started and not run.ended:
                        run.started = True
                        limit.reschedule(ends)
                    self._time(run, index, chunk, arrived)
                    if chunk.error is not None:
                        raise chunk.error
                    if chunk.finish_reason == "abort":
                        raise self._stopping()
                    await sink(index, chunk)
        except TimeoutError:
            if not limit.expired():
                raise
            raise self._timed_out(run) from None
        finally:
            self._live -= count
            self._runs.discard(run)
            took = time.perf_counter() - arrived
            self.metrics.duration.observe(took)
            self._durations.append(took)

    def _admit(self, count: int) -> None:
        if self._draining:
            raise self._stopping()
        room = self.engine.config.max_slots + self.config.max_queue
        if self._live + count <= room:
            return
        self.metrics.refused.inc()
        wait = self.retry_after()
        raise ApiError(
            429,
            f"the server is busy: {self._live} choices run or wait, at most {room} may; try again in {wait} s",
            code="queue_full",
            headers={"Retry-After": str(wait)},
        )

    def retry_after(self) -> int:
        """Seconds until a place is likely: the queue's share of what requests took lately."""
        mean = sum(self._durations) / len(self._durations)
        waiting = max(1, self._live - self.engine.config.max_slots)
        return max(1, min(60, math.ceil(mean * waiting / self.engine.config.max_slots)))

    def _time(self, run: _Run, index: int, chunk: Chunk, arrived: float) -> None:
        now, tokens = time.perf_counter(), len(chunk.ids)
        if not tokens:
            return
        if run.last[index]:
            for _ in range(tokens):
                self.metrics.between.observe((now - run.last[index]) / tokens)
        else:
            self.metrics.first_token.observe(now - arrived)
        run.last[index] = now

    def _timed_out(self, run: _Run) -> ApiError:
        if run.ended:
            return self._stopping()
        if not run.started:
            config, wait = self.config, self.retry_after()
            name = "queue_timeout" if config.queue_timeout <= config.request_timeout else "request_timeout"
            return ApiError(
                503,
                f"the request waited for a slot and its first token for {getattr(config, name):g} s, the server's "
                f"{name}, and got none; nothing was decoded, try again in {wait} s",
                code="queue_timeout",
                headers={"Retry-After": str(wait)},
            )
        return ApiError(
            504, f"decoding was not finished within {self.config.request_timeout:g} s", code="request_timeout"
        )

    def _stopping(self) -> ApiError:
        return ApiError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "10"})

    # shutdown -------------------------------------------------------------------------------------------------------

    def drain(self, within: float | None = None) -> None:
        """Take nothing new; what runs has ``within`` seconds to finish, then gets an error as its last event."""
        seconds = self.config.drain_timeout if within is None else within
        self._draining = True
        self.stopped.set()
        asyncio.get_running_loop().call_later(seconds, self._end_all)

    def _end_all(self) -> None:
        now = asyncio.get_running_loop().time()
        for run in self._runs:
            run.ended = True
            with contextlib.suppress(RuntimeError):  # it just ended
                run.limit.reschedule(now)

    def close(self) -> None:
        """Stop the worker thread. The decoder is the caller's to close."""
        self._draining = True
        self.stopped.set()
        self._worker.shutdown(wait=False, cancel_futures=True)
