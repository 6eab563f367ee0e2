"""Wrappers that record what passes between the engine and a component."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from dspark.sampling.draws import CounterDraws
from dspark.types import BatchView, BoolArray, Committed, DraftBlock, DrawKeys, Purpose

if TYPE_CHECKING:
    from torch import Tensor

    from dspark.protocols import DraftSampler

Key = tuple[int, int, int, int]


@dataclass
class DraftSpy:
    """A drafter that is watched.

    Attributes:
        rounds: every batch and the block that was proposed for it; histories as they were then.
    """

    inner: Any
    rounds: list[tuple[BatchView, DraftBlock, list[tuple[int, ...]]]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def propose(self, batch: BatchView, sampler: DraftSampler) -> DraftBlock:
        """The inner drafter's block, remembered."""
        histories = [tuple(r.ids) for r in batch.requests]
        block: DraftBlock = self.inner.propose(batch, sampler)
        self.rounds.append((batch, block, histories))
        return block

    def commit(self, committed: Sequence[Committed]) -> None:
        """Pass it on."""
        self.inner.commit(committed)

    def release(self, slot: int, generation: int) -> None:
        """Pass it on."""
        self.inner.release(slot, generation)

    def drafts(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        """History of a row -> what was drafted for it; the last draft where a history was met again."""
        found: dict[tuple[int, ...], tuple[int, ...]] = {}
        for _, block, histories in self.rounds:
            for row, history in enumerate(histories):
                found[history] = tuple(block.token_ids[row, : int(block.lens[row])].tolist())
        return found

    @property
    def drafted(self) -> int:
        """Tokens drafted so far."""
        return sum(int(block.lens.sum()) for _, block, _ in self.rounds)


class WatchedDraws(CounterDraws):
    """Production's draws, remembered by key.

    Attributes:
        tokens: key -> the token drawn and its probability.
        twice: keys that were drawn with more than once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens: dict[Key, tuple[int, float]] = {}
        self.twice: list[Key] = []
        self._seen: set[Key] = set()

    def categorical(self, keys: DrawKeys, probs: Tensor) -> Tensor:
        """One draw a row."""
        drawn = super().categorical(keys, probs)
        for i, key in enumerate(self._note(keys)):
            self.tokens[key] = int(drawn[i]), float(probs[i, drawn[i]])
        return drawn

    def accept(self, keys: DrawKeys, probs: Tensor) -> BoolArray:
        """One draw a row."""
        self._note(keys)
        return super().accept(keys, probs)

    def _note(self, keys: DrawKeys) -> list[Key]:
        purpose = int(keys.purpose)
        noted = [
            (int(r), int(a), int(o), purpose) for r, a, o in zip(keys.request, keys.anchor, keys.offset, strict=True)
        ]
        self.twice += [key for key in noted if key in self._seen]
        self._seen.update(noted)
        return noted

    def drafted(self, request: int, anchor: int, offset: int) -> tuple[int, float] | None:
        """What was drawn as x_{offset + 1}, and its probability; None where nothing was."""
        return self.tokens.get((request, anchor, offset, int(Purpose.DRAFT)))


def generator_states() -> tuple[Any, ...]:
    """The states of the process's global random generators, for comparison."""
    import random

    import torch

    legacy = np.random.get_state(legacy=False)
    numbers = legacy["state"]
    return random.getstate(), numbers["key"].tobytes(), numbers["pos"], torch.get_rng_state().numpy().tobytes()
