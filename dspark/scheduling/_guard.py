"""Whether drafting pays at all, with hysteresis, and what is spent on finding out that it would pay again."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

ROUNDS = 64.0
"""Rounds after which an older one weighs 1/e, in rates of the long run."""
PRIOR_ROUNDS = 16.0
"""Rounds that a prediction as it stands weighs as much as, against what came of earlier ones."""
MOST_CORRECTION = 1.5


@dataclass(slots=True)
class Regime:
    """What holds for batches of about one size.

    Attributes:
        on: whether it drafts; None before the first decision.
        gamma: block of its last drafting round.
        gain: that was predicted when it was decided last.
        cost: the table that it goes by.
        known, review: what that decision saw, and the round from which it is taken anew.
        rounds: in which it drafted.
        tokens, seconds: of its rounds while it drafts, decayed; by the cost table.
    """

    on: bool | None = None
    gamma: int = 0
    gain: float = math.nan
    cost: Any = None
    known: tuple[int, ...] = ()
    review: int = 0
    rounds: int = 0
    tokens: float = 0.0
    seconds: float = 0.0

    def restart(self, cost: Any) -> None:
        """Go by another table: seconds of the old one are another currency."""
        self.cost, self.review = cost, 0
        self.tokens = self.seconds = 0.0

    def decide(self, gain: float, threshold: float, hysteresis: float) -> bool:
        """On from ``threshold`` at first, then off under it, and on again from ``threshold + hysteresis``."""
        before, self.gain = self.on, gain
        self.on = gain >= threshold + (hysteresis if before is False else 0.0)
        if before is False and self.on:
            self.tokens = self.seconds = 0.0  # the rate of another time
        return self.on

    def add(self, tokens: float, seconds: float) -> None:
        """Count one of its rounds."""
        keep = math.exp(-1.0 / ROUNDS)
        self.tokens = self.tokens * keep + tokens
        self.seconds = self.seconds * keep + seconds

    def rate(self, plain: float) -> float:
        """Tokens per second of the long run: what it had, and never less than plain decoding's."""
        return max(plain, self.tokens / self.seconds) if self.seconds > 0.0 else plain


class Correction:
    """Theta that came over Theta that was predicted, of drafting rounds: the two see the same cost table.

    So it takes up what averages miss: a scheduler that picks the better drafts, rows that differ, drafts cut at an end.
    """

    def __init__(self) -> None:
        self._rounds = 0.0
        self._came, self._expected = [0.0, 0.0], [0.0, 0.0]

    @property
    def factor(self) -> float:
        """What predictions are multiplied by; 1 before anything came."""
        if not self._rounds or self._came[0] <= 0.0:
            return 1.0
        ratio = self._came[0] / self._came[1] / (self._expected[0] / self._expected[1])
        weighed = math.exp(self._rounds / (self._rounds + PRIOR_ROUNDS) * math.log(ratio))
        return min(max(weighed, 1.0 / MOST_CORRECTION), MOST_CORRECTION)

    def add(self, came: tuple[float, float], expected: tuple[float, float]) -> None:
        """One round's (tokens, seconds)."""
        keep = math.exp(-1.0 / ROUNDS)
        self._rounds = self._rounds * keep + 1.0
        for sums, new in ((self._came, came), (self._expected, expected)):
            sums[0] = sums[0] * keep + new[0]
            sums[1] = sums[1] * keep + new[1]

    def fade(self) -> None:
        """A round in which nothing could be compared: what is known grows old."""
        self._rounds *= math.exp(-0.25 / ROUNDS)

    def clear(self) -> None:
        """Forget all of it."""
        self.__init__()  # type: ignore[misc]


class Probes:
    """When a plain phase drafts all the same.

    Plain rounds earn a share of their seconds, probes spend it: what probing costs is bounded whatever its outcome, and
    when the next one is due does not depend on outcomes either, so that no phase lasts for ever. A probe that went
    better than expected is looked at again at once; that is spent in advance.

    Args:
        share: of the time of plain rounds.
        looks: most probes in a row.
    """

    def __init__(self, share: float, looks: int) -> None:
        self._share, self._looks = share, looks
        self._credit = 0.0
        self._row = 0

    def due(self, plain: float, extra: float, surprised: bool) -> bool:
        """Whether the coming round probes; ``plain`` and ``extra`` are seconds of a plain round, and more than it."""
        again = surprised and 0 < self._row < self._looks
        if again or (self._credit >= extra and not self._row):
            self._credit -= extra
            self._row += 1
            return True
        self._row = 0
        self._credit += self._share * plain
        return False

    def clear(self) -> None:
        """The plain phase is over; what it overspent stays spent."""
        self._row = 0
        self._credit = min(self._credit, 0.0)
