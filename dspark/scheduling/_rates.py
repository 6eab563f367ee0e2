"""What gamma is chosen from: conditional acceptance by position, learned from outcomes, and when it changed.

All of it is history. An outcome is an offered position up to and including the first rejection (METHOD section 4, rule
5). A position that was drafted and not offered, all before it accepted, counts with its confidence in the place of an
outcome: averages over what a scheduler chose to verify would be optimistic about what it did not.
"""

from __future__ import annotations

import math

import numpy as np

from dspark.types import FloatArray

GAMMA_STRENGTH = 16.0
"""Outcomes that the averages over all gammas weigh as much as, as prior of those of one gamma."""
LEAST_JUMP = 0.4
"""A drafter that becomes useful is looked for at this acceptance, at least."""
ODDS = 4.0
"""A change multiplies or divides the odds of a first draft's acceptance by at least this."""


class Sums:
    """Decayed sums of outcomes and of acceptances, [positions] each."""

    __slots__ = ("seen", "won")

    def __init__(self, positions: int) -> None:
        self.seen: FloatArray = np.zeros(positions)
        self.won: FloatArray = np.zeros(positions)

    def add(self, seen: FloatArray, won: FloatArray, memory: float = math.inf) -> None:
        """Forget by, then add, [g] outcomes and acceptances."""
        n = len(seen)
        if n > len(self.seen):
            grow = (0, n - len(self.seen))
            self.seen, self.won = np.pad(self.seen, grow), np.pad(self.won, grow)
        keep = np.exp(-seen / memory)
        self.seen[:n] = self.seen[:n] * keep + seen
        self.won[:n] = self.won[:n] * keep + won

    def clear(self) -> None:
        """Forget everything."""
        self.seen[:] = 0.0
        self.won[:] = 0.0


class Shift:
    """A one-sided CUSUM over acceptances of first drafts: evidence, in nats, that their rate has moved to ``other``.

    Where the evidence falls to 0, what it was gathered from is dropped; so ``sums`` are the outcomes since the likely
    moment of the change.
    """

    def __init__(self, positions: int) -> None:
        self.evidence = 0.0
        self.sums = Sums(positions)

    def add(self, rate: float, other: float, seen: FloatArray, won: FloatArray) -> None:
        """Weigh one round's outcomes: ``seen`` and ``won``, [g], of which the first entry is judged."""
        gained, lost = math.log(other / rate), math.log((1.0 - other) / (1.0 - rate))
        self.evidence += float(won[0]) * gained + float(seen[0] - won[0]) * lost
        if self.evidence <= 0.0:
            self.clear()
        else:
            self.sums.add(seen, won)

    def clear(self) -> None:
        """Begin anew."""
        self.evidence = 0.0
        self.sums.clear()


class Rates:
    """Conditional acceptance of one group of rows, over all gammas and by gamma.

    Each level is the prior of the next: the configured mean, then the position before, then the averages over all
    gammas. So a position that was never reached is expected to do as the last one that was.

    Args:
        positions: longest block.
        prior: acceptance of a first draft before anything was seen, and the outcomes that it weighs as much as.
        memory: outcomes after which an older one weighs 1/e.
        alarm: evidence of a change, in nats, at which all older outcomes are forgotten.

    Attributes:
        changes: how often a change was found.
        filled: share of the rows that were asked and drafted something.
    """

    def __init__(self, positions: int, prior: tuple[float, float], memory: float, alarm: float) -> None:
        self._prior, self._memory, self._alarm = prior, memory, alarm
        self._positions = positions
        self._all = Sums(positions)
        self._by_gamma: dict[int, Sums] = {}
        self.rise, self.fall = Shift(positions), Shift(positions)
        self.changes = 0
        self.filled = 1.0

    def __call__(self, gamma: int) -> FloatArray:
        """P(x_k accepted | x_1..x_{k-1} accepted) in blocks of gamma, k = 1..gamma."""
        own = self._by_gamma.get(gamma)
        mean, strength = self._prior
        out = np.empty(gamma)
        for k in range(gamma):
            if k < self._positions:
                mean = (self._all.won[k] + strength * mean) / (self._all.seen[k] + strength)
            out[k] = mean
            if own is not None and k < len(own.seen):
                out[k] = (own.won[k] + GAMMA_STRENGTH * mean) / (own.seen[k] + GAMMA_STRENGTH)
        return out

    def add(self, gamma: int, seen: FloatArray, won: FloatArray, judged: tuple[float, float]) -> None:
        """Learn one round: sums over its rows, [gamma], and (outcomes, acceptances) of offered first drafts."""
        if judged[0] > 0.0:
            self._detect(seen, won, judged)
        self._all.add(seen, won, self._memory)
        self._by_gamma.setdefault(gamma, Sums(gamma)).add(seen, won, self._memory)

    def fill(self, asked: int, drafted: int) -> None:
        """Learn how many of the rows that were asked drafted something."""
        if asked:
            keep = math.exp(-asked / self._memory)
            self.filled = self.filled * keep + (1.0 - keep) * drafted / asked

    def _detect(self, seen: FloatArray, won: FloatArray, judged: tuple[float, float]) -> None:
        rate = min(max(float(self(1)[0]), 0.01), 0.99)
        odds = rate / (1.0 - rate)
        seen, won = seen.copy(), won.copy()
        seen[0], won[0] = judged
        high = max(ODDS * odds / (1.0 + ODDS * odds), LEAST_JUMP)
        self.rise.add(rate, high, seen, won)
        self.fall.add(rate, odds / (ODDS + odds), seen, won)
        for shift in (self.rise, self.fall):
            if shift.evidence > self._alarm:
                self._all.seen, self._all.won = shift.sums.seen.copy(), shift.sums.won.copy()
                self._by_gamma.clear()
                self.rise.clear()
                self.fall.clear()
                self.changes += 1
                return
