"""What a row's tiles amount to: the best place of all, and the log-sum-exp. Both operations fold by these."""

from __future__ import annotations

import triton
import triton.language as tl

from dspark.ops.triton.common import first_of


@triton.jit
def best_of(best, best_at, best_score, n, tiles, BLOCK_T: tl.constexpr):
    """Where row ``n`` is best, the lowest place of equals, its value and what stands there in ``best_score``."""
    t = tl.arange(0, BLOCK_T)
    top = tl.full([], -float("inf"), tl.float32)
    where = tl.full([], 0, tl.int32)
    score = tl.full([], -float("inf"), tl.float32)
    for start in range(0, tiles, BLOCK_T):
        here = start + t < tiles
        at = n * tiles + start + t
        tops = tl.load(best + at, mask=here, other=-float("inf"))
        part = tl.max(tops, axis=0)
        first = first_of(tops, part, t, BLOCK_T - 1, 0)
        better = part > top
        where = tl.where(better, tl.sum(tl.where(t == first, tl.load(best_at + at, mask=here, other=0), 0), 0), where)
        scores = tl.load(best_score + at, mask=here, other=0.0)
        score = tl.where(better, tl.sum(tl.where(t == first, scores, 0.0), 0), score)
        top = tl.where(better, part, top)
    return where, top, score


@triton.jit
def norm_of(peak, mass, n, tiles, BLOCK_T: tl.constexpr):
    """The largest score of row ``n`` and the logarithm of the mass around it; their sum is the log-sum-exp."""
    t = tl.arange(0, BLOCK_T)
    high = tl.full([], -float("inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for start in range(0, tiles, BLOCK_T):
        here = start + t < tiles
        peaks = tl.load(peak + n * tiles + start + t, mask=here, other=-float("inf"))
        sums = tl.load(mass + n * tiles + start + t, mask=here, other=0.0)
        risen = tl.maximum(high, tl.max(peaks, axis=0))
        level = tl.where(risen == -float("inf"), 0.0, risen)
        total = total * tl.exp(high - level) + tl.sum(sums * tl.exp(peaks - level), axis=0)
        high = risen
    return high, tl.log(total)
