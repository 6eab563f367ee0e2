"""What an engine says once: named states, and drafts that are never accepted."""

from __future__ import annotations

from dspark.types import RoundRecord

STATES = {
    "no-cost-table": "no cost table: drafts are verified at a fixed length; measure one to schedule them",
    "gamma-not-chosen": "the gamma policy weighs cost, and there is no cost table: all of gamma is drafted",
    "ragged-padding": "the target takes no ragged batches: the longest scheduled length is verified for all",
}
"""Beside ``flat-cost``, which the table itself says."""
FLAT_COST = "flat-cost: the cost table says that extra tokens are free; every draft will be verified"

FEW = 8
"""Drafting rounds without acceptance after which rounds that a guard held back count too."""


class AcceptanceWatch:
    """Zero acceptance with correct text is this field's most common failure: it is said once.

    Args:
        rounds: without a single accepted draft after which it is.
    """

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self._idle = self._held = 0
        self._done = False

    def see(self, record: RoundRecord, offered: int, drafter: str) -> str | None:
        """What to say after a round that verified so many drafts; None for nothing."""
        if self._done or any(done.accepted for done in record.committed):
            self._done = True
            return None
        if offered:
            self._idle += 1
        elif record.choice is not None and record.choice[1].reason == "guard" and self._idle >= FEW:
            self._held += 1
        else:
            return None
        if self._idle + self._held != self._rounds:
            return None
        self._done = True
        held = f" (and {self._held} more were plain for it)" if self._held else ""
        return (
            f"no draft accepted in {self._idle} rounds of {drafter}{held}: likely causes are the checkpoint's block "
            "layout, tap layers, target or tokenizer, or text that it can't draft"
        )
