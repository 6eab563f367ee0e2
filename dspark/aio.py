"""The asynchronous front: one background thread drives the engine, coroutines submit to it and read from it."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from dspark.config import SamplingParams
from dspark.engine.engine import Engine
from dspark.engine.state import Chunk
from dspark.engine.stats import RequestStats
from dspark.errors import DSparkError

T = TypeVar("T")


@dataclasses.dataclass(slots=True, eq=False)
class _Reader:
    """Where a coroutine waits for its chunks. ``request_id`` and ``stats`` are known once it is submitted."""

    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[Chunk | BaseException]
    request_id: str = ""
    stats: RequestStats = dataclasses.field(default_factory=RequestStats)

    def put(self, item: Chunk | BaseException) -> bool:
        """False where its loop was closed: nobody waits any more."""
        try:
            self.loop.call_soon_threadsafe(self.queue.put_nowait, item)
        except RuntimeError:
            return False
        return True


class AsyncFront:
    """Owns the engine's thread. Everything that touches the engine is queued and runs there, between steps."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._jobs: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._waiting: set[_Reader] = set()
        self._readers: dict[str, _Reader] = {}
        self._thread: threading.Thread | None = None
        self._closing = False
        self._ended: BaseException | None = None

    def check_idle(self) -> None:
        """Raises:
        DSparkError: the background thread drives the engine, so the caller's must not.
        """
        if self._thread is not None:
            raise DSparkError(
                "this decoder is driven asynchronously: use agenerate and astream, or close() it and build another"
            )

    async def stream(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, stats: RequestStats | None = None
    ) -> AsyncIterator[Chunk]:
        """Submit and yield chunks; leaving early aborts. ``stats`` is filled in at the end.

        Raises:
            RequestError: the request was refused.
            DSparkError: the decoder was closed, or its thread ended.
        """
        reader = _Reader(asyncio.get_running_loop(), asyncio.Queue())
        with self._wake:
            self._start()
            self._waiting.add(reader)
            self._post(lambda: self._submit(reader, prompt_ids, params))
        done = False
        try:
            while not done:
                item = await reader.queue.get()
                if isinstance(item, BaseException):
                    done = True
                    raise item
                done = item.finish_reason is not None
                if done and stats is not None:
                    for field in dataclasses.fields(RequestStats):
                        setattr(stats, field.name, getattr(reader.stats, field.name))
                yield item
        finally:
            with self._wake:
                self._waiting.discard(reader)
                if not done:
                    self._post(lambda: self._abort(reader))

    async def gather(self, work: Iterable[Awaitable[T]]) -> list[T]:
        """Run samples together; the first failure cancels the others."""
        tasks = [asyncio.ensure_future(w) for w in work]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    def close(self) -> None:
        """Stop the thread after its current step; waiting coroutines get an error, and so do later ones."""
        with self._wake:
            self._closing = True
            self._wake.notify()
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    # in the caller's thread, under the lock -------------------------------------------------------------------------

    def _start(self) -> None:
        if self._ended is not None:
            raise DSparkError(str(self._ended)) from self._ended
        if self._closing:
            raise DSparkError("the decoder was closed")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="dspark-engine", daemon=True)
            self._thread.start()

    def _post(self, job: Callable[[], None]) -> None:
        self._jobs.append(job)
        self._wake.notify()

    # in the engine's thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        last: BaseException = DSparkError("the decoder was closed")
        try:
            while self._next_jobs():
                for chunk in self._engine.step():
                    self._hand_over(chunk)
        except BaseException as error:  # a fault of the engine itself must not leave coroutines waiting
            last = DSparkError(f"the engine's thread ended: {error!r}")
            last.__cause__ = error
        with self._wake:
            self._ended = last
            for reader in self._waiting:
                reader.put(last)
            self._readers.clear()
            self._jobs.clear()

    def _next_jobs(self) -> bool:
        """Wait for work, run what was posted; False once closing."""
        with self._wake:
            while not (self._jobs or self._engine.has_work or self._closing):
                self._wake.wait()
            jobs = list(self._jobs)
            self._jobs.clear()
        for job in jobs:
            job()
        return not self._closing

    def _hand_over(self, chunk: Chunk) -> None:
        reader = self._readers.get(chunk.request_id)
        if reader is None:
            return
        if chunk.finish_reason is not None:
            del self._readers[chunk.request_id]
        if not reader.put(chunk):
            self._abort(reader)
            with self._wake:
                self._waiting.discard(reader)

    def _submit(self, reader: _Reader, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        try:
            reader.request_id = self._engine.submit(prompt_ids, params)
        except Exception as error:
            reader.put(error)
            return
        reader.stats = self._engine.request_stats(reader.request_id)
        self._readers[reader.request_id] = reader

    def _abort(self, reader: _Reader) -> None:
        if self._readers.pop(reader.request_id, None) is not None:
            self._engine.abort(reader.request_id)
