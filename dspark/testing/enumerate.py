"""Exact output laws: every random decision is a branch, and every branch is run.

``law(f)`` calls ``f(draws)`` once for each way that the draws can fall, from the start each time, so ``f`` may be any
program: a verifier, a round, a whole engine. The weight of a run is the product of the probabilities of its branches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from dspark.errors import DSparkError
from dspark.types import BoolArray, DrawKeys, IntArray, KeyArray

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T", bound=Hashable)

Key = tuple[int, int, int, int]
"""(request key, anchor position, offset, purpose)."""


class EnumerationError(DSparkError, AssertionError):
    """The program under enumeration broke a rule: a key used twice, a law that does not sum to 1, too many runs."""


@dataclass(slots=True)
class _Choice:
    """A decision with more than one possible outcome."""

    key: Key
    outcomes: tuple[int, ...]
    probs: tuple[float, ...]
    taken: int = 0


class ScriptedDraws:
    """A draw source that follows a script of choices and extends it with first outcomes where it ends.

    Attributes:
        weight: probability of the run so far.
        lost: mass of the outcomes that were skipped as impossible (at most ``tiny`` each).
        keys: every key drawn with, in order.
    """

    def __init__(self, script: Sequence[_Choice] = (), *, tiny: float = 1e-16, tolerance: float = 1e-9) -> None:
        self.trail: list[_Choice] = list(script)
        self.keys: list[Key] = []
        self.weight = 1.0
        self.lost = 0.0
        self._seen: set[Key] = set()
        self._depth = 0
        self._tiny = tiny
        self._tolerance = tolerance

    def categorical(self, keys: DrawKeys, probs: Tensor) -> Tensor:
        """One branch for each token of positive probability, row by row: probs [n, V] -> ids [n] int64."""
        import torch

        if probs.ndim != 2 or probs.shape[0] != len(keys):
            raise EnumerationError(f"categorical: {len(keys)} keys, but probs of shape {tuple(probs.shape)}")
        table = probs.detach().double().cpu().tolist()
        picks = [self._decide(key, row) for key, row in zip(_key_tuples(keys), table, strict=True)]
        return torch.tensor(picks, dtype=torch.int64, device=probs.device)

    def accept(self, keys: DrawKeys, probs: Tensor) -> BoolArray:
        """Two branches a row, fewer where the probability is 0 or 1: probs [n] -> bool [n]."""
        values = np.asarray(probs.detach().double().cpu() if hasattr(probs, "detach") else probs, dtype=np.float64)
        if values.shape != (len(keys),):
            raise EnumerationError(f"accept: {len(keys)} keys, but probs of shape {values.shape}")
        picks = [self._decide(key, (1.0 - p, p)) for key, p in zip(_key_tuples(keys), values.tolist(), strict=True)]
        return np.array(picks, dtype=np.bool_)

    def gumbel(self, seeds: KeyArray, positions: IntArray, vocab_size: int, token_ids: Tensor | None = None) -> Tensor:
        """Refused: noise has no finite law. ``coupled`` is tested path by path with :class:`TableNoise`."""
        raise EnumerationError("gumbel noise can't be enumerated; use TableNoise for the coupled verifier")

    def _decide(self, key: Key, probs: Sequence[float]) -> int:
        if key in self._seen:
            raise EnumerationError(f"draw key used twice: request, anchor, offset, purpose = {key}")
        self._seen.add(key)
        self.keys.append(key)
        total = sum(probs)
        if not abs(total - 1.0) <= self._tolerance or min(probs) < 0.0:
            raise EnumerationError(f"draw {key}: not a law: {list(probs)} (sum {total!r})")
        likely = [(i, p) for i, p in enumerate(probs) if p > self._tiny]
        if len(likely) == 1:
            self.weight *= likely[0][1]
            return likely[0][0]
        if self._depth == len(self.trail):
            self.trail.append(_Choice(key, tuple(i for i, _ in likely), tuple(p for _, p in likely)))
        choice = self.trail[self._depth]
        if choice.key != key or choice.outcomes != tuple(i for i, _ in likely):
            raise EnumerationError(f"the program is not a function of its draws: met {key} where it met {choice.key}")
        self._depth += 1
        self.lost += sum(probs) - sum(p for _, p in likely)
        self.weight *= choice.probs[choice.taken]
        return choice.outcomes[choice.taken]


def _key_tuples(keys: DrawKeys) -> list[Key]:
    purpose = int(keys.purpose)
    return [
        (int(request), int(anchor), int(offset), purpose)
        for request, anchor, offset in zip(keys.request, keys.anchor, keys.offset, strict=True)
    ]


def _next_script(trail: list[_Choice]) -> list[_Choice] | None:
    """The next path in depth-first order, or None after the last one."""
    while trail and trail[-1].taken + 1 == len(trail[-1].outcomes):
        trail.pop()
    if not trail:
        return None
    trail[-1].taken += 1
    return trail


def law(program: Callable[[ScriptedDraws], T], *, max_runs: int = 200_000, tolerance: float = 1e-9) -> dict[T, float]:
    """The exact law of ``program(draws)``.

    Args:
        program: a function of its draws alone, called from scratch for each path; returns something hashable.
        max_runs: most paths.
        tolerance: how far from 1 the mass of a single draw, and of the whole law, may be.

    Raises:
        EnumerationError: a key is used twice in a run, a draw's probabilities or the law do not sum to 1, the program
            depends on something other than its draws, or there are more than ``max_runs`` paths.
    """
    result: dict[T, float] = {}
    script: list[_Choice] | None = []
    runs = 0
    while script is not None:
        if runs == max_runs:
            raise EnumerationError(f"more than {max_runs} paths")
        draws = ScriptedDraws(script, tolerance=tolerance)
        outcome = program(draws)
        result[outcome] = result.get(outcome, 0.0) + draws.weight
        script = _next_script(draws.trail)
        runs += 1
    mass = sum(result.values())
    if abs(mass - 1.0) > tolerance:
        raise EnumerationError(f"the law has mass {mass!r} after {runs} paths")
    return result


def total_variation(first: Mapping[T, float], second: Mapping[T, float]) -> float:
    """TV distance: half the sum of absolute differences over all outcomes."""
    outcomes: Iterable[T] = set(first) | set(second)
    return 0.5 * sum(abs(first.get(o, 0.0) - second.get(o, 0.0)) for o in outcomes)


class TableNoise:
    """Noise from a table, for path-by-path tests of ``coupled``.

    Args:
        noise: g of (seed, absolute position, target token id), [S, P, V]; seed s is row s - ``first_seed``.
        first_seed: seed of row 0.
    """

    def __init__(self, noise: Tensor, *, first_seed: int = 0) -> None:
        self.noise = noise
        self.first_seed = first_seed

    def categorical(self, keys: DrawKeys, probs: Tensor) -> Tensor:
        """Refused: a coupled or greedy request draws nothing but noise."""
        raise EnumerationError("coupled rows must not draw tokens")

    def accept(self, keys: DrawKeys, probs: Tensor) -> BoolArray:
        """Refused: a coupled or greedy request draws nothing but noise."""
        raise EnumerationError("coupled rows must not draw acceptances")

    def gumbel(self, seeds: KeyArray, positions: IntArray, vocab_size: int, token_ids: Tensor | None = None) -> Tensor:
        """Rows of the table: [n, V], or [n, m] for ``token_ids``, [m] or [n, m]."""
        import torch

        if vocab_size > self.noise.shape[2]:
            raise EnumerationError(f"noise for {vocab_size} tokens asked of a table of {self.noise.shape[2]}")
        rows = torch.from_numpy((np.asarray(seeds, dtype=np.uint64) - np.uint64(self.first_seed)).astype(np.int64))
        table = self.noise[rows, torch.from_numpy(np.asarray(positions, dtype=np.int64))]
        if token_ids is None:
            return table[:, :vocab_size]
        return table[:, token_ids] if token_ids.dim() == 1 else table.gather(1, token_ids)
