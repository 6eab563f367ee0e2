"""Log-probabilities of the target, for accepted, corrected and bonus tokens alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.ops import reference


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of one committed token.

    Attributes:
        token_id: the token.
        logprob: its log-probability (natural logarithm).
        top: (token id, log-probability) of the most likely ones, by falling probability, then rising id.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def token_logprobs(scores: Tensor, token_ids: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Log-probabilities under ``scores`` [n, V] (raw or processed logits) of the n chosen tokens.

    Args:
        scores: row i is the law that token i was decided from.
        token_ids: n tokens.
        top: how many of the most likely to list.
    """
    if not token_ids:
        return []
    ids = torch.tensor(list(token_ids), dtype=torch.int64, device=scores.device)
    chosen, best_ids, best = (t.tolist() for t in reference.token_logprobs(scores[: len(token_ids)], ids, top))
    return [
        TokenLogprobs(token, value, tuple(zip(row_ids, row, strict=True)))
        for token, value, row_ids, row in zip(token_ids, chosen, best_ids, best, strict=True)
    ]
