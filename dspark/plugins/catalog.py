"""What plugins registered: collected while they load, immutable afterwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NoReturn

from dspark.config import build_config
from dspark.errors import ConfigError, DSparkError, PluginError, UnknownComponentError, nearest
from dspark.plugins.kinds import BUILTIN_DIST, Kind, as_kind, canonical, component_faults
from dspark.plugins.registration import PluginEntries, Registration
from dspark.protocols import BuildContext


@dataclass(frozen=True, slots=True)
class AbsentPlugin:
    """A plugin that contributes nothing, and why. ``offered``: (kind, name) pairs that it tried to register."""

    dist: str
    reason: str
    error: BaseException | None = None
    offered: frozenset[tuple[Kind, str]] = frozenset()

    def raise_error(self) -> NoReturn:
        """Raise what kept it out."""
        raise PluginError(self.reason) from self.error


@dataclass(frozen=True, slots=True)
class Conflict:
    """A name that several distributions offer."""

    kind: Kind
    name: str
    registrations: tuple[Registration, ...]

    @property
    def reserved(self) -> bool:
        """True where one of them is the built-in component, which keeps the name."""
        return any(r.dist == BUILTIN_DIST for r in self.registrations)

    def __str__(self) -> str:
        who = " and ".join(f"{r.dist} {r.version}" for r in self.registrations)
        other = next(r for r in self.registrations if r.dist != BUILTIN_DIST)
        hint = f"name one by its distribution, such as {other.key!r}, or set overrides={{{self.name!r}: {other.key!r}}}"
        if self.reserved:
            return f"{self.kind.label} {self.name!r} is a reserved built-in name, offered by {who}; {hint}"
        return f"{self.kind.label} {self.name!r} is offered by {who}; {hint}"


@dataclass(frozen=True, slots=True)
class Catalog:
    """Every registered component. Immutable; made by ``CatalogBuilder.freeze``.

    Attributes:
        registrations: in the order of loading, the built-in ones first.
        overrides: name -> ``dist/name``, the user's choice where several distributions offer a name.
        absent: plugins that are disabled or broken, for messages.
    """

    registrations: tuple[Registration, ...]
    overrides: Mapping[str, str]
    absent: tuple[AbsentPlugin, ...]
    _by_key: Mapping[tuple[Kind, str], Registration] = field(repr=False)
    _by_name: Mapping[tuple[Kind, str], tuple[Registration, ...]] = field(repr=False)

    def of(self, kind: Kind | str) -> tuple[Registration, ...]:
        """All components of a kind."""
        kind = as_kind(kind)
        return tuple(r for r in self.registrations if r.kind is kind)

    def names(self, kind: Kind | str) -> tuple[str, ...]:
        """Every name that resolves in a kind, ``dist/name`` included, sorted."""
        kind = as_kind(kind)
        return tuple(sorted({n for k, n in (*self._by_name, *self._by_key) if k is kind}))

    @property
    def conflicts(self) -> tuple[Conflict, ...]:
        """Names that several distributions offer."""
        return tuple(Conflict(k, n, found) for (k, n), found in self._by_name.items() if len(found) > 1)

    def resolve(self, kind: Kind | str, name: str) -> Registration:
        """The component that a name means: an override, ``dist/name``, a built-in name, or the one that offers it.

        Raises:
            UnknownComponentError: nobody offers it; with the nearest name.
            PluginError: several distributions offer it, or the plugin that would is broken or disabled.
        """
        kind = as_kind(kind)
        override = self.overrides.get(name)
        if override is not None and (found := self._by_key.get((kind, _full_key(override)))):
            return found
        if "/" in name:
            found = self._by_key.get((kind, _full_key(name)))
            if found is None:
                self._unknown(kind, name)
            return found
        offers = self._by_name.get((kind, name), ())
        for offer in offers:
            if offer.dist == BUILTIN_DIST:
                return offer
        if len(offers) > 1:
            raise PluginError(str(Conflict(kind, name, offers)))
        if not offers:
            self._unknown(kind, name)
        return offers[0]

    def build(
        self,
        kind: Kind | str,
        name: str,
        values: Mapping[str, Any] | None = None,
        context: BuildContext | None = None,
    ) -> Any:
        """Resolve a component, read its settings and construct it.

        Args:
            kind: what it is.
            name: bare name or ``dist/name``.
            values: its settings; unknown ones are errors.
            context: what the factory may use; ``resolve`` is filled in where it is None.

        Raises:
            ConfigError: a setting is unknown or refused.
            PluginError: the factory raised (chained), or what it built is not of the kind.
            DSparkError: what the factory raised itself, with a note that names the component.
        """
        registration = self.resolve(kind, name)
        context = context or BuildContext()
        if context.resolve is None:
            inner = context

            def resolve(kind: Kind | str, name: str, config: Mapping[str, Any] | None = None) -> Any:
                made = self.build(kind, name, config, inner)
                registration = self.resolve(kind, name)
                inner.nested.append((made, registration.key, registration.version))
                return made

            context = dataclasses.replace(context, resolve=resolve)
        try:
            config = _read_config(registration, values)
            component = registration.load_factory()(config, context)
            fault = component_faults(registration.kind, component, registration.capabilities)
        except DSparkError as err:
            err.add_note(f"while building {registration}")
            raise
        except Exception as err:
            raise PluginError(f"{registration} can't be built: {type(err).__name__}: {err}") from err
        if fault:
            raise PluginError(f"{registration}: {fault}")
        return component

    def _unknown(self, kind: Kind, name: str) -> NoReturn:
        dist, _, bare = name.rpartition("/")
        for absent in self.absent:
            if absent.dist == canonical(dist) or (not dist and (kind, bare) in absent.offered):
                absent.raise_error()
        known = self.names(kind)
        if not known:
            raise UnknownComponentError(
                f"no {kind.label} {name!r}: nothing of that kind is registered{self._left_out()}"
            )
        hint = f"{nearest(name, known)} (known: {', '.join(n for n in known if '/' not in n)})"
        raise UnknownComponentError(f"no {kind.label} {name!r}{hint}{self._left_out()}")

    def _left_out(self) -> str:
        return f". Plugins left out: {', '.join(sorted({a.dist for a in self.absent}))}" if self.absent else ""


def _full_key(name: str) -> str:
    dist, _, bare = name.rpartition("/")
    return f"{canonical(dist)}/{bare}"


def _read_config(registration: Registration, values: Mapping[str, Any] | None) -> Any:
    cls = registration.load_config()
    where = f"{registration.kind.label} {registration.key!r}"
    if cls is None:
        if values:
            raise ConfigError(f"{where}: takes no settings, got {', '.join(map(repr, values))}")
        return None
    try:
        return build_config(cls, values, where=where)
    except DSparkError:
        raise
    except ValueError as err:
        raise ConfigError(f"{where}: {err}") from err


class CatalogBuilder:
    """Collects registrations, then freezes them."""

    def __init__(self) -> None:
        self._registrations: list[Registration] = []

    def entries(self, dist: str, version: str) -> PluginEntries:
        """A place for one plugin's registrations."""
        taken = {(r.kind, n): r for r in self._registrations if r.dist == dist for n in (r.name, *r.aliases)}
        return PluginEntries(dist, version, taken)

    def add(self, entries: PluginEntries) -> None:
        """Take what a plugin registered."""
        entries.close()
        self._registrations.extend(entries.registrations)

    def freeze(self, overrides: Mapping[str, str] | None = None, absent: Sequence[AbsentPlugin] = ()) -> Catalog:
        """The immutable catalog.

        Raises:
            ConfigError: an override that is not ``dist/name``, or names nothing that is registered.
            PluginError: an override that names a plugin which is broken or disabled.
        """
        by_key: dict[tuple[Kind, str], Registration] = {}
        by_name: dict[tuple[Kind, str], tuple[Registration, ...]] = {}
        for entry in self._registrations:
            for name in (entry.name, *entry.aliases):
                by_key[entry.kind, f"{entry.dist}/{name}"] = entry
                by_name[entry.kind, name] = (*by_name.get((entry.kind, name), ()), entry)
        overrides = dict(overrides or {})
        keys = {key for _, key in by_key}
        for name, key in overrides.items():
            _check_override(name, key, keys, absent)
        return Catalog(
            tuple(self._registrations),
            MappingProxyType(overrides),
            tuple(absent),
            MappingProxyType(by_key),
            MappingProxyType(by_name),
        )


def _check_override(name: str, key: str, keys: set[str], absent: Sequence[AbsentPlugin]) -> None:
    if not isinstance(key, str) or "/" not in key or "/" in name:
        raise ConfigError(f"overrides: expected name -> 'dist/name', got {name!r}: {key!r}")
    if _full_key(key) in keys:
        return
    for plugin in absent:
        if plugin.dist == canonical(key.rpartition("/")[0]):
            plugin.raise_error()
    raise ConfigError(f"overrides: {name!r}: nothing is registered as {key!r}{nearest(key, keys)}")
