"""The operation ``reject_sample``: which drafts of each request are accepted, and the token after them.

The rows of a request in the target's logits are ``starts[r] + k``, k = 0..lens[r]: the law p of the token after its
first k drafts, through temperature, top-k, top-p and min-p. What happens is the mode's (METHOD section 1, step 5):

- *rejection*: draft x at k is accepted while ``uniforms[r, k] < p(x) / q(x)``. The token after is drawn from (p - q)+
  where a draft was rejected, else from p, as the argmax of its logarithm plus the noise of ``keys[r, k]``, k being the
  number of accepted drafts. Where p - q leaves nothing, it is drawn from p.
- *coupled*: the target's token is argmax(log p + noise of ``keys[r, k]``); a draft is accepted while it equals it.
- *greedy*: the same without noise.

q is the law that ``bias_sample`` drew from, known by what that was given (:class:`Law`) and recomputed where it is
needed, or a point mass. Equal scores go to the lowest id. A row without a finite largest score ends its request there,
with log-probability NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dspark.errors import ConfigError
from dspark.ops import noise
from dspark.ops.bias_sample import below, biased_logits, check_head, check_keys, check_shapes, log_sum_exp

OP = "reject_sample"
GREEDY, REJECTION, COUPLED = 0, 1, 2
"""Modes of a row."""


@dataclass(frozen=True, slots=True)
class Law:
    """What a block was drawn from by ``bias_sample``, D rows and G positions.

    Attributes:
        base: base logits [G, D, Vd], or [G, D, K] of each row's candidates.
        lse: log-sum-exp that came with each draw, [G, D] float64.
        temperature: [D] float32; a row of 0 took the argmax, and is a point mass at its draft.
        latent, w2: inputs of the head [G, D, r] and W2 [Vd, r]; None for no head.
        columns: draft column of each target id, [V] int32, -1 where there is none; None where they are the same.
        candidates: draft ids of the columns, [G, D, K], different within a row; None for all.
        names: target ids of the candidates, [G, D, K]; None where they are the same.
    """

    base: Tensor
    lse: Tensor
    temperature: Tensor
    latent: Tensor | None = None
    w2: Tensor | None = None
    columns: Tensor | None = None
    candidates: Tensor | None = None
    names: Tensor | None = None

    def probs(self, rows: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
        """q over target ids at n (row, position) pairs, [n, V] float32; of rows with a temperature."""
        latent = None if self.latent is None else self.latent[positions, rows]
        ids = None if self.candidates is None else self.candidates[positions, rows]
        warmth = self.temperature[rows].unsqueeze(1)
        scores = biased_logits(self.base[positions, rows], latent, self.w2, ids) / torch.where(warmth == 0, 1.0, warmth)
        q = torch.exp(below(scores, self.lse[positions, rows]))
        if ids is not None:
            names = ids if self.names is None else self.names[positions, rows]
            wide = q.new_zeros(len(q), vocab_size + 1)  # the last column takes what the target does not have
            return wide.scatter_(1, names.to(torch.int64).clamp(max=vocab_size), q)[:, :vocab_size]
        if self.columns is not None:
            known = self.columns.clamp(min=0).to(torch.int64)
            return torch.where(self.columns >= 0, q[:, known], 0.0)
        if q.shape[1] < vocab_size:
            return torch.nn.functional.pad(q, (0, vocab_size - q.shape[1]))
        return q[:, :vocab_size]


@dataclass(frozen=True, slots=True)
class Settings:
    """Each request's warpers, [R]: temperature float32, top_k int32 (0: off), top_p (1: off), min_p (0: off) float32.

    Greedy rows take none. ``masked`` says that some row has more than a temperature.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    masked: bool = True


class Decided(NamedTuple):
    """Accepted drafts [R] int64, the token after them [R] int64, its log-probability under what it was drawn from [R]
    float32, and each draft's chance of acceptance [R, G] float32 (of coupled and greedy rows, whether it agreed); 0
    from the first rejected one's successor on."""

    accepted: Tensor
    token: Tensor
    log_prob: Tensor
    chance: Tensor


def masked_scores(logits: Tensor, settings: Settings | None, rows: Tensor, greedy: Tensor) -> Tensor:
    """Scores [n, V] float32 of logits [n, V] that belong to the requests ``rows`` [n]; -inf where a warper masks."""
    scores = logits.to(torch.float32)
    if settings is None:
        return scores
    off = greedy.unsqueeze(1)
    scores = torch.where(off, scores, scores / torch.where(greedy, 1.0, settings.temperature[rows]).unsqueeze(1))
    if not settings.masked:
        return scores
    kept = torch.where(off, scores, _masked(scores, *(x[rows] for x in (settings.top_k, settings.top_p))))
    share = torch.exp(kept - scores.amax(-1, keepdim=True))
    low = share < settings.min_p[rows].unsqueeze(1)
    return torch.where(low & ~off, -math.inf, kept)


