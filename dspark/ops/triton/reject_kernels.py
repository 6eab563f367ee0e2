"""The kernels of ``reject_sample``.

``row_partials`` leaves a few numbers for each row and tile of the target's logits; ``decide`` goes through a request's
drafts and stops where it ends; ``final_partials`` draws from the residual or the bonus law of that one row, recomputing
q with the code that drafted; ``fold_final`` folds its tiles. No law is ever in memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dspark.ops import reject_sample as op
from dspark.ops.triton.bias_sample import candidate_scores
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
    split_norm,
    tempered,
)
from dspark.ops.triton.fold import best_of, norm_of
from dspark.ops.triton.masks import kept

_GREEDY = tl.constexpr(op.GREEDY)
_REJECTION = tl.constexpr(op.REJECTION)
_COUPLED = tl.constexpr(op.COUPLED)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=SMALL)
def row_partials(
    logits, logits_row, starts, lens, owners, mode, temperature, min_p, floors, cuts, peaks, keys, keys_row,
    noise, noise_row, best, best_at, best_score, peak, mass, width, tiles,
    HAS_SETTINGS: tl.constexpr, HAS_MASKS: tl.constexpr, HAS_NOISE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Largest score, mass and, but for rejection rows, the best noisy score of one row and tile; outputs [N, tiles]."""
    n, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    owner = tl.load(owners + n)
    r = tl.where(owner >= 0, owner, 0)
    k = (n - tl.load(starts + r)).to(tl.int32)
    if (owner >= 0) & (k <= tl.load(lens + r)):
        kind = tl.load(mode + r)
        columns = tile * BLOCK + tl.arange(0, BLOCK)
        inside = columns < width
        raw = tl.load(logits + n * logits_row + columns, mask=inside, other=-float("inf")).to(tl.float32)
        scores = raw
        if HAS_SETTINGS:
            scores = tempered(raw, tl.where(kind == _GREEDY, 1.0, tl.load(temperature + r)))
        if HAS_MASKS:
            share = tl.where(kind == _GREEDY, 0.0, tl.load(min_p + r))
            keep = kept(scores, columns, tl.load(floors + n), tl.load(cuts + n), tl.load(peaks + n), share)
            scores = tl.where(keep, scores, -float("inf"))
        high = tl.max(scores, axis=0)
        out = n * tiles + tile
        tl.store(peak + out, high)
        tl.store(mass + out, tl.sum(tl.exp(scores - tl.where(high == -float("inf"), 0.0, high)), axis=0))
        if kind != _REJECTION:
            noisy = scores
            if kind == _COUPLED:
                if HAS_NOISE:
                    noisy = scores + tl.load(noise + n * noise_row + columns, mask=inside, other=0.0)
                else:
                    k0, k1 = row_key(keys + r.to(tl.int64) * keys_row, k, True)
                    noisy = scores + gumbel_of_bits(bits(k0, k1, columns.to(tl.uint32, bitcast=True)))
            top = tl.max(noisy, axis=0)
            place = first_of(noisy, top, columns, width - 1, 0)
            tl.store(best + out, top)
            tl.store(best_at + out, place)
            tl.store(best_score + out, tl.sum(tl.where(columns == place, scores, 0.0), axis=0))


@triton.jit
def row_norm(peak, mass, n, tiles, BLOCK_T: tl.constexpr):
    """Log-sum-exp of row ``n``, float64; NaN where it has no finite maximum."""
    high, around = norm_of(peak, mass, n, tiles, BLOCK_T)
    return high.to(tl.float64) + (around + (high - high)).to(tl.float64)


@triton.jit(do_not_specialize=CANDIDATE_COUNTS, do_not_specialize_on_alignment=SMALL)
def candidate_laws(
    base, base_step, base_row, lse, lse_row, latent, latent_row, w2, w2_row, columns_of, draft_rows, block_rows,
    warmths, lens, accepted, mode, law, width,
    RANK: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """q at one tile of the candidates of the draft that a request rejected, [R, K]; other requests are left alone."""
    r, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)  # a grid takes 65,535 along its second dimension
    taken = tl.load(accepted + r)
    if (tl.load(mode + r) == _REJECTION) & (taken < tl.load(lens + r)):
        d = tl.load(draft_rows + r).to(tl.int64)
        at = taken * block_rows + d
        place = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        inside = place < width
        scores = candidate_scores(
            base + taken * base_step + d * base_row, latent, at * latent_row, w2, w2_row, columns_of + at * width,
            place, inside, tl.load(warmths + d), RANK, BLOCK_V, BLOCK_D,
        )  # fmt: skip
        level, lost = split_norm(tl.load(lse + taken * lse_row + d))
        tl.store(law + r * width + place, tl.exp((scores - level) - lost), mask=inside)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=SMALL)
