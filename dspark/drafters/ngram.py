"""The drafter ``ngram``: prompt lookup. It copies what followed the last occurrence of the current suffix.

Needs no weights, no taps and no target cache, so it drafts for every target from a request's first step on. Its
proposals are a function of the request's own committed tokens: q is a point mass (METHOD section 1 then accepts x_k
with probability p_t(x_k), and the residual is p_t without x_k).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dspark.capabilities import DrafterCapabilities
from dspark.errors import ConfigError
from dspark.protocols import BuildContext, DraftSampler
from dspark.types import BatchView, Committed, DraftBlock, RequestView

CAPABILITIES = DrafterCapabilities(point_mass=True)

MATCH_CAP = 32
"""Match lengths are measured up to here; ``features["match_length"]`` never exceeds it."""


@dataclass(frozen=True, slots=True)
class NgramConfig:
    """Settings of ``ngram``.

    Attributes:
        min_n: shortest suffix, in tokens, that is looked up. Shorter ones match more often and are right less often.
        max_n: longest suffix that is looked up, at most 32; it is tried first.
        gamma: tokens drafted a round where the engine's config names none.
    """

    min_n: int = 2
    max_n: int = 4
    gamma: int = 7

    def __post_init__(self) -> None:
        for name, high in (("min_n", MATCH_CAP), ("max_n", MATCH_CAP), ("gamma", None)):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not whole or value < 1 or (high is not None and value > high):
                bound = "of at least 1" if high is None else f"from 1 to {high}"
                raise ConfigError(f"NgramConfig.{name}: expected an integer {bound}, got {value!r}")
        if self.min_n > self.max_n:
            raise ConfigError(f"NgramConfig: min_n {self.min_n} exceeds max_n {self.max_n}")


class _Index:
    """Where each n-gram of one request last ended.

    ``last[gram] = e`` means ids[e - n : e] == gram and ids[e] exists: the suffix that ends the text is not in it yet,
    so a lookup finds an *earlier* occurrence, the most recent one, and something to copy.
    """

    __slots__ = ("generation", "last", "length")

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.length = 0
        self.last: dict[tuple[int, ...], int] = {}


class NgramDrafter:
    """Prompt lookup over each request's prompt and output.

    The longest suffix of max_n down to min_n tokens that occurred before is taken, at its most recent occurrence. What
    followed it is the draft. Where that runs into the end of the text, the copy goes on over what it has just written
    (x_k = ids[e + (k - 1) mod (L - e)]): a text in a loop is drafted on in its loop, and a match is always worth gamma
    tokens. Without a match the row's length is 0. Lengths depend on committed tokens alone.

    ``features["match_length"]`` [R] int64: how many tokens before the two places agree, up to ``MATCH_CAP``; 0 without
    a match. It is known before anything is drafted.

    Cost: O(max_n - min_n + 1) dictionary writes for each committed token, once; the same number of lookups a round.
    """

    max_gamma: int | None = None
    tap_layers: tuple[int, ...] = ()
    capabilities: DrafterCapabilities = CAPABILITIES

    def __init__(self, config: NgramConfig, device: Any = None) -> None:
        self.config = config
        self.default_gamma: int = config.gamma
        self._device = torch.device(device if device is not None else "cpu")
        self._indexes: dict[int, _Index] = {}

    def propose(self, batch: BatchView, sampler: DraftSampler) -> DraftBlock:
        """Draft up to ``batch.gamma`` tokens a row, at most the row's ``max_draft``; none without a match."""
        rows, gamma = len(batch), batch.gamma
        tokens = np.zeros((rows, gamma), dtype=np.int64)
        lens = np.zeros(rows, dtype=np.int64)
        match = np.zeros(rows, dtype=np.int64)
        for r, request in enumerate(batch.requests):
            count = min(gamma, request.max_draft)
            if count <= 0:
                continue
            end = self._find(request)
            if end:
                tokens[r, :count] = _copy(request, end, count)
                lens[r] = count
                match[r] = _agreement(request, end)
        ids = torch.from_numpy(tokens).to(self._device)
        return sampler.point_mass(ids, lens, features={"match_length": match})

    def commit(self, committed: Sequence[Committed]) -> None:
        """Nothing: ``propose`` reads what was committed since it last saw the request."""

    def release(self, slot: int, generation: int) -> None:
        """Forget a request; one that has taken the slot since is kept."""
        index = self._indexes.get(slot)
        if index is not None and index.generation == generation:
            del self._indexes[slot]

    def _find(self, request: RequestView) -> int:
        """Where the suffix's last earlier occurrence ends, 0 without one."""
        last = self._sync(request).last
        ids, low, high = request.ids, self.config.min_n, self.config.max_n
        tail = tuple(ids[max(len(ids) - high, 0) :])
        for n in range(min(high, len(tail)), low - 1, -1):
            end = last.get(tail[len(tail) - n :])
            if end is not None:
                return end
        return 0

    def _sync(self, request: RequestView) -> _Index:
        """The request's index, with every n-gram that has a successor by now."""
        ids = request.ids
        index = self._indexes.get(request.slot)
        if index is None or index.generation != request.generation or index.length > len(ids):
            index = self._indexes[request.slot] = _Index(request.generation)
        length = len(ids)
        if index.length < length:
            for n in range(self.config.min_n, self.config.max_n + 1):
                first = max(index.length, n)  # n-grams ending before this are in already
                new = ids[first - n : length - 1]
                # zip of the n shifted lists yields the n-grams in order; a later one overwrites an earlier one
                index.last.update(
                    zip(zip(*(new[i:] for i in range(n)), strict=False), range(first, length), strict=False)
                )
            index.length = length
        return index


def _copy(request: RequestView, end: int, count: int) -> list[int]:
    """``count`` tokens from position ``end`` on, over its own output where the text ends."""
    source = request.ids[end : end + count]
    if len(source) < count:
        source = source * -(-count // len(source))
    return source[:count]


def _agreement(request: RequestView, end: int) -> int:
    """How many tokens before ``end`` equal those before the end of the text, up to ``MATCH_CAP``."""
    ids = request.ids
    here, there = ids[max(len(ids) - MATCH_CAP, 0) :], ids[max(end - MATCH_CAP, 0) : end]
    if here == there:
        return len(here)
    count = 0
    for a, b in zip(reversed(here), reversed(there), strict=False):
        if a != b:
            break
        count += 1
    return count


def build(config: NgramConfig, context: BuildContext) -> NgramDrafter:
    """Factory of ``ngram``."""
    return NgramDrafter(config, context.device)
