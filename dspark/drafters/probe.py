"""The load-time probe: does this drafter predict this target, in the layout and from the layers that it claims?

A wrong block layout or a wrong tap layer loads without a word and then accepts next to nothing. The probe lets the
target write a short greedy text and compares how well the drafter predicts it as configured, in the other layout, and
from neighbouring layers. An alternative that is clearly better is the likely fault.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dspark.drafters.block import Layout
from dspark.errors import CheckpointError
from dspark.types import VerifyLayout

if TYPE_CHECKING:
    from dspark.drafters.dspark import DSparkDraft

TEXT = 40
"""Tokens that the target writes."""
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
        score: mean log-probability of the target's tokens under the drafter, in nats per token.
        chance: that of a uniform guess over the draft vocabulary.
        first_hits: share of blocks whose first token is right.
        alternatives: (score, first hits) in the other layout and from neighbouring layers, by description.
        warnings: what is likely wrong, in words.
    """

    score: float
    chance: float
    first_hits: float
    alternatives: dict[str, tuple[float, float]]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Text:
    """Token ids [n], and the target's features [n - 1, d_t] by layer."""

    ids: Tensor
    features: dict[int, Tensor]


@torch.inference_mode()
def probe(drafter: DSparkDraft, target: Any, ids: Sequence[int] | None = None) -> ProbeReport:
    """Run the probe.

    Raises:
        CheckpointError: the target's features, or what the drafter makes of them, are not finite; names the layer.
    """
    taps, vocab = drafter.tap_layers, int(target.vocab_size)
    shifted = {shift: tuple(k + shift for k in taps) for shift in (-1, 1)}
    shifted = {s: ks for s, ks in shifted.items() if min(ks) >= -1 and max(ks) < int(target.num_layers)}
    wanted = sorted({*taps, *(k for ks in shifted.values() for k in ks)})
    start = list(ids) if ids else [(1 + i * max(1, vocab // PREFIX)) % vocab for i in range(PREFIX)]
    text = _write(target, start, wanted)
    layout, other = drafter.layout, Layout(not drafter.layout.sample_from_anchor, drafter.layout.mask_token_id)
    _check_values(drafter, text)
    score, hits = _score(drafter, text, taps, layout, len(start))
    alternatives = {f"the {_name(other)} layout": _score(drafter, text, taps, other, len(start))}
    for shift, layers in shifted.items():
        alternatives[f"target layers {list(layers)} (ids {shift:+d})"] = _score(
            drafter, text, layers, layout, len(start)
        )
    chance = -math.log(len(drafter.backbone.head))
    return ProbeReport(score, chance, hits, alternatives, _judge(drafter, score, hits, chance, alternatives))


def _name(layout: Layout) -> str:
    return "anchor-first" if layout.sample_from_anchor else "mask-only"


def _judge(
    drafter: DSparkDraft, score: float, hits: float, chance: float, alternatives: dict[str, tuple[float, float]]
) -> tuple[str, ...]:
    source = drafter.checkpoint.source
    found = [
        f"{source} predicts this target better with {what} ({value:.2f} against {score:.2f} nats a token, {hit:.0%} "
        f"against {hits:.0%} of first tokens): its config, or the format that it was read as, is likely wrong"
        for what, (value, hit) in sorted(alternatives.items(), key=lambda item: -item[1][0])
        if value > max(score + MARGIN, chance + CHANCE) and hit > hits + MORE_HITS
    ]
    if not found and score < chance + CHANCE:
        found.append(
            f"{source} predicts this target no better than chance ({score:.2f} nats a token, uniform {chance:.2f}): it "
            "is likely another target's drafter, or untrained"
        )
    return tuple(found)


def _write(target: Any, start: Sequence[int], layers: Sequence[int]) -> _Text:
    """Let the target continue ``start`` greedily in slot 0, and keep its features."""
    ids, rows = list(start), []
    cached = 0
    for _ in range(TEXT):
        new = len(ids) - cached
        layout = VerifyLayout(
            token_ids=torch.tensor(ids[cached:], device=target.device),
            positions=torch.arange(cached, len(ids), device=target.device),
            slots=np.array([0], dtype=np.int64),
            starts=np.array([cached], dtype=np.int64),
            cu_query_lens=np.array([0, new], dtype=np.int64),
            logit_rows=np.array([new - 1], dtype=np.int64),
        )
        out = target.forward(layout, layers)
        cached = len(ids)
        rows.append(out.taps.clone())
        ids.append(int(out.logits[-1].argmax()))
    features = torch.cat(rows)
    width = features.shape[1] // len(layers)
    by_layer = {k: features[:, i * width : (i + 1) * width] for i, k in enumerate(layers)}
    return _Text(torch.tensor(ids, device=target.device), by_layer)


def _check_values(drafter: DSparkDraft, text: _Text) -> None:
    source = drafter.checkpoint.source
    for layer in drafter.tap_layers:
        values = text.features[layer].to(drafter.backbone.dtype)
        if not bool(torch.isfinite(values).all()):
            raise CheckpointError(f"{source}: features of target layer {layer} are not finite in {values.dtype}")
    backbone = drafter.backbone.scratch()
    taps = torch.cat([text.features[k] for k in drafter.tap_layers], dim=1)
    context = len(text.ids) - 1
    backbone.remember(drafter.taps.normed(taps), np.zeros(context, dtype=np.int64), np.arange(context))
    trace: list[Tensor] = []
    inputs = drafter.layout.inputs(text.ids[-1:], drafter.checkpoint.config.max_gamma)
    backbone(inputs, np.zeros(1, dtype=np.int64), np.array([context]), trace=trace)
    for index, values in enumerate(trace):
        if not bool(torch.isfinite(values).all()):
            raise CheckpointError(
                f"{source}: hidden states of layers.{index} are not finite in {values.dtype}; use bfloat16 or float32"
            )


def _score(drafter: DSparkDraft, text: _Text, layers: Sequence[int], layout: Layout, first: int) -> tuple[float, float]:
    """Mean log-probability of the text's tokens, teacher-forced, and the share of first tokens that are right.

    Every position from ``first`` on that has a whole block after it is an anchor; all blocks run as one batch.
    """
    gamma = drafter.checkpoint.config.block_size - layout.skip
    anchors = np.arange(first, len(text.ids) - gamma)
    if gamma < 1 or len(anchors) == 0:
        return -math.inf, 0.0
    backbone = drafter.backbone.scratch()
    taps = drafter.taps.normed(torch.cat([text.features[k] for k in layers], dim=1))
    owners = np.concatenate([np.full(a, row) for row, a in enumerate(anchors)])
    places = np.concatenate([np.arange(a) for a in anchors])
    backbone.remember(taps[torch.from_numpy(places).to(taps.device)], owners, places)
    ids = text.ids.to(backbone.device)
    at = torch.from_numpy(anchors).to(ids.device)
    hidden = backbone(layout.inputs(ids[at], gamma), np.arange(len(anchors)), anchors)[:, layout.skip :]
    steps = torch.arange(gamma, device=ids.device)
    prev, wanted = ids[at[:, None] + steps], ids[at[:, None] + 1 + steps]
    logits = backbone.logits(hidden) + drafter.head.block(prev, hidden)
    if drafter.token_map is not None:
        back = torch.full((int(ids.max()) + 1 + int(drafter.token_map.max()),), -1, device=ids.device)
        back[drafter.token_map] = torch.arange(len(drafter.token_map), device=ids.device)
        wanted = back[wanted]
    known = wanted >= 0  # a pruned vocabulary can't predict what it has not
    logprobs = logits.log_softmax(-1).gather(2, wanted.clamp(min=0).unsqueeze(2)).squeeze(2)
    hits = (logits[:, 0].argmax(-1) == wanted[:, 0]).float().mean()
    score = logprobs[known].mean() if bool(known.any()) else torch.tensor(-math.inf)
    return float(score), float(hits)
