"""Keeping an engine busy with requests that come from somewhere: a file, a data set, a user's list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from dspark.api import Generation, SpeculativeDecoder
from dspark.config import SamplingParams

Payload = TypeVar("Payload")


class RequestLoop(Generic[Payload]):
    """Steps a decoder's engine as long as there are requests, and hands each back that ended.

    Args:
        decoder: whose engine is driven.
        take: called with (payload, result) of each request that ended, one that failed included (``result.error``).
        on_tokens: called with the number of tokens that a step added.
    """

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        take: Callable[[Payload, Generation], None],
        on_tokens: Callable[[int], None] = lambda count: None,
    ) -> None:
        self.engine = decoder.engine
        self._take, self._on_tokens = take, on_tokens
        self._live: dict[str, tuple[Payload, Generation, Any]] = {}

    def __len__(self) -> int:
        return len(self._live)

    @property
    def asked(self) -> int:
        """The most tokens that live requests may still bring: their ``max_tokens``."""
        return sum(state.params.max_tokens for _, _, state in self._live.values())

    def submit(self, ids: list[int], params: SamplingParams, payload: Payload) -> str:
        """Queue a request; returns its id.

        Raises:
            RequestError: it is refused.
        """
        name = self.engine.submit(ids, params)
        state = next(r for r in reversed(self.engine.live()) if r.request_id == name)
        self._live[name] = (payload, Generation(prompt_ids=ids), state)
        return name

    def run(self, fill: Callable[[], None], stopped: Callable[[], bool] = lambda: False) -> None:
        """Fill, step, hand out, and again, until nothing is live. What is live when this is left is aborted.

        Args:
            fill: submits what is to run, before the first step and after each.
            stopped: asked before each step; True leaves.
        """
        try:
            fill()
            while self._live and not stopped():
                chunks = self.engine.step()
                self._on_tokens(sum(len(chunk.ids) for chunk in chunks))
                for chunk in chunks:
                    if chunk.request_id in self._live:
                        self._add(chunk)
                fill()
        finally:
            for name in self._live:
                self.engine.abort(name)
            self._live.clear()
            self.engine.leave()

    def _add(self, chunk: Any) -> None:
        payload, result, state = self._live[chunk.request_id]
        result.add(chunk)
        if chunk.finish_reason is not None:
            del self._live[chunk.request_id]
            result.stats = state.stats
            self._take(payload, result)
