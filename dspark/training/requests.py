"""Requests that are pulled one after the other, as many at hand as keep an engine busy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dspark.api import Generation, SpeculativeDecoder
from dspark.config import SamplingParams
from dspark.drive import RequestLoop
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
    loop: RequestLoop[Any] = RequestLoop(decoder, take, on_tokens)
    most = 2 * decoder.engine.config.max_slots

    def fill() -> None:
        while len(loop) < most and not stopped():
            ask = pull(loop.asked)
            if ask is None:
                return
            try:
                loop.submit(ask.ids, ask.params, ask.payload)
            except RequestError as err:
                take(ask.payload, Generation(prompt_ids=ask.ids, finish_reason="error", error=err))

    loop.run(fill, stopped)
