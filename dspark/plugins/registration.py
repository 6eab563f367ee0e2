"""One registered component, and the place where a plugin's registrations are checked and kept while it loads."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dspark.capabilities import Capabilities
from dspark.errors import PluginError
from dspark.plugins.kinds import KINDS, Factory, Kind, LazyConfig, Register

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
_REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_WORDS = frozenset({"auto"})  # values with a meaning of their own in EngineConfig


@dataclass(frozen=True, slots=True)
class Registration:
    """One component as it was registered.

    Attributes:
        kind: what it is.
        name: its name; ``key`` is ``dist/name``.
        dist, version: distribution that offers it.
        factory: ``factory(config, context)``, or "module:function".
        config: dataclass of its settings, "module:Class", a function that returns the class, or None.
        capabilities: what it declares.
        aliases: further names.
    """

    kind: Kind
    name: str
    dist: str
    version: str
    factory: Factory | str
    config: LazyConfig
    capabilities: Capabilities
    aliases: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The name that always works."""
        return f"{self.dist}/{self.name}"

    def __str__(self) -> str:
        return f"{self.kind.label} {self.key!r} ({self.dist} {self.version})"

    def load_factory(self) -> Factory:
        """The factory, imported where it was registered by reference."""
        factory = _import(self.factory) if isinstance(self.factory, str) else self.factory
        if not callable(factory):
            raise PluginError(f"{self}: factory {self.factory!r} is not callable")
        return factory

    def load_config(self) -> type[Any] | None:
        """The config dataclass, imported where it was registered by reference; None where there are no settings."""
        if self.config is None:
            return None
        cls: Any = self.config
        if isinstance(cls, str):
            cls = _import(cls)
        elif not isinstance(cls, type):
            cls = cls()
        if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
            raise PluginError(f"{self}: config {self.config!r} is not a dataclass")
        return cls


def _import(reference: str) -> Any:
    module, _, path = reference.partition(":")
    value: Any = importlib.import_module(module)
    for part in path.split("."):
        value = getattr(value, part)
    return value


class PluginEntries:
    """What one plugin registers: kept apart until all of its hooks have run, so that it can be dropped whole."""

    def __init__(self, dist: str, version: str, taken: Mapping[tuple[Kind, str], Registration]) -> None:
        self.dist, self.version = dist, version
        self.registrations: list[Registration] = []
        self._taken = dict(taken)  # names of the same distribution
        self._open = True

    def register_for(self, kind: Kind) -> Register:
        """The ``register`` argument of the hook of ``kind``."""

        def register(
            name: str,
            factory: Factory | str,
            *,
            config: LazyConfig,
            capabilities: Capabilities,
            aliases: Sequence[str] = (),
        ) -> None:
            if not self._open:
                raise PluginError(f"{kind.label} {name!r} ({self.dist} {self.version}): the catalog is frozen")
            if isinstance(aliases, str):
                raise PluginError(f"{kind.label} {name!r}: aliases must be a sequence of names, got {aliases!r}")
            entry = Registration(kind, name, self.dist, self.version, factory, config, capabilities, tuple(aliases))
            _validate(entry)
            for key in (name, *entry.aliases):
                if (kind, key) in self._taken:
                    raise PluginError(f"{kind.label} {key!r}: {self.dist} {self.version} registers it twice")
                self._taken[kind, key] = entry
            self.registrations.append(entry)

        return register

    def close(self) -> None:
        """No further registrations."""
        self._open = False


def _validate(entry: Registration) -> None:
    what = f"{entry.kind.label} {entry.name!r}"
    for name in (entry.name, *entry.aliases):
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise PluginError(f"{what}: {name!r} is no name (lower case letters, digits, '.', '_' and '-')")
        if name in _WORDS:
            raise PluginError(f"{what}: {name!r} has a meaning of its own in the configuration")
    if isinstance(entry.factory, str):
        if not _REFERENCE.fullmatch(entry.factory):
            raise PluginError(f"{what}: factory must be callable or 'module:function', got {entry.factory!r}")
    elif not callable(entry.factory):
        raise PluginError(f"{what}: factory must be callable or 'module:function', got {entry.factory!r}")
    config = entry.config
    if isinstance(config, str):
        good = _REFERENCE.fullmatch(config) is not None
    elif isinstance(config, type):
        good = dataclasses.is_dataclass(config)
    else:
        good = config is None or callable(config)
    if not good:
        raise PluginError(f"{what}: config must be a dataclass, 'module:Class' or None, got {config!r}")
    expected = KINDS[entry.kind].capabilities
    if not isinstance(entry.capabilities, expected):
        got = type(entry.capabilities).__name__
        raise PluginError(f"{what}: capabilities must be {expected.__name__}, got {got}")
