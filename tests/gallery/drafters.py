"""Drafters that break a promise. The sound one drafts from a table of the last two tokens of the request."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.capabilities import DrafterCapabilities
from dspark.errors import RowFault
from dspark.plugins import Kind
from dspark.testing.faults import FaultyDrafter, Trip
from dspark.testing.toys import random_table
from dspark.types import DraftBlock

from .base import Broken


class Drafter:
    """Sound: x_k from a table of the two tokens before it, through the sampler."""

    capabilities = DrafterCapabilities()
    max_gamma: int | None = None
    default_gamma = 3
    tap_layers: tuple[int, ...] = ()

    def __init__(self, config: Any, context: Any) -> None:
        self.vocab = context.vocab_size
        self.table = random_table(self.vocab, self.vocab, self.vocab, seed=3, scale=1.0)

    def lens(self, batch: Any) -> Any:
        return np.array([min(batch.gamma, r.max_draft) for r in batch.requests], dtype=np.int64)

    def last(self, request: Any) -> tuple[int, int]:
        return (request.ids[-2] if len(request.ids) > 1 else 0), request.ids[-1]

    def propose(self, batch: Any, sampler: Any) -> DraftBlock:
        before, prev = torch.tensor([self.last(r) for r in batch.requests]).T
        for k in range(batch.gamma):
            drawn = sampler.sample(self.logits(batch, before, prev, k), k)
            before, prev = prev, drawn
        return sampler.finish(self.lens(batch))  # type: ignore[no-any-return]

    def logits(self, batch: Any, before: Tensor, prev: Tensor, k: int) -> Tensor:
        return self.table[before, prev]

    def commit(self, committed: Sequence[Any]) -> None: ...

    def release(self, slot: int, generation: int) -> None: ...


class KeepsSlots(Drafter):
    """Counts tokens by slot to favour frequent ones, and forgets neither at release nor by generation."""

    def __init__(self, config: Any, context: Any) -> None:
        super().__init__(config, context)
        self.counts: dict[int, Tensor] = {}

    def logits(self, batch: Any, before: Tensor, prev: Tensor, k: int) -> Tensor:
        none = torch.zeros(self.vocab, dtype=torch.float64)
        return self.table[before, prev] + torch.stack([self.counts.get(r.slot, none) for r in batch.requests])

    def commit(self, committed: Sequence[Any]) -> None:
        for done in committed:
            counts = self.counts.setdefault(done.request.slot, torch.zeros(self.vocab, dtype=torch.float64))
            for token in done.new_ids:
                counts[token] += 1.0


class LearnsFromRejected(Drafter):
    """Puts its own drafts into its memory, whether they are accepted or not."""

    def __init__(self, config: Any, context: Any) -> None:
        super().__init__(config, context)
        self.memory: dict[tuple[int, int], Tensor] = {}

    def propose(self, batch: Any, sampler: Any) -> DraftBlock:
        block = super().propose(batch, sampler)
        for row, request in enumerate(batch.requests):
            seen = self.memory.setdefault((request.slot, request.generation), torch.zeros(self.vocab).double())
            for token in block.token_ids[row].tolist():
                seen[token] += 1.0
        return block

    def logits(self, batch: Any, before: Tensor, prev: Tensor, k: int) -> Tensor:
        none = torch.zeros(self.vocab).double()
        own = torch.stack([self.memory.get((r.slot, r.generation), none) for r in batch.requests])
        return self.table[before, prev] - own

    def release(self, slot: int, generation: int) -> None:
        self.memory.pop((slot, generation), None)


class Remembers(Drafter):
    """Sound: favours what it has seen in the target's features, and hands that on."""

    capabilities = DrafterCapabilities(needs_taps=True)
    tap_layers = (0,)

    def __init__(self, config: Any, context: Any) -> None:
        super().__init__(config, context)
        self.seen: dict[tuple[int, int], Tensor] = {}

    def logits(self, batch: Any, before: Tensor, prev: Tensor, k: int) -> Tensor:
        own = [self.seen[r.slot, r.generation][: r.anchor_position].sum(0) for r in batch.requests]
        return self.table[before, prev] + 0.4 * torch.stack(own)

    def commit(self, committed: Sequence[Any]) -> None:
        for done in committed:
            who, start = (done.request.slot, done.request.generation), done.request.num_cached
            before = self.seen.get(who, torch.zeros(0, self.vocab).double())
            self.seen[who] = torch.cat([before[:start], done.taps])

    def adopt(self, slot: int, generation: int, source: int, source_generation: int, length: int) -> int:
        self.seen[slot, generation] = self.seen[source, source_generation][:length]
        return len(self.seen[slot, generation])

    def release(self, slot: int, generation: int) -> None:
        self.seen.pop((slot, generation), None)