def decide(
    logits, logits_row, starts, lens, drafts, mode, uniforms, log_q, temperature, min_p, floors, cuts, peaks,
    best, best_at, best_score, peak, mass, accepted, token, log_prob, norms, chance, needs_q, width, tiles, gamma,
    HAS_Q: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Accepted drafts of one request and, of a coupled or greedy one, its token."""
    r = tl.program_id(0).to(tl.int64)
    kind = tl.load(mode + r)
    length = tl.load(lens + r)
    start = tl.load(starts + r).to(tl.int64)
    warmth = tl.load(temperature + r)
    taken = tl.full([], 0, tl.int32)
    alive = tl.full([], 1, tl.int32)
    for k in range(length + 1):
        if alive == 1:
            n = start + k
            norm = row_norm(peak, mass, n, tiles, BLOCK_T)
            tl.store(norms + r, norm)
            level, lost = split_norm(norm)
            draft = tl.load(drafts + r * gamma + k, mask=k < length, other=-1)
            if kind == _REJECTION:
                known = (draft >= 0) & (draft < width)
                raw = tl.load(logits + n * logits_row + draft, mask=known, other=-float("inf")).to(tl.float32)
                score = tempered(raw, warmth)
                keep = kept(
                    score, draft, tl.load(floors + n), tl.load(cuts + n), tl.load(peaks + n), tl.load(min_p + r)
                )
                score = tl.where(keep, score, -float("inf"))
                log_ratio = (score - level) - lost
                if HAS_Q:
                    log_ratio -= tl.load(log_q + r * gamma + k, mask=k < length, other=0.0)
                ratio = tl.exp(log_ratio)
                ratio = tl.where(ratio > 1.0, 1.0, ratio)
                stays = (k < length) & (tl.load(uniforms + r * gamma + k, mask=k < length, other=1.0) < ratio)
            else:
                place, _top, score = best_of(best, best_at, best_score, n, tiles, BLOCK_T)
                tl.store(token + r, place.to(tl.int64))
                tl.store(log_prob + r, (score - level) - lost)
                stays = (k < length) & (draft == place)
                ratio = stays.to(tl.float32)
            tl.store(chance + r * gamma + k, ratio, mask=k < length)
            taken = tl.where(stays, k + 1, taken)
            alive = stays.to(tl.int32)
    tl.store(accepted + r, taken.to(tl.int64))
    if (kind == _REJECTION) & (taken < length):
        tl.atomic_max(needs_q, 1)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=SMALL)
def final_partials(
    logits, logits_row, starts, lens, accepted, drafts, mode, temperature, min_p, floors, cuts, peaks, norms, needs_q,
    keys, keys_row, noise, noise_row,
    base, base_step, base_row, lse, lse_row, latent, latent_row, w2, w2_row, columns_of, draft_rows, block_rows,
    warmths, known, known_q, firsts, known_width, best, best_at, best_score, mass, plain, plain_at,
    rows, width, draft_width, tiles, gamma,
    HAS_NOISE: tl.constexpr, HAS_LAW: tl.constexpr, HAS_CANDIDATES: tl.constexpr, HAS_COLUMNS: tl.constexpr,
    RANK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Of one tile of tokens: the best of each rejection row's residual (or bonus) law under its noise, its mass, and
    the best of p, which stands in where nothing is left; outputs [rows, tiles].

    Candidates come as token ids ``known`` [rows, known_width], rising, with q at them, and where each tile's begin.
    """
    tile = tl.program_id(0)
    tokens = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = tokens < width
    column = tokens
    offered = tokens < draft_width
    if HAS_COLUMNS:
        column = tl.load(columns_of + tokens, mask=inside, other=-1)
        offered = column >= 0
    needed = tl.load(needs_q)  # 0 or 1: where no draft was rejected, neither W2 nor base logits are read
    wanted = offered & (tokens < needed * width)
    held = load_weights(w2, w2_row, column, wanted, 0, RANK, BLOCK_D) if 0 < RANK <= BLOCK_D else 0
    for first in range(0, rows, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        live = r < rows
        kind = tl.load(mode + r, mask=live, other=_GREEDY)
        live = live & (kind == _REJECTION)
        taken = tl.load(accepted + r, mask=live, other=0).to(tl.int32)
        cut_short = live & (taken < tl.load(lens + r, mask=live, other=0))
        n = tl.load(starts + r, mask=live, other=0).to(tl.int64) + taken
        both = live[:, None] & inside[None, :]
        at = n[:, None] * logits_row + tokens[None, :]
        scores = tl.load(logits + at, mask=both, other=-float("inf")).to(tl.float32)
        scores = tempered(scores, tl.load(temperature + r, mask=live, other=1.0)[:, None])
        keep = kept(
            scores, tokens[None, :], tl.load(floors + n, mask=live, other=0)[:, None],
            tl.load(cuts + n, mask=live, other=0)[:, None], tl.load(peaks + n, mask=live, other=0.0)[:, None],
            tl.load(min_p + r, mask=live, other=0.0)[:, None],
        )  # fmt: skip
        scores = tl.where(keep, scores, -float("inf"))
        level, lost = split_norm(tl.load(norms + r, mask=live, other=0.0))
        log_p = (scores - level[:, None]) - lost[:, None]
        if HAS_NOISE:
            drawn = tl.load(noise + n[:, None] * noise_row + tokens[None, :], mask=both, other=0.0)
        else:
            k0, k1 = row_key(keys + r.to(tl.int64) * keys_row, taken, live)
            drawn = gumbel_of_bits(bits(k0[:, None], k1[:, None], tokens.to(tl.uint32, bitcast=True)[None, :]))
        p = tl.exp(log_p)
        q = tl.zeros([BLOCK_R, BLOCK_V], dtype=tl.float32)
        certain = cut_short  # where q is a point mass: without a law, and in a row that took the argmax
        if HAS_LAW or HAS_CANDIDATES:
            d = tl.load(draft_rows + r, mask=live, other=0).to(tl.int64)
            warm = tl.load(warmths + d, mask=live, other=1.0)
            certain = cut_short & (warm == 0.0)
            spread = cut_short & (warm != 0.0)
            if HAS_CANDIDATES:
                edge = r.to(tl.int64) * (tiles + 1) + tile
                begin = tl.load(firsts + edge, mask=spread, other=0)
                end = tl.load(firsts + edge + 1, mask=spread, other=0)
                for j in range(tl.max(end - begin, axis=0)):
                    here = begin + j < end
                    where = r.to(tl.int64) * known_width + begin + j
                    name = tl.load(known + where, mask=here, other=-1)
                    value = tl.load(known_q + where, mask=here, other=0.0)
                    q = tl.where(tokens[None, :] == name[:, None], value[:, None], q)
            elif needed > 0:
                whole = spread[:, None] & (inside & offered)[None, :]
                where = taken.to(tl.int64)[:, None] * base_step + d[:, None] * base_row + column[None, :]
                drafted = tl.load(base + where, mask=whole, other=-float("inf")).to(tl.float32)
                if RANK > 0:
                    drafted += head_bias(
                        latent, latent_row, taken.to(tl.int64) * block_rows + d, spread, w2, w2_row, column, offered,
                        held, RANK, BLOCK_R, BLOCK_V, BLOCK_D, UPCAST,
                    )  # fmt: skip
                drafted = tempered(drafted, warm[:, None])
                level, lost = split_norm(tl.load(lse + taken.to(tl.int64) * lse_row + d, mask=spread, other=0.0))
                q = tl.where(whole, tl.exp((drafted - level[:, None]) - lost[:, None]), 0.0)
        x = tl.load(drafts + r.to(tl.int64) * gamma + taken, mask=certain, other=-1)
        q = tl.where(tokens[None, :] == x[:, None], 1.0, q)
        rest = tl.maximum(p - q, 0.0)
        log_rest = tl.where(rest > 0.0, tl.log(tl.where(rest > 0.0, rest, 1.0)), -float("inf"))
        noisy = log_rest + drawn
        top = tl.max(noisy, axis=1)
        place = first_of(noisy, top[:, None], tokens[None, :], width - 1, 1)
        out = r.to(tl.int64) * tiles + tile
        tl.store(best + out, top, mask=live)
        tl.store(best_at + out, place, mask=live)
        tl.store(best_score + out, tl.sum(tl.where(tokens[None, :] == place[:, None], log_rest, 0.0), 1), mask=live)
        tl.store(mass + out, tl.sum(rest, axis=1), mask=live)
        noisy = log_p + drawn
        top = tl.max(noisy, axis=1)
        tl.store(plain + out, top, mask=live)
        tl.store(plain_at + out, first_of(noisy, top[:, None], tokens[None, :], width - 1, 1), mask=live)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=SMALL)
def fold_final(
    logits, logits_row, starts, accepted, mode, temperature, norms, best, best_at, best_score, mass, plain, plain_at,
    token, log_prob, tiles, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """The token of one rejection row and its log-probability."""
    r = tl.program_id(0).to(tl.int64)
    kind = tl.load(mode + r)
    if kind == _REJECTION:
        t = tl.arange(0, BLOCK_T)
        total = tl.full([], 0.0, tl.float32)
        for start in range(0, tiles, BLOCK_T):
            total += tl.sum(tl.load(mass + r * tiles + start + t, mask=start + t < tiles, other=0.0), axis=0)
        level, lost = split_norm(tl.load(norms + r))
        if total > 0.0:
            where, _top, score = best_of(best, best_at, best_score, r, tiles, BLOCK_T)
            tl.store(token + r, where.to(tl.int64))
            tl.store(log_prob + r, score - tl.log(total) + (level - level))
        else:
            where, _top, _score = best_of(plain, plain_at, plain, r, tiles, BLOCK_T)
            n = tl.load(starts + r).to(tl.int64) + tl.load(accepted + r)
            raw = tl.load(logits + n * logits_row + where).to(tl.float32)
            score = tempered(raw, tl.load(temperature + r))
            tl.store(token + r, where.to(tl.int64))
            tl.store(log_prob + r, (score - level) - lost)
