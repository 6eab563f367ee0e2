"""What the engine knows of a request, and who holds which slot.

A request's committed ids grow by :meth:`RequestState.append` alone, which only ``commit`` calls.
"""

from __future__ import annotations

import bisect
import time
from dataclasses import dataclass, field
from typing import Any

from dspark.config import SamplingParams
from dspark.engine.stats import RequestStats
from dspark.tokens import TokenView
from dspark.types import Mode, RequestView


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one step added to one request.

    Attributes:
        request_id: whose it is.
        ids: committed tokens.
        text: their text as far as it can be shown (UTF-8 complete, no part of a stop string); None without tokenizer.
        accepted: how many of ``ids`` were drafted and accepted; they come first.
        logprobs: one entry a token where asked for.
        finish_reason: ``stop``, ``length``, ``abort`` or ``error`` with the last chunk.
        error: the error behind ``error``.
    """

    request_id: str
    ids: tuple[int, ...] = ()
    text: str | None = None
    accepted: int = 0
    logprobs: tuple[Any, ...] = ()
    finish_reason: str | None = None
    error: Exception | None = None


@dataclass(slots=True, eq=False)
class RequestState:
    """A request from submit to finish."""

    request_id: str
    params: SamplingParams
    mode: Mode
    key: int
    ids: list[int]
    stop_ids: frozenset[int]
    sampling: Any
    text: Any = None
    prompt_len: int = 0
    slot: int = -1
    generation: int = -1
    num_cached: int = 0
    max_len: int = 0
    finish_reason: str | None = None
    error: Exception | None = None
    leaving: bool = False  # aborted, but the step that frees its slot is still to come
    held: bool = False  # others are about to read what it can take over from them
    doubtful: bool = False  # something escaped from a step of its: nobody goes on from its slot
    stats: RequestStats = field(default_factory=RequestStats)
    submitted: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.prompt_len = len(self.ids)
        self.stats.prompt_tokens = self.prompt_len

    @property
    def output_len(self) -> int:
        return len(self.ids) - self.prompt_len

    @property
    def pending(self) -> int:
        """Committed tokens that the target has not read; the last of them is the anchor."""
        return len(self.ids) - self.num_cached

    @property
    def max_draft(self) -> int:
        """Most drafts that can still be committed beside the token that follows them, or that fit the slot."""
        return max(0, min(self.params.max_tokens - self.output_len - 1, self.max_len - len(self.ids)))

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def append(self, token_id: int) -> None:
        self.ids.append(token_id)

    def end(self, reason: str, error: Exception | None = None) -> Chunk:
        """Finish without another token; its last chunk."""
        self.finish_reason, self.error = reason, error
        text = None if self.text is None else ""
        return Chunk(self.request_id, text=text, finish_reason=reason, error=error)

    def view(self) -> RequestView:
        """What components see of it now."""
        return RequestView(
            request_id=self.request_id,
            slot=self.slot,
            generation=self.generation,
            ids=TokenView(self.ids, len(self.ids)),
            prompt_len=self.prompt_len,
            num_cached=self.num_cached,
            max_draft=self.max_draft,
            params=self.params,
            mode=self.mode,
            key=self.key,
        )


class SlotPool:
    """Gives out slots, the lowest first so that active ones stay together, and counts their generations.

    Attributes:
        free: slots that nobody runs in, rising.
    """

    def __init__(self, slots: int) -> None:
        self.size = slots
        self.free = list(range(slots))
        self._generations = [0] * slots

    def __len__(self) -> int:
        """Free slots."""
        return len(self.free)

    def take(self, slot: int | None = None) -> tuple[int, int]:
        """(slot, generation) of a free slot, the lowest if none is named; the pool must not be empty."""
        slot = self.free[0] if slot is None else slot
        self.free.remove(slot)
        return slot, self.renew(slot)

    def renew(self, slot: int) -> int:
        """A new generation of a slot."""
        self._generations[slot] += 1
        return self._generations[slot]

    def give_back(self, slot: int) -> None:
        bisect.insort(self.free, slot)
