"""A round of speculative decoding in plain Python, apart from the engine: the measure for the kit itself.

Laws are lists of floats, requests are lists of ids. Written from METHOD sections 1 and 4 alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dspark.testing.cheats import schedule_input
from dspark.types import DrawKeys, Purpose

Law = Callable[[Sequence[int]], list[float]]


def draw(draws: Any, request: int, anchor: int, offset: int, purpose: Purpose, law: Sequence[float]) -> int:
    return int(draws.categorical(_key(request, anchor, offset, purpose), torch.tensor([law], dtype=torch.float64))[0])


def accept(draws: Any, request: int, anchor: int, offset: int, p: float) -> bool:
    key = _key(request, anchor, offset, Purpose.ACCEPT)
    return bool(draws.accept(key, torch.tensor([p], dtype=torch.float64))[0])


def _key(request: int, anchor: int, offset: int, purpose: Purpose) -> DrawKeys:
    return DrawKeys(np.array([request], dtype=np.uint64), np.array([anchor]), np.array([offset]), purpose)


@dataclass
class Model:
    """R requests decoded together by *rejection* until each has ``tokens`` new ids.

    Attributes:
        target, drafter: law of the next token after a list of ids.
        confidence: c_k of (k, token before x_k).
        scheduler: with ``plan``.
    """

    target: Law
    drafter: Law
    confidence: Callable[[int, int], float]
    scheduler: Any
    gamma: int
    tokens: int
    prompts: Sequence[Sequence[int]] = field(default_factory=lambda: [[0]])

    def run(self, draws: Any) -> tuple[tuple[int, ...], ...]:
        rows = [list(p) for p in self.prompts]
        ends = [len(p) + self.tokens for p in self.prompts]
        while any(len(r) < end for r, end in zip(rows, ends, strict=True)):
            live = [i for i, r in enumerate(rows) if len(r) < ends[i]]
            limits = [min(self.gamma, ends[i] - len(rows[i]) - 1) for i in live]
            drafts = [self._draft(draws, i, rows[i], n) for i, n in zip(live, limits, strict=True)]
            probs = np.zeros((len(live), self.gamma))
            for row, (i, xs) in enumerate(zip(live, drafts, strict=True)):
                for k in range(len(xs)):
                    probs[row, k] = self.confidence(k, ([rows[i][-1], *xs])[k])
            lens = self.scheduler.plan(schedule_input(probs, max_lens=limits), None).verify_lens
            for i, xs, n in zip(live, drafts, lens, strict=True):
                rows[i] += self._verify(draws, i, rows[i], xs[:n])
        return tuple(tuple(r[len(p) :]) for r, p in zip(rows, self.prompts, strict=True))

    def _draft(self, draws: Any, request: int, ids: list[int], count: int) -> list[int]:
        xs: list[int] = []
        for k in range(count):
            xs.append(draw(draws, request, len(ids) - 1, k, Purpose.DRAFT, self.drafter([*ids, *xs])))
        return xs

    def _verify(self, draws: Any, request: int, ids: list[int], xs: list[int]) -> list[int]:
        anchor = len(ids) - 1
        for k, x in enumerate(xs):
            p, q = self.target([*ids, *xs[:k]]), self.drafter([*ids, *xs[:k]])
            if not accept(draws, request, anchor, k, min(1.0, p[x] / q[x])):
                residual = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
                law = [r / sum(residual) for r in residual]
                return [*xs[:k], draw(draws, request, anchor, k, Purpose.RESIDUAL, law)]
        law = self.target([*ids, *xs])
        return [*xs, draw(draws, request, anchor, len(xs), Purpose.RESIDUAL, law)]


def oracle(target: Law, prompt: Sequence[int], tokens: int) -> dict[tuple[int, ...], float]:
    """The target's law of so many tokens."""
    laws: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(tokens):
        laws = {
            (*out, v): mass * p for out, mass in laws.items() for v, p in enumerate(target([*prompt, *out])) if p > 0
        }
    return laws
