"""Requests' warpers as the operation ``reject_sample`` takes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.config import SamplingParams
from dspark.ops.reject_sample import Settings, masked_scores
from dspark.sampling.warpers import needs_warpers


def settings_of(params: Sequence[SamplingParams], device: torch.device | str) -> Settings | None:
    """Temperature, top-k, top-p and min-p of R sampled requests, in one transfer; None where none does anything.

    A top-k beyond 2**24 is one of 2**24, larger than any vocabulary.
    """
    if not any(needs_warpers(p) for p in params):
        return None
    masked = any(p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0 for p in params)
    rows = [(p.temperature, float(min(p.top_k, 1 << 24)), p.top_p, p.min_p) for p in params]
    table = torch.tensor(rows, dtype=torch.float32).T.contiguous().to(device)
    return Settings(table[0], table[1].to(torch.int32), table[2], table[3], masked)


def masked(scores: Tensor, params: SamplingParams) -> Tensor:
    """One request's scores [n, V] as the operation decides from them, float32; -inf where a warper masks."""
    settings = settings_of([params], scores.device)
    owner = torch.zeros(len(scores), dtype=torch.int64, device=scores.device)
    return masked_scores(scores, settings, owner, torch.zeros(len(scores), dtype=torch.bool, device=scores.device))
