"""Which tensor went wrong first, when a loss or a gradient is no number any more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dspark.training.objective import Objective, trained
from dspark.training.sources import Source


@torch.no_grad()
def first_fault(objective: Objective, source: Source, forwards: Sequence[tuple[Sequence[int], Any]]) -> str | None:
    """The first tensor that is not finite, in words; None where all are.

    Looked at in the order of computation: the target's features, the weights, the forward, the gradients.

    Args:
        forwards: (numbers of the samples, plan) of each forward of the step.
    """
    for numbers, _ in forwards:
        for number, features in zip(numbers, source.features(numbers), strict=True):
            for name in ("taps", "last", "lse"):
                if _bad(getattr(features, name)):
                    return f"the target's {name} of the conversation in line {source.sample(number).line + 1}"
    weights = trained(objective.drafter)
    for name, parameter in weights.items():
        if _bad(parameter):
            return f"weight {name}"
    for numbers, plan in forwards:
        for name, tensor in objective.trace(plan, source.features(numbers)):
            if _bad(tensor):
                return name
    for name, parameter in weights.items():
        if parameter.grad is not None and _bad(parameter.grad):
            return f"gradient of {name}"
    return None


def _bad(tensor: Tensor) -> bool:
    return not bool(torch.isfinite(tensor).all())
