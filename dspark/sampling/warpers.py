"""Temperature, top-k, top-p and min-p for rows with different settings: transformers' arithmetic, in its order.

The same warpers run on target and draft logits, so that q has the support of the law it is accepted against. A row's
result is a function of that row alone, whatever else is in the call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.config import SamplingParams
from dspark.ops.reference import working_dtype

_FULL_SORT = 4096  # vocabularies up to here are sorted whole
_HEAD = 1024  # of larger ones, so many of the largest scores
_Cut = Callable[[Tensor, Sequence[float]], Tensor]


@dataclass(frozen=True, slots=True)
class Warpers:
    """The settings of n rows; a row's None means that it takes no warper (it is greedy)."""

    temperature: tuple[float, ...]
    top_k: tuple[int, ...]
    top_p: tuple[float, ...]
    min_p: tuple[float, ...]

    @classmethod
    def of(cls, rows: Sequence[SamplingParams | None]) -> Warpers:
        """Collect settings row by row."""
        return cls(
            temperature=tuple(1.0 if p is None else p.temperature for p in rows),
            top_k=tuple(0 if p is None else p.top_k for p in rows),
            top_p=tuple(1.0 if p is None else p.top_p for p in rows),
            min_p=tuple(0.0 if p is None else p.min_p for p in rows),
        )

    @property
    def idle(self) -> bool:
        """True where no row is changed."""
        return (
            all(t == 1.0 for t in self.temperature)
            and not any(self.top_k)
            and all(p >= 1.0 for p in self.top_p)
            and not any(self.min_p)
        )


def needs_warpers(params: SamplingParams) -> bool:
    """True where sampling with these parameters changes the logits."""
    return params.temperature != 1.0 or params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def warp(scores: Tensor, warpers: Warpers, *, inplace: bool = False) -> Tensor:
    """Apply ``warpers`` to scores [n, V].

    Args:
        inplace: ``scores`` is the caller's own working copy, float32 or float64, and may be overwritten.

    Returns:
        [n, V] in float32 (float64 for float64 scores); ``scores`` itself where nothing is to be done and it has that
        dtype already.
    """
    own = inplace
    if any(t != 1.0 for t in warpers.temperature):
        scores = _divide(scores, warpers.temperature, inplace)
        own = True
    scores = scores.to(working_dtype(scores))
    vocab = scores.shape[1]
    steps: tuple[tuple[list[int], _Cut, Sequence[float]], ...] = (
        ([i for i, k in enumerate(warpers.top_k) if 0 < k < vocab], _below_top_k, warpers.top_k),
        ([i for i, p in enumerate(warpers.top_p) if p < 1.0], _below_top_p, warpers.top_p),
        ([i for i, p in enumerate(warpers.min_p) if p > 0.0], _below_min_p, warpers.min_p),
    )
    for rows, function, values in steps:
        if rows:
            scores = _mask(scores, rows, function(_take(scores, rows), [values[i] for i in rows]), own)
            own = True
    return scores


def _divide(scores: Tensor, temperature: Sequence[float], inplace: bool) -> Tensor:
    dtype = working_dtype(scores)
    by = torch.tensor(temperature, dtype=dtype, device=scores.device).unsqueeze(1)
    return scores.div_(by) if inplace else scores.to(dtype) / by


def _take(scores: Tensor, rows: list[int]) -> Tensor:
    return scores if len(rows) == scores.shape[0] else scores[rows]


def _mask(scores: Tensor, rows: list[int], remove: Tensor, own: bool) -> Tensor:
    if len(rows) == scores.shape[0]:
        return scores.masked_fill_(remove, -math.inf) if own else scores.masked_fill(remove, -math.inf)
    scores = scores if own else scores.clone()
    scores[rows] = scores[rows].masked_fill_(remove, -math.inf)
    return scores


def _below_top_k(scores: Tensor, ks: Sequence[float]) -> Tensor:
    """True below the k-th largest score of a row; scores equal to it stay."""
    counts = torch.tensor(ks, dtype=torch.int64, device=scores.device)
    top = torch.topk(scores, int(max(ks)), dim=-1).values
    kth = top.gather(1, counts.unsqueeze(1) - 1)
    return scores < kth


def _below_top_p(scores: Tensor, ps: Sequence[float]) -> Tensor:
    """True outside the smallest set with mass top_p.

    Ascending, a token goes while the cumulative mass up to it is at most 1 - top_p; the last one stays. Which of equal
    scores at the cut go is up to the sort, in transformers too: up to ``_FULL_SORT`` tokens it is the same sort, beyond
    the lower ids go first.
    """
    limit = torch.tensor([1.0 - p for p in ps], dtype=scores.dtype, device=scores.device)
    if scores.shape[1] <= _FULL_SORT:
        return _sorted_cut(scores, limit)
    return _head_cut(scores, limit)


def _sorted_cut(scores: Tensor, limit: Tensor) -> Tensor:
    ordered, index = torch.sort(scores, dim=-1)
    remove = ordered.softmax(dim=-1).cumsum(dim=-1) <= limit.unsqueeze(1)
    remove[:, -1] = False
    return torch.empty_like(remove).scatter_(1, index, remove)


def _head_cut(scores: Tensor, limit: Tensor) -> Tensor:
    """The same from the largest scores alone, where the cut falls among them; a full sort of the other rows.

    The mass of the tail is 1 minus that of the head, in float64. All scores equal to the smallest of the head belong
    to the same tie, so the cut must fall strictly above it.
    """
    probs = torch.softmax(scores, dim=-1)
    top, index = torch.topk(scores, _HEAD, dim=-1)
    order = index.argsort(dim=-1)
    top, index = top.gather(1, order), index.gather(1, order)  # by id, so that the stable sort breaks ties by id
    order = top.argsort(dim=-1, stable=True)
    top, index = top.gather(1, order), index.gather(1, order)
    mass = probs.gather(1, index).to(torch.float64)
    below = (1.0 - mass.sum(-1, keepdim=True)).clamp_(min=0.0)
    removed = (below + mass.cumsum(-1)).to(scores.dtype) <= limit.unsqueeze(1)
    removed[:, -1] = False
    tied = top == top[:, :1]
    inside = (removed | ~tied).all(dim=-1)  # the whole bottom tie goes: the cut lies above it
    keep = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, index, ~removed)
    outside = (~inside).nonzero().squeeze(1)
    if outside.numel():
        keep[outside] = ~_sorted_cut(scores[outside], limit[outside])
    return keep.logical_not_()


def _below_min_p(scores: Tensor, ps: Sequence[float]) -> Tensor:
    """True where a probability is less than min_p times the row's largest. The largest itself never is."""
    probs = torch.softmax(scores, dim=-1)
    share = torch.tensor(ps, dtype=scores.dtype, device=scores.device).unsqueeze(1)
    return probs < share * probs.amax(dim=-1, keepdim=True)
