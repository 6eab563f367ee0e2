"""Typed reading of a config.json. Problems are collected, so that one error lists all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dspark.errors import CheckpointError, nearest

_MISSING: Any = object()


class Fields:
    """Keys of one JSON object, looked up by name in one or more places of it.

    Args:
        raw: the object.
        where: what to call it in messages.
        problems: list that problems are added to; shared between the objects of one file.
    """

    def __init__(self, raw: Mapping[str, Any], where: str, problems: list[str] | None = None) -> None:
        self.raw = raw
        self.where = where
        self.problems: list[str] = [] if problems is None else problems

    def child(self, key: str) -> Fields:
        """The object under ``key``; empty where it is absent."""
        value = self.raw.get(key)
        if value is not None and not isinstance(value, Mapping):
            self.problems.append(f"{self._label(key)}: expected an object, got {value!r}")
            value = None
        return Fields(value or {}, self._label(key), self.problems)

    def has(self, key: str) -> bool:
        """True where the key is there and not null."""
        return self.raw.get(key) is not None

    def _label(self, key: str) -> str:
        return f"{self.where}.{key}" if self.where else key

    def _get(self, key: str, default: Any, kind: str, ok: Any) -> Any:
        value = self.raw.get(key)
        if value is None:
            if default is _MISSING:
                self.problems.append(f"{self._label(key)}: missing{nearest(key, self.raw)}")
                return None
            return default
        if not ok(value):
            self.problems.append(f"{self._label(key)}: expected {kind}, got {value!r}")
            return None if default is _MISSING else default
        return value

    def whole(self, key: str, default: Any = _MISSING) -> int:
        """An integer; 0 stands in for a missing one until ``raise_problems``."""
        value = self._get(key, default, "an integer", lambda v: isinstance(v, int) and not isinstance(v, bool))
        return 0 if value is None else int(value)

    def optional_whole(self, key: str) -> int | None:
        """An integer or None."""
        return self.whole(key) if self.has(key) else None

    def number(self, key: str, default: Any = _MISSING) -> float:
        """A number; 0.0 stands in for a missing one."""
        value = self._get(key, default, "a number", lambda v: isinstance(v, (int, float)) and not isinstance(v, bool))
        return 0.0 if value is None else float(value)

    def optional_number(self, key: str) -> float | None:
        """A number or None."""
        return self.number(key) if self.has(key) else None

    def flag(self, key: str, default: Any = _MISSING) -> bool:
        """A boolean."""
        return bool(self._get(key, default, "true or false", lambda v: isinstance(v, bool)))

    def text(self, key: str, default: Any = _MISSING) -> str:
        """A string."""
        value = self._get(key, default, "a string", lambda v: isinstance(v, str))
        return "" if value is None else str(value)

    def ids(self, key: str, default: Any = _MISSING) -> tuple[int, ...]:
        """A list of integers."""

        def ok(value: Any) -> bool:
            return isinstance(value, Sequence) and all(isinstance(v, int) and not isinstance(v, bool) for v in value)

        value = self._get(key, default, "a list of integers", ok)
        return () if value is None else tuple(value)

    def raise_problems(self, where: str) -> None:
        """Raise one CheckpointError that lists what was collected."""
        if self.problems:
            raise CheckpointError(f"{where}: " + "; ".join(self.problems))
