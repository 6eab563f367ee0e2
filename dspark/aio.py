"""The asynchronous front: one background thread drives the engine, coroutines submit to it and read from it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from dspark.config import SamplingParams
from dspark.engine.engine import Engine
from dspark.engine.state import Chunk, RequestState
from dspark.engine.stats import RequestStats
from dspark.errors import DSparkError

T = TypeVar("T")


@dataclasses.dataclass(slots=True)
class _Reader:
    """Where a coroutine waits for its chunks."""

    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[Chunk | Exception]
    state: RequestState | None = None

    def put(self, item: Chunk | Exception) -> None:
        with contextlib.suppress(RuntimeError):  # its loop was closed: nobody waits any more
            self.loop.call_soon_threadsafe(self.queue.put_nowait, item)


class AsyncFront:
    """Owns the engine's thread. Everything that touches the engine is queued and runs there, between steps."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._jobs: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._readers: dict[str, _Reader] = {}
        self._thread: threading.Thread | None = None
        self._closing = False
        self._failed: Exception | None = None

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
        """
        self._start()
        reader = _Reader(asyncio.get_running_loop(), asyncio.Queue())
        self._post(lambda: self._submit(reader, prompt_ids, params))
        done = False
        try:
            while not done:
                item = await reader.queue.get()
                if isinstance(item, Exception):
                    done = True
                    raise item
                done = item.finish_reason is not None
                if done and stats is not None and reader.state is not None:
                    for field in dataclasses.fields(RequestStats):
                        setattr(stats, field.name, getattr(reader.state.stats, field.name))
                yield item
        finally:
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
        """Stop the thread after its current step; waiting coroutines get an error."""
        thread = self._thread
        if thread is None:
            return
        with self._wake:
            self._closing = True
            self._wake.notify()
        thread.join()
        self._thread = None
        self._closing = False

    # in the caller's thread -----------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._failed is not None:
            raise DSparkError(f"the engine's thread ended: {self._failed}") from self._failed
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="dspark-engine", daemon=True)
            self._thread.start()

    def _post(self, job: Callable[[], None]) -> None:
        with self._wake:
            self._jobs.append(job)
            self._wake.notify()

    # in the engine's thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._next_jobs():
                for chunk in self._engine.step():
                    reader = self._readers.get(chunk.request_id)
                    if reader is not None:
                        if chunk.finish_reason is not None:
                            del self._readers[chunk.request_id]
                        reader.put(chunk)
        except Exception as error:  # a fault of the engine itself must not leave coroutines waiting
            self._failed = error
        finally:
            last = self._failed or DSparkError("the decoder was closed")
            for reader in self._readers.values():
                reader.put(last)
            self._readers.clear()

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

    def _submit(self, reader: _Reader, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        try:
            name = self._engine.submit(prompt_ids, params)
        except Exception as error:
            reader.put(error)
            return
        reader.state = next(r for r in self._engine.live() if r.request_id == name)
        self._readers[name] = reader

    def _abort(self, reader: _Reader) -> None:
        if reader.state is not None:
            self._readers.pop(reader.state.request_id, None)
            self._engine.abort(reader.state.request_id)
