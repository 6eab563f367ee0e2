"""The losses of teacher-forced drafts (METHOD section 5), value and gradient in one pass over the vocabulary.

With p the draft's law and t the target's at one position, both over the draft vocabulary, and y the true token:

    CE = -log p(y), or against the whole law -sum_v t(v) log p(v)
    TV = sum_v |p(v) - t(v)| + (1 - sum_v t(v))

The last term is the target's mass outside a pruned vocabulary, where p is zero. TV is the paper's ||p_d - p_t||_1,
twice the total variation; a position's acceptance is 1 - TV / 2 (eq. 8).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 16
"""Positions that are worked on at once on a CPU: what they need stays in a core's second-level cache."""


@dataclass(frozen=True, slots=True)
class Losses:
    """Losses of N positions.

    Attributes:
        total: the weighted sum, differentiable in the logits.
        ce, tv: of each position, [N], detached.
        best: the most likely draft id, [N].
    """

    total: Tensor
    ce: Tensor
    tv: Tensor
    best: Tensor


def draft_losses(
    logits: Tensor, log_teacher: Tensor, labels: Tensor | None, ce_scale: Tensor, tv_scale: Tensor
) -> Losses:
    """sum_n (ce_scale[n] * CE[n] + tv_scale[n] * TV[n]) over N positions, and each of them.

    Args:
        logits: corrected draft logits [N, Vd].
        log_teacher: log t over the draft vocabulary, [N, Vd]; its mass may be below 1.
        labels: y as draft ids, [N]; -1 for a token outside the draft vocabulary, whose CE is 0 whatever its scale.
            None for the CE against t.
        ce_scale, tv_scale: factors, [N].
    """
    return Losses(*_Rows.apply(logits, log_teacher, labels, ce_scale, tv_scale))


class _Rows(torch.autograd.Function):
    """The gradient is made while the probabilities are at hand, so that they are computed once and never kept."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, log_teacher: Tensor, labels: Tensor | None, ce_scale: Tensor, tv_scale: Tensor
    ) -> tuple[Tensor, ...]:
        if labels is not None:
            ce_scale = ce_scale * (labels >= 0)
        count, accurate = len(logits), torch.float64 if logits.dtype == torch.float64 else torch.float32
        ce, tv = (torch.empty(count, dtype=accurate, device=logits.device) for _ in range(2))
        best = torch.empty(count, dtype=torch.int64, device=logits.device)
        grad = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        rows = ROWS if logits.device.type == "cpu" else max(count, 1)
        for start in range(0, count, rows):
            at = slice(start, start + rows)
            z, t = logits[at].to(accurate), log_teacher[at].to(accurate).exp()
            y = None if labels is None else labels[at]
            ce[at], tv[at], best[at], g = _part(z, t, y, ce_scale[at], tv_scale[at], grad is not None)
            if grad is not None and g is not None:
                grad[at] = g
        if grad is not None:
            ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(ce, tv, best)
        return (ce * ce_scale).sum() + (tv * tv_scale).sum(), ce, tv, best

    @staticmethod
    def backward(ctx: Any, *outer: Any) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return grad * outer[0].to(grad.dtype), None, None, None, None


def _part(
    z: Tensor, t: Tensor, labels: Tensor | None, ce_scale: Tensor, tv_scale: Tensor, with_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """CE, TV, most likely id [n] and gradient [n, Vd] of some positions; t is overwritten where labels are given."""
    top, best = z.max(-1, keepdim=True)
    z = z - top
    mass = t.sum(-1, keepdim=True)
    y = None if labels is None else labels.clamp(min=0).unsqueeze(1)
    chosen = (t * z).sum(-1) if y is None else z.gather(1, y).squeeze(1)
    p = z.exp_()
    total = p.sum(-1, keepdim=True)
    p.div_(total)
    share = mass if y is None else torch.ones_like(mass)
    ce = share.squeeze(1) * total.squeeze(1).log() - chosen
    if labels is not None:
        ce = torch.where(labels >= 0, ce, 0.0)
    d = p - t if y is None else torch.sub(p, t, out=t)
    tv = d.abs().sum(-1) + (1.0 - mass.squeeze(1)).clamp(min=0.0)
    if not with_grad:
        return ce, tv, best.squeeze(1), None
    # d TV / d z = p * (s - <p, s>) with s = sign(p - t); d CE / d z = share * p - (onehot(y) or t).
    a, b = ce_scale.unsqueeze(1).to(z.dtype), tv_scale.unsqueeze(1).to(z.dtype)
    sign = d.sign_()
    inner = torch.linalg.vecdot(p, sign).unsqueeze(1)
    grad = sign.mul_(b).add_(a * share - b * inner).mul_(p)
    if y is None:
        grad.sub_(t * a)
    else:
        grad.scatter_add_(1, y, -a)
    return ce, tv, best.squeeze(1), grad


def confidence_loss(logits: Tensor, acceptance: Tensor, scale: Tensor) -> Tensor:
    """sum_n scale[n] * BCE(sigmoid(logits[n]), acceptance[n]); the acceptance 1 - TV / 2 is a constant (eq. 8)."""
    each = F.binary_cross_entropy_with_logits(logits, acceptance.detach().clamp(0.0, 1.0), reduction="none")
    return (each * scale).sum()


def decay_weights(gamma: int, decay: float | None, device: Any = None) -> Tensor:
    """w_k = exp(-k / decay), k from 0, [gamma] float32; ones for None."""
    steps = torch.arange(gamma, dtype=torch.float32, device=device)
    return torch.ones_like(steps) if decay is None else torch.exp(-steps / decay)
