"""Measured cost: what a target's forward takes by executed tokens, kept as JSON with the fingerprint it holds for."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dspark._sched import CostTable
from dspark.errors import CostTableError
from dspark.protocols import Target

FORMAT = "dspark-cost"
VERSION = 2
MODES = ("interpolated", "staircase")
_KEYS = frozenset(
    ("format", "version", "fingerprint", "mode", "buckets", "draft", "drafter", "batches", "glue_seconds", "noise")
)

Points = tuple[tuple[int, float], ...]
DraftPoints = tuple[tuple[int, int, float], ...]
BatchPoints = tuple[tuple[int, int, int, float], ...]


@dataclass(frozen=True, slots=True)
class ContextBucket:
    """One measured curve.

    Attributes:
        points: (executed tokens, seconds of one forward), rising in tokens.
        max_context: the longest context, in tokens, that it stands for; None for any.
    """

    points: Points
    max_context: int | None = None


@dataclass(frozen=True, slots=True)
class CostProfile:
    """A cost table with what it was measured on.

    Attributes:
        buckets: a curve a context bucket, rising in ``max_context``; longer contexts use the last.
        fingerprint: ``Target.fingerprint()`` of the target that was timed.
        mode: ``staircase`` where the target pads to sizes that were measured, else ``interpolated``.
        draft: (requests, gamma, seconds of drafting).
        drafter: what the drafting was timed of; empty where ``draft`` is.
        batches: (context, sequences, executed tokens, seconds of one forward): the same tokens over more or fewer
            sequences than ``buckets`` were measured with. For people; tables are keyed by tokens and context.
        glue_seconds: seconds of a step outside forwards.
        noise: relative spread of the measurement; curves that vary no more are ``flat-cost``.

    Raises:
        CostTableError: for a table that can't be planned with.
    """

    buckets: tuple[ContextBucket, ...]
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    mode: str = "interpolated"
    draft: DraftPoints = ()
    drafter: Mapping[str, str] = field(default_factory=dict)
    batches: BatchPoints = ()
    glue_seconds: float = 0.0
    noise: float = 0.02

    def __post_init__(self) -> None:
        object.__setattr__(self, "fingerprint", dict(self.fingerprint))
        object.__setattr__(self, "drafter", dict(self.drafter))
        self.table()

    def table(self) -> CostTable:
        """The table that schedulers plan with."""
        try:
            return CostTable.from_buckets(
                [(bucket.max_context, bucket.points) for bucket in self.buckets],
                mode=self.mode,
                draft=self.draft,
                glue=self.glue_seconds,
                noise=self.noise,
            )
        except (ValueError, TypeError) as err:
            raise CostTableError(f"cost profile: {err}") from err

    @property
    def state(self) -> str:
        """``flat-cost`` where extra tokens look free, else ``measured``."""
        return self.table().state

    def check(self, fingerprint: Mapping[str, str]) -> None:
        """Refuse a profile of something else.

        Raises:
            CostTableError: naming every key that differs, with both values.
        """
        if differ := differences(self.fingerprint, fingerprint):
            raise CostTableError(f"cost table does not hold here ({'; '.join(differ)}); measure a new one")

    def of_drafter(self, drafter: Mapping[str, str]) -> CostProfile:
        """The profile with its drafting times where they are of this drafter, else without them."""
        if not self.draft or not differences(self.drafter, drafter):
            return self
        return dataclasses.replace(self, draft=(), drafter={})

    def to_json(self) -> dict[str, Any]:
        """Plain data, see ``from_json``."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "fingerprint": dict(self.fingerprint),
            "mode": self.mode,
            "buckets": [
                {"max_context": b.max_context, "points": [list(point) for point in b.points]} for b in self.buckets
            ],
            "draft": [list(point) for point in self.draft],
            "drafter": dict(self.drafter),
            "batches": [list(point) for point in self.batches],
            "glue_seconds": self.glue_seconds,
            "noise": self.noise,
        }

    @classmethod
    def from_json(cls, data: Any, *, where: str = "cost profile") -> CostProfile:
        """Read ``to_json``'s data, strictly.

        Raises:
            CostTableError: for another format or version, a missing or unknown key, or a value of another kind.
        """
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise CostTableError(f"{where}: no {FORMAT} file")
        if data.get("version") != VERSION:
            raise CostTableError(
                f"{where}: version {data.get('version')!r}, but this dspark reads {VERSION}; measure again"
            )
        if wrong := sorted(_KEYS.symmetric_difference(data)):
            raise CostTableError(f"{where}: missing or unknown keys: {', '.join(wrong)}")
        try:
            buckets = tuple(
                ContextBucket(tuple((_whole(n), _number(t)) for n, t in b["points"]), _bound(b["max_context"]))
                for b in data["buckets"]
            )
            return cls(
                buckets=buckets,
                fingerprint={str(k): str(v) for k, v in data["fingerprint"].items()},
                mode=data["mode"],
                draft=tuple((_whole(r), _whole(g), _number(t)) for r, g, t in data["draft"]),
                drafter={str(k): str(v) for k, v in data["drafter"].items()},
                batches=tuple((_whole(c), _whole(r), _whole(n), _number(t)) for c, r, n, t in data["batches"]),
                glue_seconds=_number(data["glue_seconds"]),
                noise=_number(data["noise"]),
            )
        except CostTableError as err:
            raise CostTableError(f"{where}: {err}") from err
        except (AttributeError, KeyError, TypeError, ValueError) as err:
            raise CostTableError(f"{where}: malformed ({type(err).__name__}: {err})") from err

    def save(self, path: Path | str) -> None:
        """Write JSON, whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        unfinished.write_text(json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        unfinished.replace(path)

    @classmethod
    def load(cls, path: Path | str) -> CostProfile:
        """Read what ``save`` wrote.

        Raises:
            CostTableError: naming the file, for one that is absent or not such a file.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as err:
            raise CostTableError(f"{path}: can't read a cost profile: {err}") from err
        return cls.from_json(data, where=str(path))


