"""Reading the chunks of some requests while the engine steps for all."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dspark.engine.state import Chunk

if TYPE_CHECKING:
    from dspark.engine.engine import Engine


class Follower(Iterator[Chunk]):
    """Chunks of the requests that were added, in the order they come; the engine is stepped where none is ready.

    Any number of followers may take turns, in one thread or several: what a step adds to a request is kept for whoever
    follows it, and for :meth:`Engine.take` where nobody does. One that is closed, or forgotten, before its requests
    have ended aborts them.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ready: deque[Chunk] = deque()
        self._left: set[str] = set()

    def add(self, request_id: str) -> None:
        """Follow a request that was just submitted."""
        self._left.add(request_id)
        self._engine.route(request_id, self._ready)

    def __next__(self) -> Chunk:
        while self._left:
            with self._engine.lock:  # a step and its delivery are one: nobody looks for chunks in between
                if self._ready:
                    chunk = self._ready.popleft()
                    if chunk.finish_reason is not None:
                        self._left.discard(chunk.request_id)
                    return chunk
                if not self._engine.has_work:  # somebody else stepped the engine, and has what is missing
                    break
                self._engine.deliver(self._engine.step())
        raise StopIteration

    def close(self) -> None:
        """Abort what has not ended, and free its slots at once. Not to be called in the middle of a step."""
        with self._engine.lock:
            if self._left:
                self._abort()
                self._engine.deliver(self._engine.leave())

    def __del__(self) -> None:
        self._abort()  # may run in the middle of a step: the slots are free at the next one

    def _abort(self) -> None:
        left, self._left = self._left, set()
        for request_id in left:
            self._engine.abort(request_id)
            if not self._engine.is_live(request_id):  # else its last chunk is still to come
                self._engine.unroute(request_id)
