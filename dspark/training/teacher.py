"""The target's law over the draft vocabulary, from its cached final hidden state and log-sum-exp."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

EXTRA = 32
"""Columns that carry the log-sum-exp through the matrix product: a multiple of what matrix units take."""


class Teacher:
    """log t over some rows of the target's head; exact over any part of the vocabulary, since the sum is over it all.

    In bfloat16 the log-sum-exp is subtracted inside the matrix product, in three summands: what is rounded is then
    log t, whose likely values are near 0, and not a logit of twenty.

    Args:
        head: rows of the target's output head, [Vd, d].
        softcap: of the target's logits.
    """

    def __init__(self, head: Tensor, softcap: float | None = None) -> None:
        self.softcap = softcap
        self.inside = head.dtype == torch.bfloat16 and softcap is None
        self.head = torch.cat([head, head.new_ones(len(head), EXTRA)], dim=1) if self.inside else head

    def log_probs(self, hidden: Tensor, log_sum_exp: Tensor) -> Tensor:
        """log t [N, Vd] from final hidden states [N, d] (behind the final norm) and log-sum-exps [N]."""
        hidden = hidden.to(self.head.dtype)
        if not self.inside:
            logits = F.linear(hidden, self.head)
            if self.softcap is not None:
                logits = torch.tanh(logits / self.softcap) * self.softcap
            return logits - log_sum_exp.to(logits.dtype).unsqueeze(1)
        rest, parts = log_sum_exp.float(), []
        for _ in range(3):
            parts.append(rest.to(hidden.dtype))
            rest = rest - parts[-1].float()
        pad = hidden.new_zeros(len(hidden), EXTRA - len(parts))
        return F.linear(torch.cat([hidden, torch.stack(parts, dim=1).neg(), pad], dim=1), self.head)


def log_sum_exp(
    hidden: Tensor, head: Tensor, softcap: float | None = None, rows: int = 128, logits: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """log sum exp of the target's logits [N] float32, and their argmax [N] int32, over the whole head [V, d].

    In bfloat16 a first product gives the sum to within rounding, and a second one, taken around it, exactly.

    Args:
        logits: [N, V] that the target itself gave: they spare bfloat16 the first product.
    """
    plain = Teacher(head, softcap)
    sums, best = [], []
    for i, part in enumerate(torch.split(hidden, rows)):
        if plain.inside and logits is not None:
            scores = logits[i * rows : i * rows + len(part)]
        else:
            scores = plain.log_probs(part, part.new_zeros(len(part), dtype=torch.float32))
        total = torch.logsumexp(scores.float(), dim=-1)
        if plain.inside:
            scores = plain.log_probs(part, total)
            total = total + torch.logsumexp(scores.float(), dim=-1)
        sums.append(total)
        best.append(scores.argmax(-1).int())
    if not sums:
        return hidden.new_zeros(0, dtype=torch.float32), hidden.new_zeros(0, dtype=torch.int32)
    return torch.cat(sums), torch.cat(best)
