"""Admission and the work of a step: continuous batching with chunked prefill.

Requests wait in order of arrival; a free slot admits the next one at any step. Each step reads the pending tokens of
every active request: one anchor in the middle of decoding, up to ``step_tokens`` of prompts in all beside them.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from dspark.engine.state import RequestState, SlotPool


@dataclass(frozen=True, slots=True)
class Work:
    """One step: requests that decode (their pending tokens are read whole and a token follows) and prompt chunks.

    Attributes:
        decode: rows whose logits are wanted.
        prefill: (request, tokens to read) without logits.
    """

    decode: tuple[RequestState, ...]
    prefill: tuple[tuple[RequestState, int], ...]

    def __bool__(self) -> bool:
        return bool(self.decode or self.prefill)

    @property
    def requests(self) -> tuple[RequestState, ...]:
        """All that take part, decoding ones first."""
        return (*self.decode, *(r for r, _ in self.prefill))

    @property
    def base_tokens(self) -> int:
        """Tokens that the forward executes before any draft is verified."""
        return sum(r.pending for r in self.decode) + sum(n for _, n in self.prefill)

    @property
    def context(self) -> int:
        """Longest context of the step."""
        return max((len(r.ids) for r in self.decode), default=0)


class Batcher:
    """Owns the waiting queue, the active list and the slots."""

    def __init__(self, slots: int, step_tokens: int) -> None:
        self.step_tokens = step_tokens
        self.pool = SlotPool(slots)
        self.waiting: OrderedDict[RequestState, None] = OrderedDict()  # leaving the middle of it costs nothing
        self.active: list[RequestState] = []

    def add(self, request: RequestState) -> None:
        self.waiting[request] = None

    def admit(self) -> None:
        """Give free slots to waiting requests."""
        while self.waiting and len(self.pool):
            self.start(next(iter(self.waiting)))

    def start(self, request: RequestState, slot: int | None = None) -> None:
        """Give a free slot to a waiting request; the lowest if none is named."""
        del self.waiting[request]
        request.slot, request.generation = self.pool.take(slot)
        self.active.append(request)

    def work(self) -> Work:
        """The next step. Decoding requests always run; prompts share what ``step_tokens`` leaves, oldest first.

        Those that wait for others to read what they share are left out.
        """
        budget = self.step_tokens
        decode: list[RequestState] = []
        prefill: list[tuple[RequestState, int]] = []
        for request in self.active:
            if request.held:
                continue
            pending = request.pending
            if pending == 1:
                decode.append(request)
                continue
            take = min(pending, budget)
            if take == 0:
                continue
            budget -= take
            if take == pending:
                decode.append(request)
            else:
                prefill.append((request, take))
        return Work(tuple(decode), tuple(prefill))

    def remove(self, request: RequestState) -> None:
        """Free the slot of a finished request, or take it from the queue."""
        if request.slot >= 0:
            self.active.remove(request)
            self.pool.give_back(request.slot)
        else:
            self.waiting.pop(request, None)
