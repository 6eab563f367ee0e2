"""What changes over a run: the learning rate (linear warm-up, then half a cosine), and weights of losses."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from dspark.errors import ConfigError

Schedule = float | Sequence[Sequence[float]]
"""A number, or points (share of the run in 0..1, value) with straight lines between them."""


def learning_rate(step: int, *, lr: float, steps: int, warmup: float, final: float = 0.0) -> float:
    """The rate of step ``step`` (from 0) in a run of ``steps``; it ends at ``final`` x ``lr``.

    As DeepSpec's schedule, whose cosine reaches ``lr`` one step late: the first step after the warm-up is a little
    above it, by 0.03 % in a run of 100 steps. Shorter falls, where that would be much, begin at ``lr``.
    """
    rising = int(steps * warmup)
    if step < rising:
        return lr * (step + 1) / rising
    falling = max(steps - rising, 1)
    top = _cosine(1 / falling) if rising and falling >= 50 else 1.0
    return lr * (final + (1 - final) * _cosine(min((step - rising) / falling, 1.0)) / top)


def _cosine(share: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * share))


def points(value: Schedule, label: str) -> list[tuple[float, float]]:
    """A schedule as points.

    Raises:
        ConfigError: not a number, and not rising points in 0..1.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = [(0.0, float(value))]
    try:
        out = [(float(x), float(y)) for x, y in value]  # type: ignore[union-attr]
    except (TypeError, ValueError) as err:
        raise ConfigError(f"{label}: expected a number or a list of [share of the run, value], got {value!r}") from err
    rising = all(a[0] < b[0] for a, b in itertools.pairwise(out))
    if not out or not rising or not all(0 <= x <= 1 and math.isfinite(y) and y >= 0 for x, y in out):
        raise ConfigError(f"{label}: expected rising shares in 0..1 with values of at least 0, got {value!r}")
    return out


def at(value: Schedule, share: float) -> float:
    """A schedule's value at a share of the run; constant before its first and after its last point."""
    known = points(value, "schedule")
    if share <= known[0][0]:
        return known[0][1]
    for (x0, y0), (x1, y1) in itertools.pairwise(known):
        if share <= x1:
            return y0 + (y1 - y0) * (share - x0) / (x1 - x0)
    return known[-1][1]
