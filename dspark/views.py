"""What components see of the requests of a round, and the names of modes, purposes and arrays."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dspark.tokens import TokenView

if TYPE_CHECKING:
    from dspark.config import SamplingParams

IntArray = npt.NDArray[np.int64]
KeyArray = npt.NDArray[np.uint64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


class Mode(enum.StrEnum):
    """How a request's tokens are decided. METHOD: greedy is the limit of both exact rules."""

    GREEDY = "greedy"
    REJECTION = "rejection"
    COUPLED = "coupled"


class Purpose(enum.IntEnum):
    """What a random draw is for. Part of its key, so that no draw is ever used twice."""

    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    """The corrected or the bonus token: at most one of them is drawn in a round."""
    EXPLORE = 4


@dataclass(frozen=True, slots=True)
class RequestView:
    """One active request as components see it.

    Attributes:
        request_id: the caller's or the engine's name of it.
        slot: its place in the target's and the drafter's caches.
        generation: how often that slot had been given out when this request got it; (slot, generation) is unique.
        ids: committed tokens, prompt and output; the last one is the anchor.
        prompt_len: how many of ``ids`` are the prompt.
        num_cached: how many of ``ids`` the target had read when the round began.
        max_draft: the most tokens that this row may have verified in this round (max_tokens, the slot's length).
        params: its sampling parameters.
        mode: how its tokens are decided.
        key: 64-bit key of its random draws (``rejection``), or its seed (``coupled``).
    """

    request_id: str
    slot: int
    generation: int
    ids: TokenView
    prompt_len: int
    num_cached: int
    max_draft: int
    params: SamplingParams
    mode: Mode
    key: int

    @property
    def anchor(self) -> int:
        """The last committed token, x_0."""
        return self.ids[-1]

    @property
    def anchor_position(self) -> int:
        """Absolute position of the anchor."""
        return len(self.ids) - 1


@dataclass(frozen=True, slots=True)
class BatchView:
    """The R requests of a round that can draft, in row order; gamma tokens are asked of each."""

    requests: tuple[RequestView, ...]
    gamma: int

    def __len__(self) -> int:
        return len(self.requests)