def differences(measured: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """What differs between two fingerprints, key by key, with both values."""
    return [
        f"{key}: measured on {measured.get(key, 'nothing')!r}, now {here.get(key, 'nothing')!r}"
        for key in sorted({*measured, *here})
        if measured.get(key) != here.get(key)
    ]


def smooth(points: Points, noise: float) -> Points:
    """Pool neighbours that fall by less than noise: such dips are not there, and a scheduler would aim at them.

    A fall beyond noise is kept: real curves have them.
    """
    pools: list[tuple[float, int]] = []
    for _, seconds in points:
        mean, size = seconds, 1
        while pools and mean < pools[-1][0] <= mean * (1 + noise):
            before, count = pools.pop()
            mean, size = (before * count + mean * size) / (count + size), count + size
        pools.append((mean, size))
    flat = [mean for mean, size in pools for _ in range(size)]
    return tuple((tokens, seconds) for (tokens, _), seconds in zip(points, flat, strict=True))


def measure(target: Target, *, slots: int = 1, **settings: Any) -> CostProfile:
    """Time real forwards of a target in seconds; see ``dspark.scheduling.measure.measure``."""
    from dspark.scheduling.measure import measure as run

    return run(target, slots=slots, **settings)


def profile(target: Target, **settings: Any) -> CostProfile:
    """Time a target's forwards in minutes at most; see ``dspark.scheduling.placement.profile``."""
    from dspark.scheduling.placement import profile as run

    return run(target, **settings)


def _whole(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise CostTableError(f"expected an integer, got {value!r}")
    return value


def _bound(value: object) -> int | None:
    return None if value is None else _whole(value)


def _number(value: object) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise CostTableError(f"expected a finite number, got {value!r}")
    return float(value)
