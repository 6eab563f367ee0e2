"""``bias_sample`` in Triton: W2 is read once a step, and the biased logits never leave the chip.

A program takes one tile of columns, holds its part of W2 and goes through the rows; for each it leaves five numbers:
the best noisy score, where it is, the score there, the largest score and the mass around it. A second kernel folds
these tiles, row by row. Nothing depends on how many rows there are or which, but for the order of sums inside a
product.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.ops import bias_sample as op
from dspark.ops.bias_sample import Sampled
from dspark.ops.triton.common import (
    CANDIDATE_COUNTS,
    COUNTS,
    SMALL,
    bits,
    first_of,
    gumbel_of_bits,
    head_bias,
    load_weights,
    row_key,
    tempered,
)
from dspark.ops.triton.fold import best_of, norm_of
from dspark.ops.triton.launch import Tile, device_guard, interpreted, launch, tile_for

FOLD_TILES = 1024
"""Tiles of a step of the last kernel, whatever the number of tiles: it is compiled once."""


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=SMALL)
def bias_partials(
    base, base_row, latent, latent_row, w2, w2_row, names, names_row, temperature, keys, noise, noise_row,
    best, best_at, best_score, peak, mass, rows, width, tiles,
    RANK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_NAMES: tl.constexpr, HAS_NOISE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """What one tile of columns says about every row; outputs are [rows, tiles]."""
    tile = tl.program_id(0)
    columns = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = columns < width
    counters = tl.load(names + columns, mask=inside, other=0).to(tl.int32) if HAS_NAMES else columns
    held = load_weights(w2, w2_row, columns, inside, 0, RANK, BLOCK_D) if 0 < RANK <= BLOCK_D else 0
    for start in range(0, rows, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        live = r < rows
        both = live[:, None] & inside[None, :]
        where = r.to(tl.int64)[:, None] * base_row + columns[None, :]
        scores = tl.load(base + where, mask=both, other=-float("inf")).to(tl.float32)
        if RANK > 0:
            scores += head_bias(
                latent, latent_row, r, live, w2, w2_row, columns, inside, held, RANK, BLOCK_R, BLOCK_V, BLOCK_D, UPCAST
            )
        warmth = tl.load(temperature + r, mask=live, other=1.0)
        scores = tempered(scores, warmth[:, None])
        if HAS_NOISE:
            at = r.to(tl.int64)[:, None] * noise_row + columns[None, :]
            drawn = tl.load(noise + at, mask=both, other=0.0)
        else:
            k0, k1 = row_key(keys, r, live)
            drawn = gumbel_of_bits(bits(k0[:, None], k1[:, None], counters.to(tl.uint32, bitcast=True)[None, :]))
        noisy = scores + tl.where(warmth[:, None] == 0.0, 0.0, drawn)
        top = tl.max(noisy, axis=1)
        place = first_of(noisy, top[:, None], columns[None, :], width - 1, 1)
        high = tl.max(scores, axis=1)
        around = tl.sum(tl.exp(scores - tl.where(high == -float("inf"), 0.0, high)[:, None]), axis=1)
        chosen = tl.sum(tl.where(columns[None, :] == place[:, None], scores, 0.0), axis=1)
        out = r.to(tl.int64) * tiles + tile
        tl.store(best + out, top, mask=live)
        tl.store(best_at + out, place, mask=live)
        tl.store(best_score + out, chosen, mask=live)
        tl.store(peak + out, high, mask=live)
        tl.store(mass + out, around, mask=live)


@triton.jit
def candidate_scores(
    base, latent, latent_at, w2, w2_row, columns_of, place, inside, warmth,
    RANK: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Scores of one row's candidates at ``place``, whose rows of W2 are gathered; ``base`` and ``columns_of`` point at
    the row, ``latent_at`` is where its features begin."""
    scores = tl.load(base + place, mask=inside, other=-float("inf")).to(tl.float32)
    if RANK > 0:
        columns = tl.load(columns_of + place, mask=inside, other=0)
        for first in tl.static_range(0, RANK, BLOCK_D):
            d = first + tl.arange(0, BLOCK_D)
            left = tl.load(latent + latent_at + d, mask=d < RANK, other=0.0).to(tl.float32)
            right = load_weights(w2, w2_row, columns, inside, first, RANK, BLOCK_D).to(tl.float32)
            scores += tl.sum(right * left[None, :], axis=1)
    return tempered(scores, warmth)


