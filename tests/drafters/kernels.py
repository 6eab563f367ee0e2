"""Cells of the exact matrix whose drafts and decisions go through ``bias_sample`` and ``reject_sample``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dspark.engine.engine import Engine
from dspark.ops.dispatch import Choice
from dspark.testing import law, total_variation
from dspark.types import Mode
from dspark.verifiers.coupled import CoupledVerifier
from dspark.verifiers.greedy import GreedyVerifier
from dspark.verifiers.rejection import RejectionVerifier
from tests.drafters.exact import PROMPT, TOKENS, Cell, Draws, wanted
from tests.exactness.harness import decode

Kernel = Callable[..., Any]


class Remembered:
    """An operation that is asked the same thing once: what it says is a function of its arguments.

    Attributes:
        calls, asked: how often it was called, and how often it had to be run.
    """

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.known = kernel, dict[Any, Any]()
        self.calls = 0

    @property
    def asked(self) -> int:
        return len(self.known)

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        key = _key(arguments)
        if key not in self.known:
            self.known[key] = self.kernel(*arguments)
        return self.known[key]


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), str(value.dtype), value.contiguous().numpy().tobytes()
    if isinstance(value, tuple):
        return tuple(_key(v) for v in value)
    fields = getattr(value, "__dataclass_fields__", None)
    return value if fields is None else tuple(_key(getattr(value, name)) for name in fields)


@dataclass(frozen=True)
class KernelCell(Cell):
    """A cell with kernels; None leaves an operation to the engine's own code."""

    bias_sample: Kernel | None = None
    reject_sample: Kernel | None = None

    def engine(self, draws: Any, scheduler: Any = None, observers: Sequence[Any] = ()) -> Engine:
        made = super().engine(draws, scheduler, observers)
        parts = made.parts
        calls = {"bias_sample": self.bias_sample, "reject_sample": self.reject_sample}
        parts.kernels = {op: Choice(op, "cpu", "float64", op, "a test's", call) for op, call in calls.items()}
        parts.verifiers = {
            Mode.GREEDY: GreedyVerifier(self.reject_sample),
            Mode.REJECTION: RejectionVerifier(self.reject_sample),
            Mode.COUPLED: CoupledVerifier(self.reject_sample),
        }
        return made


def distance(cell: Cell, tokens: int = TOKENS) -> float:
    """TV to the target of so many tokens after PROMPT, every draw branched on."""

    def program(draws: Any) -> tuple[int, ...]:
        made = cell.engine(Draws(draws, len(PROMPT) + tokens))
        return decode(made, [(PROMPT, cell.params(tokens, 1))])[0]

    return total_variation(law(program), wanted(cell.sampling, (), tokens))