class Pretends(Remembers):
    """Says that it has what it did not take."""

    def adopt(self, slot: int, generation: int, source: int, source_generation: int, length: int) -> int:
        self.seen[slot, generation] = torch.zeros(length, self.vocab).double()
        return length


class CutsDoubtful(Drafter):
    """Cuts a draft before the token that it finds unlikely, once it is drawn (METHOD 4, rule 3)."""

    def propose(self, batch: Any, sampler: Any) -> DraftBlock:
        block = super().propose(batch, sampler)
        probs = block.q.token_probs().numpy()
        lens = block.lens.copy()
        for row in range(len(lens)):
            doubtful = np.flatnonzero(probs[row, : lens[row]] < 0.3)
            lens[row] = doubtful[0] if len(doubtful) else lens[row]
        return DraftBlock(block.token_ids, lens, block.q)


class DrawsItself(Drafter):
    """Samples with torch and says that it copied."""

    def propose(self, batch: Any, sampler: Any) -> DraftBlock:
        before, prev = torch.tensor([self.last(r) for r in batch.requests]).T
        columns = []
        for _ in range(batch.gamma):
            drawn = torch.multinomial(torch.softmax(self.table[before, prev], dim=-1), 1).squeeze(1)
            before, prev = prev, drawn
            columns.append(drawn)
        return sampler.point_mass(torch.stack(columns, dim=1), self.lens(batch))  # type: ignore[no-any-return]


class Law:
    """q, sharpened after the draw."""

    def __init__(self, q: Any, sharpen: float) -> None:
        self.q, self.sharpen = q, sharpen

    def probs(self, rows: Any, positions: Any) -> Tensor:
        law = self.q.probs(rows, positions) ** self.sharpen
        return law / law.sum(-1, keepdim=True)

    def token_probs(self) -> Tensor:
        ids = self.q.token_ids
        rows, gamma = ids.shape
        where = np.divmod(np.arange(rows * gamma), gamma)
        return self.probs(*where).gather(1, ids.reshape(-1, 1)).reshape(rows, gamma)


class AnotherQ(Drafter):
    """Draws at one temperature and reports q of another."""

    def propose(self, batch: Any, sampler: Any) -> DraftBlock:
        block = super().propose(batch, sampler)
        return DraftBlock(block.token_ids, block.lens, Law(block.q, 1.5))


class Unnormalised(Drafter):
    """Reports weights as if they were probabilities."""

    def propose(self, batch: Any, sampler: Any) -> DraftBlock:
        block = super().propose(batch, sampler)

        class Weights(Law):
            def probs(self, rows: Any, positions: Any) -> Tensor:
                return 1.1 * self.q.probs(rows, positions)  # type: ignore[no-any-return]

        return DraftBlock(block.token_ids, block.lens, Weights(block.q, 1.0))


class Averages(Drafter):
    """Adds the batch's mean, as a normalisation over rows would."""

    def logits(self, batch: Any, before: Tensor, prev: Tensor, k: int) -> Tensor:
        own = self.table[before, prev]
        return own - 2.0 * own.mean(dim=0, keepdim=True)


class UndeclaredTaps(Drafter):
    tap_layers = (0,)


class OutOfVocabulary(Drafter):
    """Hands draft ids over as target ids."""

    def propose(self, batch: Any, sampler: Any) -> DraftBlock:
        block = super().propose(batch, sampler)
        return sampler.point_mass(block.token_ids + self.vocab, block.lens)  # type: ignore[no-any-return]


class TooLong(Drafter):
    def lens(self, batch: Any) -> Any:
        return super().lens(batch) + 1


class Clock(Drafter):
    """Breaks ties by the time."""

    def logits(self, batch: Any, before: Tensor, prev: Tensor, k: int) -> Tensor:
        return self.table[before, prev].roll(time.perf_counter_ns() % self.vocab, dims=1)


class Silent(Drafter):
    """Says that it drafts, and never has anything."""

    def lens(self, batch: Any) -> Any:
        return np.zeros(len(batch), dtype=np.int64)


class Declared(Drafter):
    """Registered as a point mass, and draws."""

    capabilities = DrafterCapabilities(point_mass=True)


class Stumbles(Drafter):
    """Raises in its second round."""

    rounds = 0

    def propose(self, batch: Any, sampler: Any) -> DraftBlock:
        self.rounds += 1
        if self.rounds == 2:
            raise IndexError("cache row 7")
        return super().propose(batch, sampler)


