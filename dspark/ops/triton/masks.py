"""Top-k, top-p and min-p of rows that are never sorted.

A mask is a threshold: the largest value t at which the tokens of at least t weigh enough, k of them for top-k, the mass
top_p for top-p. It is found two bits at a time in the order of float32's bit patterns, 16 passes over the row. Among
tokens equal to a top-p threshold, lower ids go first, so a threshold comes with the first id that stays.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dspark.ops.triton.common import COUNTS, SMALL, tempered


@triton.jit
def ordered(scores):
    """int32 that rise as the float32 ``scores`` do; a NaN of either sign is above all, so that no mask hides it."""
    b = (scores + 0.0).to(tl.int32, bitcast=True)  # + 0: one zero
    return tl.where(scores != scores, 0x7FFFFFFF, b ^ ((b >> 31) & 0x7FFFFFFF))


@triton.jit
def load_scores(logits, columns, width, temperature):
    """One tile of a row's scores; -inf outside."""
    raw = tl.load(logits + columns, mask=columns < width, other=-float("inf")).to(tl.float32)
    return tempered(raw, temperature)


@triton.jit
def weigh(logits, width, temperature, peak, floor, at, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """What the tokens of at least ``at`` weigh, of those of at least ``floor`` (both ordered int32)."""
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        scores = load_scores(logits, columns, width, temperature)
        place = ordered(scores)
        inside = (columns < width) & (place >= floor) & (place >= at)
        weight = tl.exp(scores - peak) if BY_MASS else tl.full([BLOCK], 1.0, tl.float32)
        total += tl.where(inside, weight, 0.0)
    return tl.sum(total, axis=0)


@triton.jit
def threshold(logits, width, temperature, peak, floor, goal, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest ordered value at which the tokens of at least it weigh ``goal`` or more."""
    found = tl.full([], -2147483648, tl.int32)
    for step in range(16):
        shift = 30 - 2 * step
        low = tl.zeros([BLOCK], dtype=tl.float32)
        middle = tl.zeros([BLOCK], dtype=tl.float32)
        high = tl.zeros([BLOCK], dtype=tl.float32)
        one = tl.full([], 1, tl.int32) << shift
        two = tl.full([], 2, tl.int32) << shift
        at1 = found + one
        at2 = found + two
        at3 = found + one + two
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            scores = load_scores(logits, columns, width, temperature)
            place = ordered(scores)
            inside = (columns < width) & (place >= floor)
            weight = tl.exp(scores - peak) if BY_MASS else tl.full([BLOCK], 1.0, tl.float32)
            weight = tl.where(inside, weight, 0.0)
            low += tl.where(place >= at1, weight, 0.0)
            middle += tl.where(place >= at2, weight, 0.0)
            high += tl.where(place >= at3, weight, 0.0)
        found = tl.where(
            tl.sum(high, 0) >= goal,
            at3,
            tl.where(tl.sum(middle, 0) >= goal, at2, tl.where(tl.sum(low, 0) >= goal, at1, found)),
        )
    return found


@triton.jit
def tie_cut(logits, width, temperature, at, gone, BLOCK: tl.constexpr):
    """The first id that stays where ``gone`` of the tokens at the ordered value ``at`` go, lowest ids first."""
    seen = tl.full([], 0, tl.int32)
    cut = tl.full([], 0, tl.int32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        tied = (ordered(load_scores(logits, columns, width, temperature)) == at) & (columns < width)
        rank = seen + tl.cumsum(tied.to(tl.int32), axis=0) - 1
        cut += tl.sum(tl.where(tied & (rank == gone), columns, 0), axis=0)
        seen += tl.sum(tied.to(tl.int32), axis=0)
    return cut


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=SMALL)
def find_masks(
    logits, logits_row, starts, lens, owners, mode, temperature, top_k, top_p, floors, cuts, peaks, width,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Threshold (ordered int32), first id kept at it, and largest score of one row of logits; outputs are [N]."""
    n = tl.program_id(0)
    owner = tl.load(owners + n)
    known = owner >= 0
    at = tl.where(known, owner, 0)
    used = known & (n - tl.load(starts + at) <= tl.load(lens + at)) & (tl.load(mode + at) != 0)
    k = tl.load(top_k + at)
    p = tl.load(top_p + at)
    floor = tl.full([], -2147483648, tl.int32)
    cut = tl.full([], 0, tl.int32)
    peak = tl.full([], 0.0, tl.float32)
    if used:
        row = logits + n.to(tl.int64) * logits_row
        warmth = tl.load(temperature + at)
        highest = tl.full([BLOCK], -float("inf"), tl.float32)
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            highest = tl.maximum(highest, load_scores(row, columns, width, warmth))
        peak = tl.max(highest, axis=0)
        if (k > 0) & (k < width):
            floor = threshold(row, width, warmth, peak, floor, k.to(tl.float32), False, BLOCK)
        if p < 1.0:
            total = weigh(row, width, warmth, peak, floor, floor, True, BLOCK)
            limit = (1.0 - p) * total
            edge = threshold(row, width, warmth, peak, floor, total - limit, True, BLOCK)
            top = ordered(peak)
            edge = tl.where(edge > top, top, edge)
            share = tl.exp(unordered(edge) - peak)
            below = total - weigh(row, width, warmth, peak, floor, edge, True, BLOCK)
            ties = weigh(row, width, warmth, peak, edge, edge, False, BLOCK) - weigh(
                row, width, warmth, peak, edge, edge + 1, False, BLOCK
            )
            gone = tl.floor((limit - below) / share)
            gone = tl.minimum(tl.maximum(gone, 0.0), ties - 1.0)
            cut = tie_cut(row, width, warmth, edge, gone.to(tl.int32), BLOCK)
            floor = edge
    tl.store(floors + n, floor)
    tl.store(cuts + n, cut)
    tl.store(peaks + n, peak)


@triton.jit
def unordered(place):
    """The float32 of an ordered int32."""
    return (place ^ ((place >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def kept(scores, columns, floor, cut, peak, min_p):
    """Which tokens of a row no warper masks; the arguments broadcast."""
    place = ordered(scores)
    above = (place > floor) | ((place == floor) & (columns >= cut))
    return above & (tl.where(tl.exp(scores - peak) < min_p, 0, 1) == 1)
