"""Fitted STS temperatures on file, and which of them fit a round (METHOD section 3).

A temperature is good for the target, verifier, gamma and sampling temperature that it was fitted on, and for nothing
else: accepted lengths differ between verifiers, and a shorter block changes the hidden states behind c.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.errors import ConfigError
from dspark.types import Mode

FORMAT = "dspark-sts"


@dataclass(frozen=True, slots=True)
class CalibrationEntry:
    """Temperatures T_1..T_gamma of one verifier, gamma and bucket of sampling temperatures.

    Attributes:
        verifier: ``greedy``, ``rejection`` or ``coupled``.
        gamma: block size of the rounds that it was fitted on.
        low, high: bucket of sampling temperatures, both ends included; 0 to 0 for greedy.
        temperatures: one a position, each above 0.
    """

    verifier: str
    gamma: int
    low: float
    high: float
    temperatures: tuple[float, ...]

    def __post_init__(self) -> None:
        modes = [m.value for m in Mode]
        if self.verifier not in modes:
            raise ConfigError(f"calibration: verifier {self.verifier!r} is none of {', '.join(modes)}")
        if len(self.temperatures) != self.gamma:
            raise ConfigError(f"calibration: {len(self.temperatures)} temperatures for gamma {self.gamma}")
        if not all(math.isfinite(t) and t > 0 for t in self.temperatures):
            raise ConfigError(f"calibration: temperatures must be finite and above 0, got {list(self.temperatures)}")
        if not 0 <= self.low <= self.high:
            raise ConfigError(f"calibration: temperature bucket [{self.low}, {self.high}] is not a range from 0 up")


@dataclass(frozen=True, slots=True)
class Calibration:
    """All entries fitted for one drafter on one target."""

    target: str
    entries: tuple[CalibrationEntry, ...]

    def find(self, target: str, verifier: str, gamma: int, temperature: float) -> CalibrationEntry | None:
        """The narrowest entry that fits, or None."""
        if target != self.target:
            return None
        fits = [
            e for e in self.entries if e.verifier == verifier and e.gamma == gamma and e.low <= temperature <= e.high
        ]
        return min(fits, key=lambda e: e.high - e.low, default=None)

    def to_json(self) -> dict[str, Any]:
        """As written to ``calibration.json``."""
        entries = [
            {
                "verifier": e.verifier,
                "gamma": e.gamma,
                "temperature": [e.low, e.high],
                "temperatures": list(e.temperatures),
            }
            for e in self.entries
        ]
        return {"format": FORMAT, "version": 1, "target": self.target, "entries": entries}


def read_calibration(source: str | Path | Mapping[str, Any]) -> Calibration:
    """Read ``calibration.json``, or its content.

    Raises:
        ConfigError: unreadable, another format, or a malformed entry.
    """
    if isinstance(source, Mapping):
        raw, where = dict(source), "calibration"
    else:
        where = str(source)
        try:
            raw = json.loads(Path(source).read_text(encoding="utf-8"))
        except (OSError, ValueError) as err:
            raise ConfigError(f"{where}: {err}") from err
    if not isinstance(raw, dict) or raw.get("format") != FORMAT or raw.get("version") != 1:
        raise ConfigError(f"{where}: expected format {FORMAT!r}, version 1")
    try:
        return Calibration(str(raw["target"]), tuple(_entry(e) for e in raw["entries"]))
    except (KeyError, TypeError, ValueError) as err:
        raise ConfigError(f"{where}: malformed entry: {type(err).__name__}: {err}") from err


def _entry(raw: Mapping[str, Any]) -> CalibrationEntry:
    bucket: Sequence[float] = raw["temperature"]
    low, high = (float(t) for t in bucket)
    temperatures = tuple(float(t) for t in raw["temperatures"])
    return CalibrationEntry(str(raw["verifier"]), int(raw["gamma"]), low, high, temperatures)
