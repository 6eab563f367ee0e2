"""Keeping an engine busy with a stream of requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dspark.api import Generation, SpeculativeDecoder
from dspark.config import SamplingParams
from dspark.errors import RequestError


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to come.

    Attributes:
        ids: the prompt's token ids.
        params: how it is decoded.
        payload: whatever its owner wants back with the answer.
    """

    ids: list[int]
    params: SamplingParams
    payload: Any


def decode_stream(
    decoder: SpeculativeDecoder,
    pull: Callable[[int], Ask | None],
    take: Callable[[Any, Generation], None],
    *,
    on_tokens: Callable[[int], None],
    stopped: Callable[[], bool],
) -> None:
    """Decode requests as long as ``pull`` gives some, twice as many at hand as the engine has slots.

    What is live when this is left, by ``stopped`` or by an exception, is aborted.

    Args:
        pull: called with the most tokens that live requests may still take (their ``max_tokens``); the next request,
            or None where there is none *now*. It is asked again after every step with live requests.
        take: called with (payload, result) of each that ended. A refused request has a ``RequestError``.
        on_tokens: called with the number of tokens that a step added.
        stopped: asked before each request and each step.
    """
    engine = decoder.engine
    live: dict[str, tuple[Ask, Generation]] = {}

    def fill() -> None:
        while len(live) < 2 * engine.config.max_slots and not stopped():
            ask = pull(sum(waiting.params.max_tokens for waiting, _ in live.values()))
            if ask is None:
                return
            result = Generation(prompt_ids=ask.ids)
            try:
                live[engine.submit(ask.ids, ask.params)] = ask, result
            except RequestError as err:
                result.finish_reason, result.error = "error", err
                take(ask.payload, result)

    try:
        fill()
        while live and not stopped():
            chunks = engine.step()
            on_tokens(sum(len(chunk.ids) for chunk in chunks))
            for chunk in chunks:
                if chunk.request_id not in live:
                    continue
                ask, result = live[chunk.request_id]
                result.add(chunk)
                if chunk.finish_reason is not None:
                    del live[chunk.request_id]
                    take(ask.payload, result)
            fill()
    finally:
        for name in live:
            engine.abort(name)
        engine.leave()
