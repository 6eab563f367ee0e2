"""How far a decision was from going the other way, by the unmodified model: what tells rounding from a fault.

A token's margin is the smallest change of scores, or of a filter's quantity, that would make it the one decided for:
in logits against other tokens and at the top-k boundary, in probability at the top-p and min-p boundaries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.config import SamplingParams
from dspark.ops import noise

BOUND = 1e-4


@dataclass(frozen=True, slots=True)
class Finding:
    """Two outputs that differ.

    Attributes:
        where: which run, in words; ``prompt`` is where its prompt comes from.
        position: index in the output of the first difference.
        expected, got: the tokens there, None where an output has ended.
        margin: the larger of the two tokens' margins there; for a greedy decision between the two likeliest tokens,
            the difference of the top two logits.
        after: the largest margin of what was decided later, after the token that was got.
    """

    where: str
    prompt: str
    position: int
    expected: int | None
    got: int | None
    margin: float
    after: float

    @property
    def rounding(self) -> bool:
        """True where rounding explains it: all margins under 1e-4."""
        return self.margin < BOUND and self.after < BOUND

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        numbers = {"margin": self.margin, "after": self.after}
        return {
            "run": self.where,
            "prompt": self.prompt,
            "position": self.position,
            "expected": self.expected,
            "got": self.got,
            **{name: value if math.isfinite(value) else None for name, value in numbers.items()},
            "verdict": "rounding" if self.rounding else "FAULT",
        }


class Reference:
    """The model as transformers loads it, one prompt at a time.

    Args:
        model: a causal LM that nothing has touched.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    @torch.no_grad()
    def generate(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """Greedy output of transformers' ``generate``, at most ``tokens``, with the EOS token that ends it."""
        ids = torch.tensor([list(prompt)])
        out = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
        return [int(i) for i in out[0, ids.shape[1] :]]

    @torch.no_grad()
    def logits(self, ids: Sequence[int], first: int) -> Tensor:
        """Logits of the tokens after ids[: first + 1], ids[: first + 2], .., ids, [len(ids) - first, V] float32."""
        keep = len(ids) - first
        logits: Tensor = self.model(torch.tensor([list(ids)]), use_cache=False, logits_to_keep=keep).logits[0]
        return logits

    def margins(
        self, prompt: Sequence[int], output: Sequence[int], params: SamplingParams, first: int = 0
    ) -> list[float]:
        """Margin of each token of ``output[first:]``: 0 where it is what this model decides after those before it."""
        ids = [*prompt, *output]
        start = len(prompt) + first
        rows = self.logits(ids[:-1], start - 1)
        return [margin(row, ids[: start + k], ids[start + k], params) for k, row in enumerate(rows)]

    def compare(
        self,
        prompt: Sequence[int],
        expected: Sequence[int],
        got: Sequence[int],
        params: SamplingParams,
        *,
        where: str = "",
        source: str = "",
    ) -> Finding | None:
        """None for equal outputs, else where they part and by how much."""
        if list(expected) == list(got):
            return None
        longest = max(len(expected), len(got))
        at = next(i for i in range(longest) if list(expected[i : i + 1]) != list(got[i : i + 1]))
        two = tuple(out[at] if at < len(out) else None for out in (expected, got))
        worst = max(
            math.inf if token is None else self.margins(prompt, [*got[:at], token], params, at)[0] for token in two
        )
        after = max(self.margins(prompt, got, params, at + 1), default=0.0) if at + 1 < len(got) else 0.0
        return Finding(where, source, at, two[0], two[1], worst, after)


def margin(logits: Tensor, history: Sequence[int], token: int, params: SamplingParams) -> float:
    """Margin of ``token`` after ``history``; infinite where no small change makes it the one decided for.

    Args:
        logits: raw, [V].
        history: prompt and output so far; its length is the token's absolute position.
    """
    scores = penalised(logits, history, params)
    if params.greedy:
        return float(scores.max() - scores[token])
    heat = params.temperature
    kept, distance = filtered(scores / heat, params)
    seed = np.array([params.seed], dtype=np.uint64)
    position = np.array([len(history)], dtype=np.int64)
    total = scores + heat * noise.gumbel(seed, position, len(scores))[0].double()
    entry = 0.0 if kept[token] else float(distance[token])
    above = kept & (total > total[token])  # each of them has to fall, or to leave
    fall = torch.minimum(total - total[token], distance)[above]
    return max(entry, float(fall.max()) if len(fall) else 0.0)


def penalised(logits: Tensor, history: Sequence[int], params: SamplingParams) -> Tensor:
    """Scores before the warpers, [V] float64, by transformers' own processor."""
    from transformers import RepetitionPenaltyLogitsProcessor

    scores = logits.double()[None]
    if params.repetition_penalty != 1.0:
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(torch.tensor([list(history)]), scores)
    return scores[0]


def filtered(scores: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """What top-k, top-p and min-p keep of scores [V] after temperature, and each token's distance to its boundary.

    Returns:
        kept [V] bool; distance [V]: how far a kept token is from being removed (infinite where nothing removes it), or
        a removed one from being kept.
    """
    kept = torch.ones(len(scores), dtype=torch.bool)
    distance = torch.full_like(scores, math.inf)
    if 0 < params.top_k < len(scores):
        last = scores.topk(params.top_k).values[-1]
        inside = scores >= last
        best_outside = scores[~inside].max() if not inside.all() else scores.new_tensor(-math.inf)
        distance = params.temperature * torch.where(inside, scores - best_outside, last - scores)
        kept = inside
    if params.top_p < 1.0:
        probs = torch.softmax(scores.masked_fill(~kept, -math.inf), dim=-1)
        rising, order = probs.sort(stable=True)
        below = rising.cumsum(0)
        inside = torch.empty_like(kept)
        gap = torch.empty_like(distance)
        inside[order], gap[order] = below > 1.0 - params.top_p, (below - (1.0 - params.top_p)).abs()
        inside[order[-1]], gap[order[-1]] = True, math.inf
        kept, distance = _combine(kept, distance, inside, gap)
    if params.min_p > 0.0:
        probs = torch.softmax(scores.masked_fill(~kept, -math.inf), dim=-1)
        edge = params.min_p * probs.max()
        inside, gap = probs >= edge, (probs - edge).abs()
        gap[probs.argmax()] = math.inf
        kept, distance = _combine(kept, distance, inside, gap)
    return kept, distance


def _combine(kept: Tensor, distance: Tensor, inside: Tensor, gap: Tensor) -> tuple[Tensor, Tensor]:
    """One filter after others: what is removed already keeps its distance."""
    nearest = torch.where(inside, torch.minimum(distance, gap), gap)
    return kept & inside, torch.where(kept, nearest, distance)


def decided(logits: Tensor, history: Sequence[int], params: SamplingParams) -> int:
    """The token after ``history`` by transformers' processors and warpers and the shared noise, in float32."""
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    chain = LogitsProcessorList()
    if params.repetition_penalty != 1.0:
        chain.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if not params.greedy:
        if params.temperature != 1.0:
            chain.append(TemperatureLogitsWarper(params.temperature))
        if params.top_k:
            chain.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1.0:
            chain.append(TopPLogitsWarper(params.top_p))
        if params.min_p:
            chain.append(MinPLogitsWarper(params.min_p))
    ids: Any = torch.tensor([list(history)])
    scores = chain(ids, logits[None].clone())
    if not params.greedy:
        seed, position = np.array([params.seed], dtype=np.uint64), np.array([len(history)], dtype=np.int64)
        scores = torch.log_softmax(scores, dim=-1) + noise.gumbel(seed, position, scores.shape[1])
    return int(scores[0].argmax())
