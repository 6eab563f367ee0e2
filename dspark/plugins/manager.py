"""Find plugins, load them one by one, and freeze what they register."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from dspark.errors import ConfigError, PluginError, nearest
from dspark.plugins.calls import HookCalls
from dspark.plugins.catalog import Catalog, CatalogBuilder
from dspark.plugins.discovery import Candidate, check_plugin, find_candidates
from dspark.plugins.kinds import BUILTIN_DIST, KINDS, canonical
from dspark.plugins.records import ALLOW_VARIABLE, DISABLE_VARIABLE, Plugin, PluginRecord, warn

if TYPE_CHECKING:
    from dspark.config import EngineConfig

_COMPONENT_FIELDS = ("target", "drafter", "estimator", "calibrator", "scheduler", "verifier")


def load_plugins(
    config: EngineConfig | None = None, *, extra_plugins: Mapping[str, object] | None = None
) -> PluginManager:
    """A manager that has loaded every enabled plugin.

    Args:
        config: its allow-list, overrides and components name plugins, whose faults are errors.
        extra_plugins: name -> plugin object, for plugins without an entry point.

    Raises:
        PluginError: a plugin that the config names is broken or not installed.
        ConfigError: an override that names nothing.
    """
    manager = PluginManager()
    for name, plugin in (extra_plugins or {}).items():
        manager.register(plugin, name)
    manager.load(config)
    return manager


class PluginManager(HookCalls):
    """Loads plugins once, and calls their hooks with every fault attributed.

    ``DSPARK_PLUGINS`` (comma-separated; set but empty: none) and ``EngineConfig.plugins`` allow distributions or plugin
    names; a plugin must be on both where both are given. ``DSPARK_DISABLE_PLUGINS`` and
    ``EngineConfig.disable_plugins`` disable, and win. A plugin that may not load is not imported. The built-in plugin
    always loads, first.

    Args:
        discover: look for entry points.
        environ: where the variables are read; None for the process's.
    """

    def __init__(self, *, discover: bool = True, environ: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._discover = discover
        self._environ = os.environ if environ is None else environ
        self._extra: list[Candidate] = []
        self._catalog: Catalog | None = None

    def register(self, plugin: object, name: str, *, version: str = "0") -> None:
        """Add a plugin without an entry point, for embedding and tests. ``name`` stands for its distribution, too.

        Not subject to the allow-lists. Its faults fail ``load``, since the caller asked for it.

        Raises:
            PluginError: plugins were loaded already, or the name is taken.
        """
        if self._catalog is not None:
            raise PluginError(f"plugin {name!r}: plugins are loaded and the catalog is frozen; register it before")
        dist = canonical(name)
        if dist == BUILTIN_DIST or any(c.dist == dist for c in self._extra):
            raise PluginError(f"plugin {name!r}: the name is taken")
        source = getattr(plugin, "__name__", type(plugin).__name__)
        self._extra.append(Candidate(name, dist, version, source, lambda: plugin, explicit=True))

    def load(self, config: EngineConfig | None = None) -> Catalog:
        """Find, import, check and register every enabled plugin, and freeze the catalog. Once a manager.

        Raises:
            PluginError: a plugin that the config names is broken or not installed.
            ConfigError: an override that names nothing, or an attempt to disable the built-in plugin.
        """
        if self._catalog is not None or self._plugins:
            raise PluginError("a manager loads plugins once; make another one")
        candidates = self._candidates()
        gate = _Gate(config, self._environ)
        gate.check_installed(candidates)
        builder = CatalogBuilder()
        for candidate in candidates:
            plugin = Plugin(candidate)
            plugin.fatal = candidate.explicit or gate.names(plugin)
            self._plugins.append(plugin)
            why = gate.disabled(plugin)
            if why:
                plugin.status, plugin.messages = "disabled", [why]
            else:
                self._load_one(plugin, builder)
        for plugin in self._plugins:
            if plugin.status == "error":
                _report(plugin)
        absent = [p.absent() for p in self._plugins if p.status != "ok"]
        self._catalog = builder.freeze(config.overrides if config is not None else None, absent)
        self._mark_conflicts(self._catalog)
        return self._catalog

    @property
    def catalog(self) -> Catalog:
        """What plugins registered.

        Raises:
            PluginError: before ``load``.
        """
        if self._catalog is None:
            raise PluginError("plugins are not loaded; call load() first")
        return self._catalog

    @property
    def records(self) -> tuple[PluginRecord, ...]:
        """One record a plugin, the built-in one first."""
        return tuple(p.record() for p in self._plugins)

    def _candidates(self) -> list[Candidate]:
        from dspark.plugins import builtin

        own = Candidate("builtin", BUILTIN_DIST, builtin.version(), builtin.__name__, lambda: builtin, explicit=True)
        found = find_candidates() if self._discover else []
        taken = {c.dist for c in self._extra}
        for candidate in found:
            if candidate.dist in taken:
                raise PluginError(f"plugin {candidate.dist!r} was registered, but is installed as well; rename one")
        return [own, *self._extra, *found]

    def _load_one(self, plugin: Plugin, builder: CatalogBuilder) -> None:
        """Import, check and register one plugin; on any fault it leaves nothing behind."""
        candidate, phase = plugin.candidate, "check"
        plugin.entries = entries = builder.entries(candidate.dist, candidate.version)
        registered = False
        try:
            if candidate.dist == BUILTIN_DIST and not candidate.explicit:
                raise PluginError(f"the distribution name {BUILTIN_DIST!r} is reserved")
            phase = "import"
            plugin.plugin = candidate.load()
            phase = "check"
            plugin.hooks = check_plugin(plugin.plugin)
            registered = not self._pluggy.is_registered(plugin.plugin)
            self._pluggy.register(plugin.plugin, name=f"{candidate.dist}:{candidate.name}")
            for kind, spec in KINDS.items():
                if spec.hook in plugin.hooks:
                    phase = spec.hook
                    self._call(plugin, spec.hook, register=entries.register_for(kind))
        except (Exception, SystemExit) as err:  # a plugin that exits on import must not end the process
            entries.close()
            if registered and self._pluggy.is_registered(plugin.plugin):
                self._pluggy.unregister(plugin.plugin)
            plugin.plugin = None
            plugin.fail(phase, err)
        else:
            builder.add(entries)
            plugin.registered = tuple(entries.registrations)

    def _mark_conflicts(self, catalog: Catalog) -> None:
        for conflict in catalog.conflicts:
            for plugin in self._plugins:
                mine = any(r in conflict.registrations for r in plugin.registered)
                if mine and plugin.candidate.dist != BUILTIN_DIST:
                    plugin.status = "conflict"
                    plugin.messages.append(str(conflict))
            if conflict.name not in catalog.overrides:
                warn(str(conflict))


class _Gate:
    """Which plugins may load, and which the configuration names."""

    def __init__(self, config: EngineConfig | None, environ: Mapping[str, str]) -> None:
        self._allow = None if config is None or config.plugins is None else _names(config.plugins)
        self._environ_allow = _names(environ[ALLOW_VARIABLE]) if ALLOW_VARIABLE in environ else None
        by_option = _names(config.disable_plugins) if config is not None else ()
        self._disable = dict.fromkeys(by_option, "by disable_plugins")
        for name in _names(environ.get(DISABLE_VARIABLE, "")):
            self._disable[name] = f"by {DISABLE_VARIABLE}"
        if BUILTIN_DIST in self._disable:
            raise ConfigError(f"the built-in plugin {BUILTIN_DIST!r} can't be disabled")
        self._dists = _distributions(config)

    def names(self, plugin: Plugin) -> bool:
        """True where the configuration names a plugin: on its allow-list, or as the origin of a component."""
        return plugin.candidate.dist in self._dists or bool(plugin.names & set(self._allow or ()))

    def check_installed(self, candidates: Sequence[Candidate]) -> None:
        """Names on an allow-list that nothing installed has: an error in the config, a warning in the environment."""
        known = {n for c in candidates for n in Plugin(c).names}
        for name in self._allow or ():
            if name not in known:
                raise PluginError(f"plugins: {name!r} is not installed{nearest(name, known)}")
        for name in self._environ_allow or ():
            if name not in known:
                warn(f"{ALLOW_VARIABLE}: {name!r} is not installed{nearest(name, known)}")

    def disabled(self, plugin: Plugin) -> str:
        """Why a plugin may not load, or an empty string."""
        explicit = plugin.candidate.explicit
        if explicit and plugin.candidate.dist == BUILTIN_DIST:
            return ""
        for name in sorted(plugin.names):
            if name in self._disable:
                return f"disabled {self._disable[name]}"
        if explicit:
            return ""
        if self._environ_allow is not None and not plugin.names & set(self._environ_allow):
            return f"disabled: not in {ALLOW_VARIABLE}"
        if self._allow is not None and not plugin.names & set(self._allow):
            return "disabled: not in the allow-list"
        return ""


def _distributions(config: EngineConfig | None) -> frozenset[str]:
    """Distributions of the ``dist/name`` components in a configuration."""
    if config is None:
        return frozenset()
    keys = [str(getattr(config, f)) for f in _COMPONENT_FIELDS] + [str(k) for k in config.overrides.values()]
    return frozenset(canonical(k.rpartition("/")[0]) for k in keys if "/" in k)


def _names(names: str | Iterable[str]) -> tuple[str, ...]:
    """Canonical names; a string is a comma-separated list."""
    names = names.split(",") if isinstance(names, str) else names
    return tuple(canonical(n.strip()) for n in names if n.strip())


def _report(plugin: Plugin) -> None:
    if plugin.fatal:
        raise PluginError(plugin.messages[-1]) from plugin.error
    warn(f"{plugin.messages[-1]}. It is left out; {DISABLE_VARIABLE}={plugin.candidate.dist} silences this")
