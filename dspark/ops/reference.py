"""The operations of sampling and verification in plain torch: what faster backends must reproduce."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dspark.types import FloatArray, IntArray

_BLOCK = 256
_GROUP = 16


def working_dtype(scores: Tensor) -> torch.dtype:
    """float64 stays float64; everything else is decided in float32."""
    return torch.float64 if scores.dtype == torch.float64 else torch.float32


def softmax_rows(scores: Tensor) -> Tensor:
    """Probabilities of each row of scores [n, V], float32 (float64 for float64 scores)."""
    return torch.softmax(scores, dim=-1, dtype=working_dtype(scores))


def exponentials(scores: Tensor, *, inplace: bool = False) -> Tensor:
    """exp(score - largest of the row) of float32 or float64 scores [n, V]: softmax weights that are not normalised."""
    shifted = scores.sub_(scores.amax(-1, keepdim=True)) if inplace else scores - scores.amax(-1, keepdim=True)
    return shifted.exp_()


def top_ids(scores: Tensor, count: int) -> Tensor:
    """Columns of the ``count`` largest scores of each row of [n, V], rising, [n, count] int64.

    The largest lie in the ``count`` strided groups with the largest maxima, so one pass over the row finds the groups,
    and only their members are sorted out. Which of equal scores at the cut stay is left open.
    """
    n, width = scores.shape
    groups = width // _GROUP
    if groups <= 2 * count:
        return scores.topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values
    body = groups * _GROUP
    by_group = scores[:, :body].view(n, _GROUP, groups)
    best = by_group.amax(1).topk(count, dim=-1, sorted=False).indices
    steps = torch.arange(0, body, groups, device=scores.device)
    columns = (best.unsqueeze(1) + steps.unsqueeze(1)).flatten(1)
    if body < width:
        rest = torch.arange(body, width, device=scores.device).expand(n, -1)
        columns = torch.cat((columns, rest), dim=1)
    kept = scores.gather(1, columns).topk(count, dim=-1, sorted=False).indices
    return columns.gather(1, kept).sort(dim=-1).values


def argmax_rows(scores: Tensor) -> Tensor:
    """The lowest id among the largest scores of each row of [n, V], [n] int64."""
    scores = scores.to(working_dtype(scores))
    if scores.device.type == "cpu":
        # numpy takes the first of equal values as torch does, and many times faster on a CPU
        return torch.from_numpy(scores.detach().numpy().argmax(axis=-1))
    return torch.argmax(scores, dim=-1)


def rows_without_maximum(scores: Tensor, best: Tensor) -> IntArray:
    """Rows of [n, V] whose largest score, at ``best`` [n], is -inf, +inf or NaN: nothing can be decided there."""
    if scores.device.type == "cpu" and scores.dtype in (torch.float32, torch.float64):
        top = scores.detach().numpy()[np.arange(len(best)), best.numpy()]
        return np.flatnonzero(~np.isfinite(top))
    chosen = scores.gather(1, best.unsqueeze(1)).squeeze(1)
    return np.flatnonzero((~torch.isfinite(chosen)).cpu().numpy())


def take_rows(values: Tensor, rows: IntArray) -> Tensor:
    """values[rows]; a view where ``rows`` are consecutive. The result must not be written to."""
    count = len(rows)
    if count and (count == 1 or (np.diff(rows) == 1).all()):
        first = int(rows[0])
        return values if count == values.shape[0] else values[first : first + count]
    return values[index_tensor(rows, values.device)]


def index_tensor(values: IntArray, device: torch.device) -> Tensor:
    """Host indices as an int64 tensor on ``device``."""
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(device)


def inverse_cdf(probs: Tensor, uniforms: Tensor) -> Tensor:
    """The token whose interval of the cumulative sum holds ``uniforms``, one a row.

    Sums are float64, in blocks and then within the block: one pass over the row. A token of probability 0 is never
    returned: what rounding pushes past an end falls to the last token that has probability.

    Args:
        probs: weights >= 0 with a positive sum, [n, V]; need not be normalised.
        uniforms: in [0, 1), [n] float64.

    Returns:
        [n] int64.
    """
    width = probs.shape[1]
    body = width - width % _BLOCK
    sums = []
    if body:
        sums.append(probs[:, :body].view(-1, body // _BLOCK, _BLOCK).sum(-1, dtype=torch.float64))
    if body < width:
        sums.append(probs[:, body:].sum(-1, keepdim=True, dtype=torch.float64))
    blocks = torch.cat(sums, dim=1) if len(sums) > 1 else sums[0]
    if probs.device.type == "cpu":
        return torch.from_numpy(_locate(probs.detach().numpy(), blocks.detach().numpy(), uniforms.cpu().numpy()))
    edges = blocks.cumsum(1)
    goal = uniforms.to(edges.device).unsqueeze(1) * edges[:, -1:]
    block = _pick(blocks, edges, goal)
    before = torch.where(block > 0, edges.gather(1, (block - 1).clamp_(min=0)), torch.zeros_like(goal))
    columns = block * _BLOCK + torch.arange(min(_BLOCK, width), device=probs.device)
    inside = probs.gather(1, columns.clamp(max=width - 1)).to(torch.float64).masked_fill_(columns >= width, 0.0)
    token = block * _BLOCK + _pick(inside, inside.cumsum(1), goal - before)
    return token.squeeze(1)


def _locate(probs: NDArray[Any], blocks: FloatArray, uniforms: FloatArray) -> IntArray:
    """The rest of ``inverse_cdf`` on the host, where a dozen small tensor operations would cost more than the sums."""
    edges = blocks.cumsum(1)
    goal = uniforms[:, None] * edges[:, -1:]
    block = _pick_host(blocks, edges, goal)[:, None]
    before = np.where(block > 0, np.take_along_axis(edges, np.maximum(block - 1, 0), 1), 0.0)
    columns = block * _BLOCK + np.arange(min(_BLOCK, probs.shape[1]))
    outside = columns >= probs.shape[1]
    inside = np.take_along_axis(probs, np.where(outside, 0, columns), 1).astype(np.float64)
    inside[outside] = 0.0
    token: IntArray = block[:, 0] * _BLOCK + _pick_host(inside, inside.cumsum(1), goal - before)
    return token


def _pick_host(weights: FloatArray, cdf: FloatArray, goal: FloatArray) -> IntArray:
    """``_pick`` on the host, [n]."""
    index: IntArray = np.minimum((cdf <= goal).sum(1), cdf.shape[1] - 1)
    if (weights[np.arange(len(index)), index] > 0).all():
        return index
    found: IntArray = _pick(torch.from_numpy(weights), torch.from_numpy(cdf), torch.from_numpy(goal)).squeeze(1).numpy()
    return found


def _pick(weights: Tensor, cdf: Tensor, goal: Tensor) -> Tensor:
    """First column whose cdf exceeds ``goal`` [n, 1]; beyond the end, and on a zero weight, the last weight before."""
    width = weights.shape[1]
    index = torch.searchsorted(cdf, goal, right=True).clamp_(max=width - 1)
    if bool((weights.gather(1, index) <= 0).any()):
        columns = torch.arange(width, device=weights.device)
        held = torch.where(weights > 0, columns, -1)
        last = torch.where(columns <= index, held, -1).amax(1, keepdim=True)
        first = torch.where(weights > 0, columns, width).amin(1, keepdim=True)
        index = torch.where(last >= 0, last, first.clamp(max=width - 1))
    return index


def accept_probs(p: Tensor, q: Tensor) -> Tensor:
    """min(1, p / q) of target and draft probabilities of drafted tokens, in float64. q must be positive."""
    return (p.to(torch.float64) / q.to(torch.float64)).clamp_(max=1.0)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """(p - q)+ normalised, of rows [n, V]: the law of the token that replaces a rejected one, in p's precision.

    Where rounding leaves no mass (p = q), p itself.
    """
    rest = p - q.to(p.dtype)
    rest.clamp_(min=0.0)
    mass = rest.sum(-1, keepdim=True)
    return torch.where(mass > 0, rest.div_(mass.clamp(min=torch.finfo(p.dtype).tiny)), p)


def normalised(weights: Tensor) -> Tensor:
    """weights [n, V] brought to sum 1 in float64: a law that float32 probabilities stand for exactly."""
    exact = weights.to(torch.float64, copy=True)
    return exact.div_(exact.sum(-1, keepdim=True))


def token_logprobs(scores: Tensor, token_ids: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of chosen tokens and of the ``top`` most likely ones of each row.

    Args:
        scores: raw or processed logits, [n, V].
        token_ids: chosen tokens, [n].
        top: how many of the most likely to return, at most V.

    Returns:
        chosen [n], ids [n, top] and values [n, top], by falling value, equal values by rising id.
    """
    values = torch.log_softmax(scores, dim=-1, dtype=working_dtype(scores))
    chosen = values.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    best, ids = values.topk(min(top, values.shape[1]), dim=-1)
    order = ids.argsort(dim=-1, stable=True)
    best, ids = best.gather(1, order), ids.gather(1, order)
    order = best.argsort(dim=-1, descending=True, stable=True)
    return chosen, ids.gather(1, order), best.gather(1, order)
