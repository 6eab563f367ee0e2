"""What became of each plugin, and how its faults are told."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

from dspark.errors import DSparkWarning
from dspark.plugins.catalog import AbsentPlugin
from dspark.plugins.discovery import Candidate
from dspark.plugins.kinds import canonical
from dspark.plugins.registration import PluginEntries, Registration

ALLOW_VARIABLE = "DSPARK_PLUGINS"
DISABLE_VARIABLE = "DSPARK_DISABLE_PLUGINS"


class PluginWarning(DSparkWarning):
    """A plugin that the configuration does not name is broken or in conflict."""


@dataclass(frozen=True, slots=True)
class PluginRecord:
    """What became of one plugin.

    Attributes:
        name: of its entry point.
        version, distribution: who ships it.
        hooks: hooks that it implements.
        components: what it registered.
        status: ``ok``, ``disabled``, ``error`` (left out, or a later hook failed) or ``conflict`` (loaded, but another
            distribution offers one of its names).
        error: why the status is not ``ok``.
    """

    name: str
    version: str
    distribution: str
    hooks: tuple[str, ...]
    components: tuple[Registration, ...]
    status: str
    error: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        components = [{"kind": r.kind.value, "name": r.key, "aliases": list(r.aliases)} for r in self.components]
        return {
            "name": self.name,
            "version": self.version,
            "distribution": self.distribution,
            "hooks": list(self.hooks),
            "components": components,
            "status": self.status,
            "error": self.error,
        }


@dataclass(slots=True)
class Plugin:
    """A candidate on its way, and what became of it.

    Attributes:
        candidate: where it was found.
        plugin: the imported object.
        hooks: hooks that it implements.
        entries: what it registers, until it is complete.
        registered: what it registered, once it is.
        status, messages: as in ``PluginRecord``.
        error: what it raised last.
        fatal: the configuration names it, so its faults are errors.
    """

    candidate: Candidate
    plugin: object = None
    hooks: tuple[str, ...] = ()
    entries: PluginEntries | None = None
    registered: tuple[Registration, ...] = ()
    status: str = "ok"
    messages: list[str] = field(default_factory=list)
    error: BaseException | None = None
    fatal: bool = False

    @property
    def names(self) -> frozenset[str]:
        """What a user may call it."""
        return frozenset({self.candidate.dist, canonical(self.candidate.name)})

    def __str__(self) -> str:
        c = self.candidate
        return f"plugin {c.name!r} of distribution {c.dist} {c.version}"

    def fail(self, phase: str, error: BaseException) -> None:
        """Note a fault. ``phase``: ``import``, ``check``, or the hook that raised."""
        where = {"import": "can't be imported", "check": "is refused"}.get(phase, f"failed in {phase}")
        self.status, self.error = "error", error
        self.messages.append(f"{self} {where}: {type(error).__name__}: {error}")

    def absent(self) -> AbsentPlugin:
        """For the catalog's messages."""
        offers = self.entries.registrations if self.entries is not None else ()
        offered = frozenset((r.kind, n) for r in offers for n in (r.name, *r.aliases))
        reason = f"{self}: {self.messages[-1]}" if self.status == "disabled" else self.messages[-1]
        return AbsentPlugin(self.candidate.dist, reason, self.error, offered)

    def record(self) -> PluginRecord:
        """For users."""
        c = self.candidate
        return PluginRecord(
            c.name, c.version, c.dist, self.hooks, self.registered, self.status, "; ".join(self.messages)
        )


def warn(message: str) -> None:
    """A ``PluginWarning``."""
    warnings.warn(message, PluginWarning, stacklevel=3)
