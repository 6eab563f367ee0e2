"""What the kernels share: the noise, the head's bias of a tile, and which tokens a row keeps.

Everything is decided in float32. 16-bit values are raised when they are loaded; only a matrix product takes them as
they are, since its products are exact in float32. Under the interpreter it raises them too (``UPCAST``): the
interpreter keeps bfloat16 as integers and multiplies those.
"""

from __future__ import annotations

import triton
import triton.language as tl

_MAX_U = tl.constexpr(1.0 - 2.0**-24)

COUNTS = [
    "rows", "tiles", "gamma", "known_width", "block_rows", "draft_width", "keys_row", "lse_row", "names_row",
    "columns_row",
]  # fmt: skip
"""Numbers that a kernel is not compiled apart for: one row, or a multiple of 16 of them, runs the code of any other."""
CANDIDATE_COUNTS = [*COUNTS, "base_row", "base_step", "width"]
"""The same of kernels that go by candidates, as many as a drafter keeps."""
SMALL = [
    "starts", "lens", "owners", "mode", "keys", "floors", "cuts", "peaks", "best", "best_at", "best_score", "peak",
    "mass", "plain", "plain_at", "needs_q", "top_k", "top_p", "min_p", "temperature", "warmths", "columns_of",
    "draft_rows", "known", "known_q", "firsts", "law", "names", "token", "accepted", "drafts", "uniforms", "log_q",
    "log_prob", "lse", "norms", "chance",
]  # fmt: skip
"""Pointers whose alignment is not compiled for: views of odd rows are not aligned, and little is read through them."""


@triton.jit
def mix32(x):
    """The bijection of ``dspark.ops.noise``, of uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def bits(k0, k1, counters):
    """x of row keys and counters, all uint32."""
    return mix32(mix32(counters ^ k0) + k1)


@triton.jit
def gumbel_of_bits(x):
    """g of uint32 words, float32. log1p(-u) is log(w) u / (1 - w) with w = 1 - u: exact to a few ulp at any u."""
    low = (x & 0xFFFF).to(tl.int32).to(tl.float32) + 0.5
    high = (x >> 16).to(tl.int32).to(tl.float32)
    u = tl.minimum((high * 65536.0 + low) * (2.0**-32), _MAX_U)
    w = 1.0 - u
    lost = 1.0 - w
    tail = tl.where(lost > 0.0, -tl.log(w) * (u / tl.where(lost > 0.0, lost, 1.0)), u)
    return -tl.log(tail)


@triton.jit
def row_key(keys, rows, mask):
    """Both halves of the row keys [.., 2] int32 of ``rows``, uint32."""
    k0 = tl.load(keys + 2 * rows, mask=mask, other=0).to(tl.uint32, bitcast=True)
    k1 = tl.load(keys + 2 * rows + 1, mask=mask, other=0).to(tl.uint32, bitcast=True)
    return k0, k1


@triton.jit
def dot_rows(left, right, UPCAST: tl.constexpr):
    """left [M, D] @ right [N, D]^T in float32: products exact, nothing rounded to TF32."""
    if UPCAST:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, tl.trans(right), input_precision="ieee")


@triton.jit
def load_weights(w2, w2_row, columns, inside, first, RANK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows ``columns`` of W2 [Vd, RANK] from feature ``first`` on, [BLOCK_V, BLOCK_D]; 0 outside."""
    d = first + tl.arange(0, BLOCK_D)
    where = columns.to(tl.int64)[:, None] * w2_row + d[None, :]
    return tl.load(w2 + where, mask=inside[:, None] & (d < RANK)[None, :], other=0.0)


@triton.jit
def head_bias(
    latent, latent_row, owners, live, w2, w2_row, columns, inside, held,
    RANK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Bias [BLOCK_R, BLOCK_V] of the rows ``owners`` of latent [.., RANK] at the rows ``columns`` of W2.

    ``held`` is the tile of W2 where the whole rank fits one block, so that many rows read it once.
    """
    if BLOCK_D >= RANK:
        d = tl.arange(0, BLOCK_D)
        where = owners.to(tl.int64)[:, None] * latent_row + d[None, :]
        left = tl.load(latent + where, mask=live[:, None] & (d < RANK)[None, :], other=0.0)
        bias = dot_rows(left, held, UPCAST)
    else:
        bias = tl.zeros([BLOCK_R, BLOCK_V], dtype=tl.float32)
        for first in range(0, RANK, BLOCK_D):
            d = first + tl.arange(0, BLOCK_D)
            where = owners.to(tl.int64)[:, None] * latent_row + d[None, :]
            left = tl.load(latent + where, mask=live[:, None] & (d < RANK)[None, :], other=0.0)
            right = load_weights(w2, w2_row, columns, inside, first, RANK, BLOCK_D)
            bias += dot_rows(left, right, UPCAST)
    return bias


@triton.jit
def tempered(scores, temperature):
    """scores / temperature, correctly rounded as torch divides; temperature 0 (greedy) leaves them."""
    return tl.div_rn(scores, tl.where(temperature == 0.0, 1.0, temperature) + tl.zeros_like(scores))


@triton.jit
def first_of(values, best, columns, LAST: tl.constexpr, axis: tl.constexpr):
    """The lowest of ``columns`` whose value equals ``best``; LAST where none does (NaN)."""
    return tl.min(tl.where(values == best, columns, LAST), axis=axis)


@triton.jit
def split_norm(norm):
    """A float64 norm as two float32: itself rounded, and what is left. Scores minus both are right at any size."""
    level = norm.to(tl.float32)
    return level, (norm - level.to(tl.float64)).to(tl.float32)
