"""The asynchronous front: one background thread drives the engine, coroutines submit to it and read from it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

from dspark.config import SamplingParams
from dspark.engine.engine import Engine
from dspark.engine.state import Chunk
from dspark.engine.stats import RequestStats
from dspark.errors import DSparkError
from dspark.ops.threads import release_workers

T = TypeVar("T")


@dataclasses.dataclass(slots=True, eq=False)
class _Reader:
    """Where a coroutine waits for its chunks. ``request_id`` and ``stats`` are known once it is submitted."""

    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[tuple[int, Chunk | BaseException]]
    index: int = 0
    request_id: str = ""
    stats: RequestStats = dataclasses.field(default_factory=RequestStats)

    def put(self, item: Chunk | BaseException) -> bool:
        """False where its loop was closed: nobody waits any more."""
        return _post_all(self.loop, [(self, item)])


def _post_all(loop: asyncio.AbstractEventLoop, items: Sequence[tuple[_Reader, Chunk | BaseException]]) -> bool:
    """Deliver in the loop's thread, waking it once; False where it was closed."""
    try:
        loop.call_soon_threadsafe(_put_all, items)
    except RuntimeError:
        return False
    return True


def _put_all(items: Sequence[tuple[_Reader, Chunk | BaseException]]) -> None:
    for reader, item in items:
        reader.queue.put_nowait((reader.index, item))


class AsyncFront:
    """Owns the engine's thread. Everything that touches the engine is queued and runs there, between steps."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._jobs: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._waiting: set[_Reader] = set()
        self._calls: list[tuple[asyncio.AbstractEventLoop, Callable[[Any, BaseException | None], None]]] = []
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
        async with contextlib.aclosing(self.stream_many([(prompt_ids, params)], stats=[stats])) as chunks:
            async for _, chunk in chunks:
                yield chunk

    async def stream_many(
        self,
        requests: Sequence[tuple[Sequence[int], SamplingParams]],
        *,
        stats: Sequence[RequestStats | None] = (),
    ) -> AsyncGenerator[tuple[int, Chunk], None]:
        """Submit (prompt ids, parameters) together and yield (index of the request, chunk) as they come.

        Leaving early aborts those that run. The first refusal ends all of them. ``stats`` [n] are filled in as each
        request ends.

        Raises:
            RequestError: a request was refused.
            DSparkError: the decoder was closed, or its thread ended.
        """
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[tuple[int, Chunk | BaseException]] = asyncio.Queue()
        readers = [_Reader(loop, queue, i) for i in range(len(requests))]
        running = set(readers)
        with self._wake:
            self._start()
            self._waiting.update(readers)
            for reader, (prompt_ids, params) in zip(readers, requests, strict=True):
                self._post(functools.partial(self._submit, reader, prompt_ids, params))
        try:
            while running:
                index, item = await queue.get()
                reader = readers[index]
                if isinstance(item, BaseException):
                    self._leave(reader)
                    running.discard(reader)
                    raise item
                if item.finish_reason is not None:
                    self._leave(reader)
                    running.discard(reader)
                    self._copy_stats(reader, stats)
                yield index, item
        finally:
            with self._wake:
                for reader in running:
                    self._waiting.discard(reader)
                    self._post(functools.partial(self._abort, reader))

    async def call(self, work: Callable[[Engine], T]) -> T:
        """Run ``work(engine)`` in the engine's thread, between two steps, and return what it returns.

        Raises:
            DSparkError: the decoder was closed, or its thread ended.
        """
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()

        def settle(value: T | None, error: BaseException | None) -> None:
            if result.done():
                return
            if error is not None:
                result.set_exception(error)
            else:
                result.set_result(cast(T, value))

        def run() -> None:
            value, error = None, None
            try:
                value = work(self._engine)
            except Exception as raised:
                error = raised
            with contextlib.suppress(RuntimeError):  # its loop was closed: nobody waits any more
                loop.call_soon_threadsafe(settle, value, error)

        with self._wake:
            self._start()
            self._calls.append((loop, settle))
            self._post(run)
        try:
            return await result
        finally:
            with self._wake, contextlib.suppress(ValueError):
                self._calls.remove((loop, settle))

    @property
    def failure(self) -> BaseException | None:
        """Why the engine's thread ended, or None while it can take requests."""
        if self._ended is None and self._closing:
            return DSparkError("the decoder was closed")
        return self._ended

    @staticmethod
    def _copy_stats(reader: _Reader, stats: Sequence[RequestStats | None]) -> None:
        wanted = stats[reader.index] if reader.index < len(stats) else None
        if wanted is not None:
            for field in dataclasses.fields(RequestStats):
                setattr(wanted, field.name, getattr(reader.stats, field.name))

    def _leave(self, reader: _Reader) -> None:
        with self._wake:
            self._waiting.discard(reader)

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
            release_workers()  # those of the thread that built the engine, as a rule
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
                self._hand_over(self._engine.step())
        except BaseException as error:  # a fault of the engine itself must not leave coroutines waiting
            last = DSparkError(f"the engine's thread ended: {error!r}")
            last.__cause__ = error
        with self._wake:
            self._ended = last
            for reader in self._waiting:
                reader.put(last)
            for loop, settle in self._calls:
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(settle, None, last)
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

    def _hand_over(self, chunks: Sequence[Chunk]) -> None:
        """Give each chunk to its reader, waking a loop once a step."""
        batches: dict[asyncio.AbstractEventLoop, list[tuple[_Reader, Chunk | BaseException]]] = {}
        for chunk in chunks:
            reader = self._readers.get(chunk.request_id)
            if reader is None:
                continue
            if chunk.finish_reason is not None:
                del self._readers[chunk.request_id]
            batches.setdefault(reader.loop, []).append((reader, chunk))
        for loop, items in batches.items():
            if not _post_all(loop, items):
                for reader, _ in items:
                    self._abort(reader)
                    self._leave(reader)

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
