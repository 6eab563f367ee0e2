"""A toy drafter around a real sequential head, and an observer that counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dspark.capabilities import DrafterCapabilities
from dspark.testing.toys import random_table

if TYPE_CHECKING:
    from torch import Tensor

    from dspark.protocols import DraftSampler
    from dspark.types import BatchView, Committed, DraftBlock, RequestView, RoundRecord


class HeadDrafter:
    """A backbone from tables under a sequential head: base logits and hidden states by anchor and position, eq. 4.

    Args:
        head: the sequential head.
        vocab_size: V, of target and draft.
        hidden_size: d.
        gamma: default block size, and the most.
        seed: of the tables.
    """

    tap_layers: tuple[int, ...] = ()

    def __init__(self, head: Any, vocab_size: int, hidden_size: int, *, gamma: int = 2, seed: int = 0) -> None:
        self.head = head
        self.base = random_table(vocab_size, gamma, vocab_size, seed=seed)
        self.hidden = random_table(vocab_size, gamma, hidden_size, seed=seed + 1)
        self.max_gamma: int | None = gamma
        self.default_gamma = gamma
        self.capabilities = DrafterCapabilities(max_gamma=gamma)

    @torch.no_grad()
    def propose(self, batch: BatchView, sampler: DraftSampler) -> DraftBlock:
        """Draft left to right: x_k from base logits plus the head's bias."""
        lens = np.array([min(batch.gamma, r.max_draft) for r in batch.requests], dtype=np.int64)
        anchors = torch.tensor([r.anchor for r in batch.requests], dtype=torch.int64)
        hidden = self.hidden[anchors, : batch.gamma]
        state, prev = self.head.start(anchors, hidden), anchors
        for k in range(int(lens.max(initial=0))):
            bias, state = self.head.step(state, prev, hidden[:, k])
            prev = sampler.sample(self.base[anchors, k] + bias.double(), k)
        return sampler.finish(lens, hidden=hidden)

    def commit(self, committed: Sequence[Committed]) -> None:
        """Nothing is learned."""

    def release(self, slot: int, generation: int) -> None:
        """Nothing is kept."""


class CountingObserver:
    """Counts what it sees.

    Attributes:
        rounds: steps.
        committed, drafted: tokens.
        finished: reason -> requests.
    """

    def __init__(self) -> None:
        self.rounds = self.committed = self.drafted = 0
        self.finished: Counter[str] = Counter()

    def on_round(self, record: RoundRecord) -> None:
        """Add a step."""
        self.rounds += 1
        self.committed += sum(len(c.new_ids) for c in record.committed)
        self.drafted += 0 if record.draft is None else int(record.draft.lens.sum())

    def on_finish(self, request: RequestView, reason: str) -> None:
        """Count why a request ended."""
        self.finished[reason] += 1


def loud(module: Any, seed: int = 0, std: float = 0.5) -> Any:
    """Random weights of a module large enough that every term of it shows; what is no module is left as it is."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(module, torch.nn.Module):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    return module


def tensors_of(head: Any) -> dict[str, Tensor]:
    """Tensors that a head names as its own, detached; empty where it has none."""
    own = getattr(head, "canonical", None)
    return {} if own is None else {name: t.detach() for name, t in own().items()}