def _masked(scores: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Top-k, then top-p: ascending by score, then id, what leaves at least 1 - top_p behind goes; the last stays."""
    width = scores.shape[1]
    ordered, index = torch.sort(scores, dim=-1, stable=True)
    count = torch.where((top_k > 0) & (top_k < width), top_k, width).to(torch.int64)
    kth = ordered.gather(1, (width - count).unsqueeze(1))
    weight = torch.exp((ordered - ordered[:, -1:]).to(torch.float64)).masked_fill(ordered < kth, 0.0)
    limit = (1.0 - top_p.to(torch.float64)).unsqueeze(1) * weight.sum(-1, keepdim=True)
    gone = (weight.cumsum(-1) <= limit) & (top_p < 1.0).unsqueeze(1)
    gone[:, -1] = False
    gone |= ordered < kth
    return scores.masked_fill(torch.empty_like(gone).scatter_(1, index, gone), -math.inf)


def reference(
    logits: Tensor,
    starts: Tensor,
    lens: Tensor,
    drafts: Tensor,
    mode: Tensor,
    uniforms: Tensor,
    keys: Tensor,
    log_q: Tensor | None = None,
    law: Law | None = None,
    draft_rows: Tensor | None = None,
    settings: Settings | None = None,
    gumbel: Tensor | None = None,
) -> Decided:
    """The operation in plain torch.

    Args:
        logits: [N, V]; bfloat16, float16 or float32.
        starts, lens: each request's first row and number of drafts to verify, [R]; ``starts`` rise.
        drafts: drafted target ids, [R, G].
        mode: GREEDY, REJECTION or COUPLED, [R].
        uniforms: in [0, 1), [R, G] float64.
        keys: halves of the row keys, [R, G + 1, 2] int32.
        log_q: log q of the drafted tokens, [R, G] float32; None for point masses.
        law: where ``log_q`` comes from; needed with it.
        draft_rows: the request's row in ``law``, [R]; None where they are the same.
        settings: warpers; None where the logits have passed them.
        gumbel: noise [N, V] in place of the keys'.

    Returns:
        See :class:`Decided`.
    """
    check(logits, starts, lens, drafts, mode, uniforms, keys, log_q, law, draft_rows, settings, gumbel)
    count, width = drafts.shape
    everyone = torch.arange(count, device=logits.device)
    greedy, exact = mode == GREEDY, mode != REJECTION
    log_q = torch.zeros_like(uniforms, dtype=torch.float32) if log_q is None else log_q
    accepted = torch.zeros(count, dtype=torch.int64, device=logits.device)
    token, log_prob = torch.zeros_like(accepted), torch.full((count,), math.nan, device=logits.device)
    chance = torch.zeros(count, width, device=logits.device)
    alive = torch.ones(count, dtype=torch.bool, device=logits.device)
    for k in range(width + 1):
        row = (starts + k).clamp(max=len(logits) - 1).to(torch.int64)
        scores = masked_scores(logits[row], settings, everyone, greedy)
        log_p = torch.where(torch.isfinite(scores.amax(-1, keepdim=True)), below(scores, log_sum_exp(scores)), math.nan)
        drawn = noise.gumbel_of_bits(noise.bits_of_halves(keys[:, k], _ids(logits))) if gumbel is None else gumbel[row]
        own = torch.argmax(scores + torch.where(greedy.unsqueeze(1), 0.0, drawn), dim=-1)
        last = lens == k
        stays = torch.zeros_like(alive)
        ends = log_p
        if k < width:
            draft = drafts[:, k].clamp(0, logits.shape[1] - 1)
            ratio = torch.exp(log_p.gather(1, draft.unsqueeze(1)).squeeze(1) - log_q[:, k]).clamp(max=1.0)
            ratio = torch.where(exact, (own == draft).to(torch.float32), ratio)
            open_ = alive & ~last
            chance[:, k] = torch.where(open_, ratio, chance[:, k])
            stays = open_ & torch.where(exact, ratio > 0, uniforms[:, k] < ratio.to(torch.float64))
            ends = torch.where((last | exact).unsqueeze(1), log_p, _rest(log_p, draft, law, draft_rows, everyone, k))
        done = alive & ~stays
        best = torch.where(exact, own, torch.argmax(ends + drawn, dim=-1))
        token = torch.where(done, best, token)
        log_prob = torch.where(done, ends.gather(1, best.unsqueeze(1)).squeeze(1), log_prob)
        accepted = torch.where(stays, k + 1, accepted)
        alive = stays
    return Decided(accepted, token, log_prob, chance)


def _rest(log_p: Tensor, draft: Tensor, law: Law | None, rows: Tensor | None, everyone: Tensor, k: int) -> Tensor:
    """log of (p - q)+ normalised, [R, V]; log p where nothing is left."""
    p = torch.exp(log_p)
    q = torch.zeros_like(p).scatter_(1, draft.unsqueeze(1), 1.0)
    if law is not None:
        own = everyone if rows is None else rows.to(torch.int64)
        drawn = law.probs(own, torch.full_like(own, min(k, len(law.base) - 1)), p.shape[1])
        q = torch.where((law.temperature[own] == 0).unsqueeze(1), q, drawn)
    rest = (p - q).clamp_(min=0.0)
    mass = rest.sum(-1, keepdim=True)
    return torch.where(mass > 0, torch.log(rest) - torch.log(mass), log_p)


def _ids(logits: Tensor) -> Tensor:
    return torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)


def check(
    logits: Tensor,
    starts: Tensor,
    lens: Tensor,
    drafts: Tensor,
    mode: Tensor,
    uniforms: Tensor,
    keys: Tensor,
    log_q: Tensor | None,
    law: Law | None,
    draft_rows: Tensor | None,
    settings: Settings | None,
    gumbel: Tensor | None,
) -> None:
    """Refuse shapes and dtypes that do not fit each other.

    Raises:
        ConfigError: naming the first argument that does not.
    """
    if logits.dim() != 2 or drafts.dim() != 2:
        raise ConfigError(f"{OP}: expected logits [N, V] and drafts [R, G], got {logits.shape} and {drafts.shape}")
    rows, width = drafts.shape
    wanted: list[tuple[str, Tensor | None, tuple[int, ...]]] = [
        ("starts", starts, (rows,)),
        ("lens", lens, (rows,)),
        ("mode", mode, (rows,)),
        ("uniforms", uniforms, (rows, width)),
        ("keys", keys, (rows, width + 1, 2)),
        ("log_q", log_q, (rows, width)),
        ("draft_rows", draft_rows, (rows,)),
        ("gumbel", gumbel, tuple(logits.shape)),
    ]
    if settings is not None:
        for name in ("temperature", "top_k", "top_p", "min_p"):
            wanted.append((f"settings.{name}", getattr(settings, name), (rows,)))
    if law is not None:
        if log_q is None:
            raise ConfigError(f"{OP}: a law needs the log q of the drafted tokens")
        wanted += _head_shapes(law)
        wanted.append(("law.lse", law.lse, tuple(law.base.shape[:2])))
        wanted.append(("law.temperature", law.temperature, tuple(law.base.shape[1:2])))
        wanted.append(("law.columns", law.columns, (logits.shape[1],)))
        wanted.append(("law.candidates", law.candidates, tuple(law.base.shape)))
        wanted.append(("law.names", law.names, tuple(law.base.shape)))
        if law.candidates is None and law.names is not None:
            raise ConfigError(f"{OP}: law.names are those of law.candidates")
    elif log_q is not None:
        raise ConfigError(f"{OP}: log_q needs the law that it comes from")
    check_shapes(OP, wanted)
    check_keys(OP, keys)


def _head_shapes(law: Law) -> list[tuple[str, Tensor | None, tuple[int, ...]]]:
    """What the head of a law has to be: latent [G, D, r], and W2 [Vd, r]."""
    if law.base.dim() != 3:
        raise ConfigError(f"{OP}: law.base must be [G, D, Vd], got {list(law.base.shape)}")
    if (law.latent is None) != (law.w2 is None):
        raise ConfigError(f"{OP}: law.latent and law.w2 belong together")
    if law.latent is None or law.w2 is None:
        return []
    check_head(OP, law.latent, law.w2)
    rank = int(law.w2.shape[1])
    wanted: list[tuple[str, Tensor | None, tuple[int, ...]]] = [("law.latent", law.latent, (*law.base.shape[:2], rank))]
    if law.candidates is None:
        wanted.append(("law.w2", law.w2, (int(law.base.shape[2]), rank)))
    return wanted
