"""A text that the target writes, and what it says of how well a drafter predicts that target."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.types import IntArray, VerifyLayout

TEXT = 40
"""Tokens that the target writes, where its slots have room."""
PREFIX = 8
MARGIN = 0.4
"""Nats per token by which an alternative must be better to be named."""
MORE_HITS = 0.1
"""Share of first tokens by which it must be better as well."""
CHANCE = 0.3
"""Nats per token over a uniform guess under which a drafter is said to know nothing."""


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What a probe saw.

    Attributes:
        score: mean log-probability of the target's tokens under the drafter, in nats per token; -inf where the text
            was too short to tell.
        chance: that of a uniform guess over the draft vocabulary.
        first_hits: share of blocks whose first token is right.
        alternatives: (score, first hits) in the other layout and from neighbouring layers, by description.
        warnings: what is likely wrong, in words.
    """

    score: float
    chance: float
    first_hits: float
    alternatives: Mapping[str, tuple[float, float]]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Text:
    """Token ids [n], of which those from ``first`` on are the target's, and its features [n - 1, d_t] by layer."""

    ids: Tensor
    first: int
    features: Mapping[int, Tensor]

    def taps(self, layers: Sequence[int]) -> Tensor:
        """Features [n - 1, m * d_t] of some layers side by side."""
        return torch.cat([self.features[k] for k in layers], dim=1)


def shifted_layers(taps: Sequence[int], target: Any) -> dict[str, tuple[int, ...]]:
    """The neighbours of the tapped layers on both sides, by description, as far as the target has them."""
    shifted = {shift: tuple(k + shift for k in taps) for shift in (-1, 1)}
    inside = {s: ks for s, ks in shifted.items() if min(ks) >= -1 and max(ks) < int(target.num_layers)}
    return {f"target layers {list(ks)} (ids {s:+d})": ks for s, ks in inside.items()}


def layout(ids: Tensor, slots: IntArray, starts: IntArray, counts: IntArray, *, logits: str = "last") -> VerifyLayout:
    """One packed forward of ids [B]: ``counts`` [S] tokens a slot, from position ``starts`` [S] on.

    Args:
        logits: rows whose logits are wanted: ``last`` (of each slot), ``all`` or ``none``.
    """
    cu = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    rows = {"last": cu[1:] - 1, "all": np.arange(int(cu[-1])), "none": cu[:0]}
    places = np.arange(int(cu[-1])) - np.repeat(cu[:-1] - starts, counts)
    return VerifyLayout(ids, torch.from_numpy(places).to(ids.device), slots, starts, cu, rows[logits])


def write_text(
    target: Any, ids: Sequence[int] | None, layers: Sequence[Sequence[int]] = (), *, room: int | None = None
) -> Text:
    """Let the target continue ``ids`` greedily in slot 0, and keep its features.

    Args:
        target: allocated, without live requests.
        ids: what the text begins with; None for ids spread over the vocabulary.
        layers: groups of layers whose features are wanted.
        room: most tokens of the text, where that is less than a slot of the target holds.
    """
    vocab, limit = int(target.vocab_size), int(getattr(target, "max_len", TEXT + (len(ids or ()) or PREFIX)))
    limit = limit if room is None else min(limit, room)
    text = list(ids) if ids else [(1 + i * max(1, vocab // PREFIX)) % vocab for i in range(PREFIX)]
    text = text[: max(1, limit // 2)]
    wanted = sorted({k for group in layers for k in group})
    first, cached, rows = len(text), 0, list[Tensor]()
    slot = np.zeros(1, dtype=np.int64)
    for _ in range(min(TEXT, limit - first)):
        new = torch.tensor(text[cached:], device=target.device)
        out = target.forward(layout(new, slot, np.array([cached]), np.array([len(new)])), wanted)
        cached = len(text)
        if out.taps is not None:
            rows.append(out.taps.clone())
        text.append(int(out.logits[-1].argmax()))
    width = rows[0].shape[1] // len(wanted) if rows else 0
    features = torch.cat(rows) if rows else torch.empty(0, 0)
    by_layer = {k: features[:, i * width : (i + 1) * width] for i, k in enumerate(wanted)}
    return Text(torch.tensor(text, device=target.device), first, by_layer)


def agreement(logits: Tensor, wanted: Tensor, token_map: Tensor | None = None) -> tuple[float, float]:
    """Mean log-probability of target ids ``wanted`` [A, gamma] under draft logits [A, gamma, Vd], in nats, and the
    share of first tokens that are right. Ids that a pruned vocabulary has not do not count.
    """
    if token_map is not None:
        back = torch.full((int(wanted.max()) + 1 + int(token_map.max()),), -1, device=wanted.device)
        back[token_map] = torch.arange(len(token_map), device=wanted.device)
        wanted = back[wanted]
    known = wanted >= 0
    logprobs = logits.log_softmax(-1).gather(2, wanted.clamp(min=0).unsqueeze(2)).squeeze(2)
    hits = (logits[:, 0].argmax(-1) == wanted[:, 0]).float().mean()
    return float(logprobs[known].mean()) if bool(known.any()) else -math.inf, float(hits)


def judged(
    source: str,
    seen: tuple[float, float],
    draft_vocab: int,
    alternatives: Mapping[str, tuple[float, float]] | None = None,
) -> ProbeReport:
    """The report: an alternative that is clearly better is the likely fault, and so is no better than a guess."""
    (score, hits), chance, others = seen, -math.log(draft_vocab), dict(alternatives or {})
    found = [
        f"{source} predicts this target better with {what} ({value:.2f} against {score:.2f} nats a token, {hit:.0%} "
        f"against {hits:.0%} of first tokens): its config, or the format that it was read as, is likely wrong"
        for what, (value, hit) in sorted(others.items(), key=lambda item: -item[1][0])
        if value > max(score + MARGIN, chance + CHANCE) and hit > hits + MORE_HITS
    ]
    if not found and -math.inf < score < chance + CHANCE:
        found.append(
            f"{source} predicts this target no better than chance ({score:.2f} nats a token, uniform {chance:.2f}): it "
            "is likely another target's drafter, or untrained"
        )
    return ProbeReport(score, chance, hits, others, tuple(found))
