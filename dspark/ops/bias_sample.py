"""The operation ``bias_sample``: one position of a block, drawn from base logits plus the sequential head's bias.

For rows r and columns v of the draft vocabulary (METHOD eqs. 4-6, section 4)::

    s[r, v] = (base[r, v] + latent[r] . W2[v]) / T[r]
    token[r] = the name of argmax_v s[r, v] + g(key[r], name of v)        the lowest column among equals
    log q    = s[r, at that v] - lse[r],   lse[r] = log sum_v exp s[r, v]

T = 0 is greedy: no noise, no division, log q = 0. ``latent`` is W1[x_{k-1}] of a Markov head, gated or advanced before
by the others. The name of a column is its target id: the column itself, ``token_map[v]`` of a pruned vocabulary, or of
``candidates``, to which the law is then cut. g is the Gumbel noise of :mod:`dspark.ops.noise` under 64-bit row keys:
(request key, anchor, offset, DRAFT) for ``rejection``, (seed, absolute position) for ``coupled``.

This module holds the definition in torch; ``dspark.ops.triton.bias_sample`` does it in one pass over W2 without
writing s. A row without a finite largest score has log q = NaN, whatever its token.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dspark.errors import ConfigError
from dspark.ops import noise

OP = "bias_sample"


class Sampled(NamedTuple):
    """Drawn target ids [R] int64, log q at them [R] float32, and the log-sum-exp of s [R] float64.

    The log-sum-exp is float64 because s minus it has to be right where both are large.
    """

    token: Tensor
    log_q: Tensor
    lse: Tensor


def biased_logits(base: Tensor, latent: Tensor | None, w2: Tensor | None, candidates: Tensor | None = None) -> Tensor:
    """base [R, Vd] + latent [R, r] @ W2 [Vd, r]^T in float32; at ``candidates`` [R, K] alone where base is [R, K]."""
    logits = base.to(torch.float32)
    if latent is None or w2 is None:
        return logits
    if candidates is None:
        return logits + latent.to(torch.float32) @ w2.to(torch.float32).T
    rows = w2[candidates].to(torch.float32)
    return logits + torch.bmm(rows, latent.to(torch.float32).unsqueeze(-1)).squeeze(-1)


def reference(
    base: Tensor,
    temperature: Tensor,
    keys: Tensor,
    latent: Tensor | None = None,
    w2: Tensor | None = None,
    token_map: Tensor | None = None,
    candidates: Tensor | None = None,
    gumbel: Tensor | None = None,
) -> Sampled:
    """The operation in plain torch.

    Args:
        base: base logits [R, Vd], or [R, K] of the candidates; bfloat16, float16 or float32.
        temperature: [R] float32; 0 for greedy rows.
        keys: halves of the 64-bit row keys, [R, 2] int32 (:func:`dspark.ops.noise.key_halves`).
        latent, w2: the head's input [R, r] and W2 [Vd, r]; None for no head.
        token_map: target id of each column, [Vd].
        candidates: draft ids of each row's columns, [R, K].
        gumbel: noise [R, Vd] or [R, K] in place of the keys'.

    Returns:
        See :class:`Sampled`.
    """
    check(base, temperature, keys, latent, w2, token_map, candidates, gumbel)
    scores = biased_logits(base, latent, w2, candidates)
    greedy = temperature == 0
    scores = scores / torch.where(greedy, 1.0, temperature).unsqueeze(1)
    names = column_names(base.shape[1], token_map, candidates, base.device)
    drawn = noise.gumbel_of_bits(noise.bits_of_halves(keys, names.to(torch.int32))) if gumbel is None else gumbel
    noisy = scores + torch.where(greedy.unsqueeze(1), 0.0, drawn)
    best = torch.argmax(noisy, dim=-1, keepdim=True)
    lse = log_sum_exp(scores)
    log_q = torch.where(greedy, 0.0, (scores.gather(1, best).squeeze(1).to(torch.float64) - lse).to(torch.float32))
    finite = torch.isfinite(scores.amax(-1)) & torch.isfinite(lse)
    log_q = torch.where(finite, log_q, math.nan)
    token = names.expand(base.shape).gather(1, best).squeeze(1)
    return Sampled(token, log_q, lse)


def log_sum_exp(scores: Tensor) -> Tensor:
    """Of rows [n, V] float32, [n] float64: the maximum, and the float32 logarithm of the mass around it."""
    high = scores.amax(-1)
    level = torch.where(torch.isfinite(high), high, 0.0)
    return level.to(torch.float64) + torch.log(torch.exp(scores - level.unsqueeze(1)).sum(-1)).to(torch.float64)


def below(scores: Tensor, norms: Tensor) -> Tensor:
    """scores [n, V] float32 minus norms [n] float64, in float32, without losing what a large norm would swallow."""
    level = norms.to(torch.float32)
    rest = (norms - level.to(torch.float64)).to(torch.float32)
    return (scores - level.unsqueeze(1)) - rest.unsqueeze(1)


def column_names(width: int, token_map: Tensor | None, candidates: Tensor | None, device: torch.device) -> Tensor:
    """Target ids of the columns: [Vd] int64, or [R, K] of candidates."""
    if candidates is not None:
        return candidates if token_map is None else token_map[candidates]
    return torch.arange(width, device=device) if token_map is None else token_map


def check(
    base: Tensor,
    temperature: Tensor,
    keys: Tensor,
    latent: Tensor | None,
    w2: Tensor | None,
    token_map: Tensor | None,
    candidates: Tensor | None,
    gumbel: Tensor | None,
) -> None:
    """Refuse shapes and dtypes that do not fit each other.

    Raises:
        ConfigError: naming the first argument that does not.
    """
    if base.dim() != 2 or not base.shape[1]:
        raise ConfigError(f"{OP}: base must be [R, Vd], got {tuple(base.shape)}")
    rows, width = base.shape
    wanted: list[tuple[str, Tensor | None, tuple[int, ...]]] = [
        ("temperature", temperature, (rows,)),
        ("keys", keys, (rows, 2)),
        ("candidates", candidates, (rows, width)),
        ("gumbel", gumbel, (rows, width)),
    ]
    if (latent is None) != (w2 is None):
        raise ConfigError(f"{OP}: latent and w2 belong together")
    if latent is not None and w2 is not None:
        check_head(OP, latent, w2)
        wanted += [("latent", latent, (rows, w2.shape[1]))]
        wanted += [("w2", w2, (width, w2.shape[1]))] if candidates is None else []
    if candidates is None:
        wanted += [("token_map", token_map, (width,))]
    check_shapes(OP, wanted)
    check_keys(OP, keys)


def check_shapes(op: str, wanted: list[tuple[str, Tensor | None, tuple[int, ...]]]) -> None:
    """Refuse the first tensor of another shape than wanted."""
    for name, tensor, shape in wanted:
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ConfigError(f"{op}: {name} must be {list(shape)}, got {list(tensor.shape)}")


def check_head(op: str, latent: Tensor, w2: Tensor) -> None:
    """Refuse a head whose input and W2 differ in dtype: a matrix product takes one."""
    if latent.dtype != w2.dtype:
        short = [str(x.dtype).removeprefix("torch.") for x in (latent, w2)]
        raise ConfigError(f"{op}: latent is {short[0]} and w2 {short[1]}; let the head give its latent in {short[1]}")


def check_keys(op: str, keys: Tensor) -> None:
    """Refuse row keys that are not halves of 64-bit words."""
    if keys.dtype != torch.int32:
        raise ConfigError(
            f"{op}: keys must be int32 halves of row keys (dspark.ops.noise.key_halves), got {keys.dtype}"
        )
