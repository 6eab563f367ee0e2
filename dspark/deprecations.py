"""Everything that is going to leave, in one place: since when, until when, and what to use instead.

A public name that moves or goes is listed here for at least one minor version. Using it still works and gives a
``DeprecationWarning`` that says all three; a test fails once the version of its removal has come.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deprecation:
    """One thing that is going to leave.

    Attributes:
        since: version that deprecated it.
        removed_in: version that it will be gone in.
        instead: what to use, in words.
        target: ``module:name`` that a deprecated public name of ``dspark`` means until then; empty for what is no name.
    """

    since: str
    removed_in: str
    instead: str
    target: str = ""


DEPRECATED: Mapping[str, Deprecation] = {}
"""Name, as users write it (``dspark.Name``, ``EngineConfig.field``, ``dspark command --option``) -> its end."""


def warn_deprecated(name: str, *, stacklevel: int = 2) -> Deprecation:
    """Say that ``name`` is going to leave.

    Args:
        name: a key of ``DEPRECATED``.
        stacklevel: of the warning, counted from the caller.
    """
    entry = DEPRECATED[name]
    warnings.warn(
        f"{name} is deprecated since dspark {entry.since} and will be gone in {entry.removed_in}; use {entry.instead}",
        DeprecationWarning,
        stacklevel=stacklevel + 1,
    )
    return entry


def deprecated_name(name: str) -> str | None:
    """``module:name`` of a deprecated public name of the package, with its warning; None for any other name."""
    key = f"dspark.{name}"
    if key not in DEPRECATED or not DEPRECATED[key].target:
        return None
    return warn_deprecated(key, stacklevel=3).target