class Divides(Drafter):
    """Takes it that drafts are verified in every round."""

    def commit(self, committed: Sequence[Any]) -> None:
        self.rate = sum(done.accepted / done.offered for done in committed)


class ForgetsWrongly(Drafter):
    """Insists on knowing whom it releases."""

    def release(self, slot: int, generation: int) -> None:
        raise KeyError((slot, generation))


class NotFinite(Drafter):
    def logits(self, batch: Any, before: Tensor, prev: Tensor, k: int) -> Tensor:
        return self.table[before, prev] * (torch.nan if k == 1 else 1.0)


class GlobalSeed(Drafter):
    """Shuffles its candidates with numpy's global generator; the law stays right, repeatability does not."""

    def propose(self, batch: Any, sampler: Any) -> DraftBlock:
        np.random.shuffle(np.arange(3))
        return super().propose(batch, sampler)


class Blames(Drafter):
    """Raises a RowFault when it drafts a certain token: the request ends, and its law with it."""

    def propose(self, batch: Any, sampler: Any) -> DraftBlock:
        block = super().propose(batch, sampler)
        rows = np.flatnonzero(block.token_ids[:, 0].numpy() == 1)
        if len(rows):
            raise RowFault("token 1 has no embedding here", rows)
        return block


def trips(config: Any, context: Any) -> FaultyDrafter:
    vocab = context.vocab_size
    return FaultyDrafter(random_table(vocab, vocab, seed=4), Trip(1, attributed=False), gamma=2)


def drafter(name: str, factory: Any, check: str = "", *words: str, **more: Any) -> Broken:
    return Broken(name, Kind.DRAFTER, factory, check, words, **more)


POINT = DrafterCapabilities(point_mass=True)
TAPS = DrafterCapabilities(needs_taps=True)
DRAFTERS = [
    drafter("sound", Drafter),
    drafter("keeps state across slots", KeepsSlots, "test_slots_are_reused", "slot used before", "history"),
    drafter("sound, and hands its state on", Remembers, capabilities=TAPS),
    drafter("pretends to take a state over", Pretends, "test_prefixes", "after a shared prefix", capabilities=TAPS),
    drafter("learns from rejected drafts", LearnsFromRejected, "test_rejected_drafts_leave_no_trace", "nothing was"),
    drafter("cuts a doubtful draft", CutsDoubtful, "test_lengths_come_before_draws", "draws fell"),
    drafter("cuts a doubtful draft, in law", CutsDoubtful, "test_exact_law", "total variation"),
    drafter("draws by itself", DrawsItself, "test_exact_law"),
    drafter("draws by itself, globally", DrawsItself, "test_global_generators", "global generator"),
    drafter("reports another q", AnotherQ, "test_q_is_what_was_sampled", "it was drawn with probability"),
    drafter("reports another q, in law", AnotherQ, "test_exact_law", "instead of"),
    drafter("reports weights as q", Unnormalised, "test_q_is_what_was_sampled", "q is no law", "sum 1.1"),
    drafter("depends on its neighbours", Averages, "test_alone_and_in_a_batch", "in a batch of 3"),
    drafter("reads taps undeclared", UndeclaredTaps, "test_attributes", "needs_taps is False"),
    drafter("drafts ids that do not exist", OutOfVocabulary, "test_it_drafts", "RowFault", "vocabulary of 5"),
    drafter("drafts more than asked", TooLong, "test_blocks", "lens"),
    drafter("depends on the clock", Clock, "test_determinism", "by another"),
    drafter("never drafts", Silent, "test_it_drafts", "nothing was drafted"),
    drafter("point mass that is none", Declared, "test_point_mass_is_true", "q(x) is", capabilities=POINT),
    drafter("raises in its second round", Stumbles, "test_it_drafts", "gallery", "draft"),
    drafter("raises in a commit", Divides, "test_rejected_drafts_leave_no_trace", "ZeroDivisionError", "commit"),
    drafter("raises at a stranger's release", ForgetsWrongly, "test_release_and_commit_of_nothing", "KeyError"),
    drafter("NaN logits", NotFinite, "test_blocks", "no finite maximum"),
    drafter("advances numpy's generator", GlobalSeed, "test_global_generators", "numpy.random"),
    drafter("raises on a drafted token", trips, "test_exact_law", "draft"),
    drafter("ends requests for a drafted token", Blames, "test_exact_law", "token 1 has no embedding here"),
]
