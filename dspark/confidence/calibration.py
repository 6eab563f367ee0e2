"""Fitted STS temperatures on file, and which of them fit a round (METHOD section 3).

A temperature is good for the target, verifier, mode and sampling temperature that it was fitted on, and for nothing
else: accepted lengths differ between verifiers. It is best for the gamma too, since a shorter block changes the hidden
states behind c a little; where none was fitted for a gamma, the first temperatures of the next longer block serve,
which depend on no later position.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dspark.errors import ConfigError
from dspark.types import Mode

FORMAT = "dspark-sts"
VERSION = 2
FILE_NAME = "calibration.json"
"""Where the temperatures of a checkpoint lie, beside its tensors."""

_SLACK = 1e-6
"""Sampling temperatures are compared up to this, so that 0.7 lies in a bucket that was computed to end there."""


@dataclass(frozen=True, slots=True)
class CalibrationEntry:
    """Temperatures T_1..T_gamma of one target, verifier, mode, gamma and bucket of sampling temperatures.

    Attributes:
        target: hash of the target's configuration, see :func:`target_key`.
        verifier: registered name of the verifier, ``dist/name``.
        mode: ``greedy``, ``rejection`` or ``coupled``.
        gamma: block size of the rounds that it was fitted on.
        low, high: bucket of sampling temperatures, both ends included; 0 to 0 for greedy.
        temperatures: one a position, each above 0.
        name: of the target, for messages.
        fit: what it was fitted on and how well, for readers.
    """

    target: str
    verifier: str
    mode: str
    gamma: int
    low: float
    high: float
    temperatures: tuple[float, ...]
    name: str = ""
    fit: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        modes = [m.value for m in Mode]
        if self.mode not in modes:
            raise ConfigError(f"calibration: mode {self.mode!r} is none of {', '.join(modes)}")
        if not self.target or not self.verifier:
            raise ConfigError("calibration: an entry needs its target's hash and its verifier's name")
        if len(self.temperatures) != self.gamma:
            raise ConfigError(f"calibration: {len(self.temperatures)} temperatures for gamma {self.gamma}")
        if not all(math.isfinite(t) and t > 0 for t in self.temperatures):
            raise ConfigError(f"calibration: temperatures must be finite and above 0, got {list(self.temperatures)}")
        if not 0 <= self.low <= self.high:
            raise ConfigError(f"calibration: temperature bucket [{self.low}, {self.high}] is not a range from 0 up")

    @property
    def key(self) -> tuple[str, str, str, int, float, float]:
        """What tells it from other entries."""
        return self.target, self.verifier, self.mode, self.gamma, self.low, self.high

    def fits(self, target: str, verifier: str, mode: str, gamma: int, temperature: float) -> bool:
        """True where it was fitted for such rounds, or for longer blocks of them."""
        same = (self.target, self.verifier, self.mode) == (target, verifier, mode) and self.gamma >= gamma
        return same and self.low - _SLACK <= temperature <= self.high + _SLACK


@dataclass(frozen=True, slots=True)
class Calibration:
    """All entries fitted for one drafter."""

    entries: tuple[CalibrationEntry, ...] = ()

    def find(self, target: str, verifier: str, mode: str, gamma: int, temperature: float) -> CalibrationEntry | None:
        """The entry that fits best, of the nearest gamma and then the narrowest, or None."""
        fits = [e for e in self.entries if e.fits(target, verifier, mode, gamma, temperature)]
        return min(fits, key=lambda e: (e.gamma, e.high - e.low), default=None)

    def with_entry(self, entry: CalibrationEntry) -> Calibration:
        """The same with ``entry``, which takes the place of one with its key."""
        return Calibration((*(e for e in self.entries if e.key != entry.key), entry))

    def describe(self) -> str:
        """What it was fitted for, in a few words."""
        found = {
            f"{e.name or e.target} {e.mode} by {e.verifier}, gamma {e.gamma}, temperature {e.low:g}-{e.high:g}"
            for e in self.entries
        }
        return "; ".join(sorted(found)) or "nothing"

    def to_json(self) -> dict[str, Any]:
        """As written to ``calibration.json``."""
        entries = []
        for e in self.entries:
            raw = {f.name: getattr(e, f.name) for f in dataclasses.fields(e) if f.name not in ("low", "high", "name")}
            named = {"target_name": e.name, "temperature": [e.low, e.high], "temperatures": list(e.temperatures)}
            entries.append({**raw, **named, "fit": dict(e.fit)})
        return {"format": FORMAT, "version": VERSION, "entries": entries}


def target_key(target: Any) -> str:
    """What a calibration knows a target by: the hash of its configuration, else its name."""
    fingerprint = target.fingerprint() if hasattr(target, "fingerprint") else {}
    return str(fingerprint.get("config") or fingerprint.get("model") or getattr(target, "name", ""))


def read_calibration(source: str | Path | Mapping[str, Any]) -> Calibration:
    """Read ``calibration.json``, or its content.

    Raises:
        ConfigError: unreadable, another format or version, or a malformed entry.
    """
    if isinstance(source, Mapping):
        raw, where = dict(source), "calibration"
    else:
        where = str(source)
        try:
            raw = json.loads(Path(source).read_text(encoding="utf-8"))
        except (OSError, ValueError) as err:
            raise ConfigError(f"{where}: {err}") from err
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise ConfigError(f"{where}: expected format {FORMAT!r}")
    if raw.get("version") != VERSION:
        raise ConfigError(
            f"{where}: expected version {VERSION}, got {raw.get('version')!r}; fit it again with `dspark calibrate`"
        )
    try:
        return Calibration(tuple(_entry(e) for e in raw["entries"]))
    except (KeyError, TypeError, ValueError) as err:
        raise ConfigError(f"{where}: malformed entry: {type(err).__name__}: {err}") from err


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Write ``calibration.json``, whole or not at all.

    Raises:
        ConfigError: it can't be written.
    """
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(json.dumps(calibration.to_json(), indent=2) + "\n", encoding="utf-8")
        os.replace(part, path)
    except OSError as err:
        raise ConfigError(f"{path}: can't be written: {err}") from err


def _entry(raw: Mapping[str, Any]) -> CalibrationEntry:
    low, high = (float(t) for t in raw["temperature"])
    return CalibrationEntry(
        target=str(raw["target"]),
        verifier=str(raw["verifier"]),
        mode=str(raw["mode"]),
        gamma=int(raw["gamma"]),
        low=low,
        high=high,
        temperatures=tuple(float(t) for t in raw["temperatures"]),
        name=str(raw.get("target_name", "")),
        fit=dict(raw.get("fit", {})),
    )
