"""The drafter ``suffix``: it goes on as the text went on after the longest suffix that had occurred before.

Each request has a suffix automaton over its prompt and output (``_suffix``, in Rust), fed with committed tokens alone:
what was drafted and rejected never enters it, so there is nothing to roll back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dspark.capabilities import DrafterCapabilities
from dspark.protocols import BuildContext, DraftSampler
from dspark.types import BatchView, Committed, DraftBlock, IntArray, Mode, RequestView
from dspark_drafter_suffix._suffix import Automaton

LAWS = ("auto", "point")
TIE = 1e-6
"""Between logits of equally frequent tokens, so that the argmax takes the more recent one everywhere."""


@dataclass(frozen=True, slots=True)
class SuffixConfig:
    """Settings of ``suffix``.

    Attributes:
        min_match: shortest suffix, in tokens, that is drafted from.
        max_match: longest suffix that is looked up.
        factor: a draft is at most so many times as long as the match.
        law: ``auto``: sampled requests draw from the counts; ``point``: all take the likeliest token.
        candidates: most tokens that counts are drawn from.
        gamma: tokens drafted a round where the engine's config names none.
    """

    min_match: int = 2
    max_match: int = 32
    factor: float = 4.0
    law: str = "auto"
    candidates: int = 8
    gamma: int = 7

    def __post_init__(self) -> None:
        for name in ("min_match", "max_match", "candidates", "gamma"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}: expected an integer of at least 1, got {value!r}")
        if not self.min_match <= self.max_match <= 1 << 16:
            raise ValueError(f"max_match: expected min_match ({self.min_match}) to 65536, got {self.max_match}")
        number = isinstance(self.factor, (int, float)) and not isinstance(self.factor, bool)
        if not number or not 0.0 < self.factor < float("inf"):
            raise ValueError(f"factor: expected a number above 0, got {self.factor!r}")
        if self.law not in LAWS:
            raise ValueError(f"law: expected one of {', '.join(LAWS)}, got {self.law!r}")


class SuffixDrafter:
    """Drafts from the longest match, with counts.

    How much a row drafts is decided by its history, before anything is drawn: ``factor`` times the match, nothing under
    ``min_match``. Along the draft the longest match is kept up; where nothing followed it, a shorter one is taken.

    Greedy rows take the likeliest token each time, of equals the most recent. Sampled rows draw from the counts: x_k is
    then accepted with probability 1 - TV(counts, target), where a fixed token would be with the target's probability of
    it. Counts are of tokens that were drawn at the request's temperature, so they are q itself and not warmed again.

    ``features``: ``match_length`` [R] int64, and ``share`` [R, gamma]: how often the text went on by the likeliest
    token at position k's match. Both are functions of history and x_{<k}.
    """

    max_gamma: int | None = None
    tap_layers: tuple[int, ...] = ()
    capabilities = DrafterCapabilities(point_mass=False)

    def __init__(self, config: SuffixConfig, vocab_size: int, device: Any = None) -> None:
        self.config = config
        self.default_gamma: int = config.gamma
        self.candidates = min(config.candidates, vocab_size)
        self._device = torch.device(device if device is not None else "cpu")
        self._texts: dict[int, tuple[int, Automaton]] = {}

    def propose(self, batch: BatchView, sampler: DraftSampler) -> DraftBlock:
        """Draft up to ``batch.gamma`` tokens a row, none without a match."""
        texts = [self._sync(r) for r in batch.requests]
        match = np.array([t.matched()[1] for t in texts], dtype=np.int64)
        room = np.array([min(batch.gamma, r.max_draft) for r in batch.requests], dtype=np.int64)
        lens = np.minimum(room, np.ceil(self.config.factor * match).astype(np.int64))
        lens[(match < self.config.min_match) | (room < 0)] = 0
        drawn = self.config.law == "auto" and any(
            n and r.mode is not Mode.GREEDY for n, r in zip(lens, batch.requests, strict=True)
        )
        draft = self._draw if drawn else self._copy
        return draft(batch, texts, match, lens, sampler)

    def commit(self, committed: Sequence[Committed]) -> None:
        """Nothing: ``propose`` reads what was committed since it last saw the request."""

    def release(self, slot: int, generation: int) -> None:
        """Forget a request; one that has taken the slot since is kept."""
        if slot in self._texts and self._texts[slot][0] == generation:
            del self._texts[slot]

    def _sync(self, request: RequestView) -> Automaton:
        """The request's automaton over all of its committed tokens."""
        generation, text = self._texts.get(request.slot, (-1, None))
        if text is None or generation != request.generation or len(text) > len(request.ids):
            text = Automaton(self.config.max_match)
            self._texts[request.slot] = request.generation, text
        if len(text) < len(request.ids):
            text.extend(list(request.ids[len(text) :]))
        return text

    def _copy(
        self, batch: BatchView, texts: Sequence[Automaton], match: IntArray, lens: IntArray, sampler: DraftSampler
    ) -> DraftBlock:
        """The likeliest tokens: a function of history, q = 1."""
        tokens = np.zeros((len(batch), batch.gamma), dtype=np.int64)
        share = np.zeros((len(batch), batch.gamma))
        for row, (text, count) in enumerate(zip(texts, lens.tolist(), strict=True)):
            if count:
                tokens[row, :count], share[row, :count] = text.copy(count)
        ids = torch.from_numpy(tokens).to(self._device)
        return sampler.point_mass(ids, lens, features={"match_length": match, "share": share})

    def _draw(
        self, batch: BatchView, texts: Sequence[Automaton], match: IntArray, lens: IntArray, sampler: DraftSampler
    ) -> DraftBlock:
        """Tokens drawn from the counts, position by position; the sampler takes the likeliest for greedy rows."""
        places = [text.matched() for text in texts]
        share = np.zeros((len(batch), batch.gamma))
        for k in range(int(lens.max())):
            ids = np.tile(np.arange(self.candidates), (len(batch), 1))
            logits = np.full(ids.shape, -np.inf)
            logits[:, 0] = 0.0  # rows that have ended draw a token that nobody reads
            for row in np.flatnonzero(lens > k).tolist():
                places[row], found, total = texts[row].options(places[row], self.candidates)
                warmth = 1.0 if batch.requests[row].mode is Mode.GREEDY else batch.requests[row].params.temperature
                ids[row], logits[row] = _columns(found, warmth, self.candidates)
                share[row, k] = found[0][1] / total
            names, scores = (torch.from_numpy(a).to(self._device) for a in (ids, logits))
            drawn = sampler.sample(scores, k, names).tolist()
            for row in np.flatnonzero(lens > k + 1).tolist():
                places[row] = texts[row].step(places[row], drawn[row])
        return sampler.finish(lens, features={"match_length": match, "share": share})


def _columns(found: Sequence[tuple[int, int]], temperature: float, width: int) -> tuple[IntArray, np.ndarray]:
    """Token ids [width], all different, and logits before temperature [width]: log counts, -inf for what fills up."""
    ids = [token for token, _ in found]
    ids += [t for t in range(width + len(ids)) if t not in ids][: width - len(ids)]
    logits = np.full(width, -np.inf)
    counts = np.array([count for _, count in found], dtype=np.float64)
    logits[: len(found)] = temperature * np.log(counts / counts.sum()) - TIE * np.arange(len(found))
    return np.array(ids, dtype=np.int64), logits


def build(config: SuffixConfig, context: BuildContext) -> SuffixDrafter:
    """Factory of ``suffix``."""
    return SuffixDrafter(config, context.vocab_size, context.device)
