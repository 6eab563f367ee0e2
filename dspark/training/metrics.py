"""What a run tells about itself: losses, and acceptance by position."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dspark.training.model import Result

_SUMS = ("blocks", "ce", "ce_count", "confidence", "whole", "length", "greedy_length")
_BY_POSITION = ("offered", "accepted", "matched")


class Tally:
    """Sums over blocks, in one float64 vector, so that processes can add theirs up.

    ``accepted`` sums 1 - TV / 2, what rejection sampling at T = 1 would accept after the true prefix; ``matched``
    counts where the draft's and the target's most likely tokens agree. ``length`` sums over blocks whose labels all
    count the accepted length that follows, 1 + sum_k prod_{i<=k} accepted_i, ``greedy_length`` the same of matches.
    """

    def __init__(self, gamma: int) -> None:
        self.gamma = gamma
        self.sums = torch.zeros(len(_SUMS) + len(_BY_POSITION) * gamma, dtype=torch.float64)

    def __getattr__(self, name: str) -> Any:
        if name in _SUMS:
            return float(self.sums[_SUMS.index(name)])
        if name in _BY_POSITION:
            start = len(_SUMS) + _BY_POSITION.index(name) * self.gamma
            return self.sums[start : start + self.gamma]
        raise AttributeError(name)

    def add(self, result: Result, valid: Tensor, known: Tensor, likely: Tensor) -> None:
        """Count the blocks of one forward.

        Args:
            valid: labels that count, bool [A, gamma].
            known: of these, those that the draft vocabulary has.
            likely: draft id of the target's most likely token, -1 where it has none, [A, gamma].
        """
        accept = (1.0 - result.tv / 2).clamp(0.0, 1.0).double() * valid
        match = ((result.best == likely) & valid).double()
        error = torch.zeros((), dtype=torch.float64, device=accept.device)
        if result.confidence is not None:
            error = ((result.confidence.double().sigmoid() - accept).abs() * valid).sum()
        whole = valid.all(1)
        one = torch.ones((), dtype=torch.float64, device=accept.device)
        values = [
            one * len(valid),
            (result.ce * known).sum().double(),
            known.sum().double(),
            error,
            whole.sum().double(),
            (1 + accept[whole].cumprod(1).sum(1)).sum(),
            (1 + match[whole].cumprod(1).sum(1)).sum(),
        ]
        rows = [valid.sum(0).double(), accept.sum(0), match.sum(0)]
        self.sums += torch.cat([torch.stack(values), *rows]).detach().cpu()

    def summary(self) -> dict[str, Any]:
        """Means, as plain values."""
        offered = self.offered.clamp(min=1)
        total = float(offered.sum())
        return {
            "blocks": int(self.blocks),
            "ce": self.ce / max(self.ce_count, 1),
            "tv": 2 * (1 - float(self.accepted.sum()) / total),
            "confidence_error": self.confidence / total,
            "accept": [round(float(x), 4) for x in self.accepted / offered],
            "match": [round(float(x), 4) for x in self.matched / offered],
            "accepted_length": self.length / max(self.whole, 1),
            "greedy_length": self.greedy_length / max(self.whole, 1),
        }