@triton.jit(do_not_specialize=CANDIDATE_COUNTS, do_not_specialize_on_alignment=SMALL)
def candidate_partials(
    base, base_row, latent, latent_row, w2, w2_row, columns_of, columns_row, names, names_row,
    temperature, keys, noise, noise_row, best, best_at, best_score, peak, mass, width, tiles,
    RANK: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, HAS_NOISE: tl.constexpr,
):  # fmt: skip
    """The same of one row and one tile of its candidates."""
    r, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)  # a grid takes 65,535 along its second dimension
    place_in_row = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = place_in_row < width
    warmth = tl.load(temperature + r)
    scores = candidate_scores(
        base + r * base_row, latent, r * latent_row, w2, w2_row, columns_of + r * columns_row, place_in_row, inside,
        warmth, RANK, BLOCK_V, BLOCK_D,
    )  # fmt: skip
    if HAS_NOISE:
        drawn = tl.load(noise + r * noise_row + place_in_row, mask=inside, other=0.0)
    else:
        k0, k1 = row_key(keys, r, True)
        counters = tl.load(names + r * names_row + place_in_row, mask=inside, other=0).to(tl.int32)
        drawn = gumbel_of_bits(bits(k0, k1, counters.to(tl.uint32, bitcast=True)))
    noisy = scores + tl.where(warmth == 0.0, 0.0, drawn)
    top = tl.max(noisy, axis=0)
    place = first_of(noisy, top, place_in_row, width - 1, 0)
    high = tl.max(scores, axis=0)
    out = r * tiles + tile
    tl.store(best + out, top)
    tl.store(best_at + out, place)
    tl.store(best_score + out, tl.sum(tl.where(place_in_row == place, scores, 0.0), axis=0))
    tl.store(peak + out, high)
    tl.store(mass + out, tl.sum(tl.exp(scores - tl.where(high == -float("inf"), 0.0, high)), axis=0))


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=SMALL)
def fold_tiles(
    best, best_at, best_score, peak, mass, temperature, names, names_row, token, log_q, lse, tiles,
    HAS_NAMES: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Token, log q and log-sum-exp of one row from its tiles. Equal scores go to the lowest tile."""
    r = tl.program_id(0).to(tl.int64)
    where, _top, score = best_of(best, best_at, best_score, r, tiles, BLOCK_T)
    high, around = norm_of(peak, mass, r, tiles, BLOCK_T)
    wrong = (around - around) + (high - high)  # 0, or NaN where the row has no finite maximum
    greedy = tl.load(temperature + r) == 0.0
    tl.store(log_q + r, tl.where(greedy, 0.0, (score - high) - around) + wrong)
    tl.store(lse + r, high.to(tl.float64) + around.to(tl.float64))
    name = tl.load(names + r * names_row + where) if HAS_NAMES else where
    tl.store(token + r, name.to(tl.int64))


def bias_sample(
    base: Tensor,
    temperature: Tensor,
    keys: Tensor,
    latent: Tensor | None = None,
    w2: Tensor | None = None,
    token_map: Tensor | None = None,
    candidates: Tensor | None = None,
    gumbel: Tensor | None = None,
    *,
    tile: Tile | None = None,
) -> Sampled:
    """See :func:`dspark.ops.bias_sample.reference`, whose arguments these are.

    Args:
        tile: sizes and warps; None for the tuned table's.
    """
    op.check(base, temperature, keys, latent, w2, token_map, candidates, gumbel)
    rows, width = base.shape
    rank = 0 if w2 is None else int(w2.shape[1])
    tile = tile if tile is not None else tile_for(op.OP, base if w2 is None else w2, rows=rows, rank=rank)
    if candidates is not None:
        tile = tile.narrow()
    names = token_map if candidates is None else op.column_names(width, token_map, candidates, base.device)
    base = base if base.stride(1) == 1 else base.contiguous()
    latent, w2 = unit_columns(latent), unit_columns(w2)
    gumbel = None if gumbel is None else unit_columns(gumbel.to(torch.float32))
    temperature, keys, names = temperature.to(torch.float32).contiguous(), keys.contiguous(), dense(names, torch.int64)
    tiles = triton.cdiv(width, tile.block_v)
    floats = torch.empty(4, rows, tiles, dtype=torch.float32, device=base.device)
    places = torch.empty(rows, tiles, dtype=torch.int32, device=base.device)
    token = torch.empty(rows, dtype=torch.int64, device=base.device)
    log_q = torch.empty(rows, dtype=torch.float32, device=base.device)
    lse = torch.empty(rows, dtype=torch.float64, device=base.device)
    if not rows:
        return Sampled(token, log_q, lse)
    sizes = {"RANK": rank, "BLOCK_V": tile.block_v, "BLOCK_D": tile.block_d(rank)}
    head = (base, row_stride(base), latent, row_stride(latent), w2, row_stride(w2))
    rest = (temperature, keys, gumbel, row_stride(gumbel), floats[0], places, floats[1], floats[2], floats[3])
    names_row = row_stride(names) if names is not None and names.dim() == 2 else 0
    options: dict[str, Any] = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    with device_guard(base.device):
        if candidates is None:
            launch(
                bias_partials, (tiles,), *head, names, names_row, *rest, rows, width, tiles, BLOCK_R=tile.block_r,
                HAS_NAMES=names is not None, HAS_NOISE=gumbel is not None, UPCAST=interpreted(), **sizes, **options,
            )  # fmt: skip
        else:
            candidates = dense(candidates, torch.int64)
            launch(
                candidate_partials, (rows, tiles), *head, candidates, row_stride(candidates), names, names_row, *rest,
                width, tiles, HAS_NOISE=gumbel is not None, **sizes, **options,
            )  # fmt: skip
        launch(
            fold_tiles, (rows,), floats[0], places, floats[1], floats[2], floats[3], temperature, names, names_row,
            token, log_q, lse, tiles, HAS_NAMES=names is not None, BLOCK_T=FOLD_TILES, num_warps=4,
        )  # fmt: skip
    return Sampled(token, log_q, lse)


def unit_columns(x: Tensor | None) -> Tensor | None:
    """``x`` with neighbouring columns next to each other in memory."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def dense(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The tensor without gaps and in the one dtype that kernels are compiled for; as it is where it is so already."""
    return x if x is None else x.to(dtype).contiguous()


def row_stride(x: Tensor | None) -> int:
    """Elements from one row to the next."""
    return 0 if x is None else int(x.stride(0))
