"""Find plugins through entry points, and check them before they are registered."""

from __future__ import annotations

import importlib.metadata as metadata
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from dspark.errors import PluginError, nearest
from dspark.plugins import hookspecs
from dspark.plugins.hookspecs import DSPARK_API, ENTRY_POINT_GROUP, PROJECT
from dspark.plugins.kinds import canonical

_PREFIX = "dspark_"
HOOKS = tuple(n for n, f in vars(hookspecs).items() if n.startswith(_PREFIX) and inspect.isfunction(f))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plugin that was found, not yet imported.

    Attributes:
        name: of the entry point, or as given to ``PluginManager.register``.
        dist: canonical name of its distribution.
        version: of the distribution.
        source: where it comes from: ``module:object``.
        load: import it and return the plugin object.
        explicit: handed over by the caller, who wants it: its faults are never only warnings.
    """

    name: str
    dist: str
    version: str
    source: str
    load: Callable[[], object]
    explicit: bool = False


def find_candidates() -> list[Candidate]:
    """Every entry point of group ``dspark``, by distribution and name.

    Each distribution is read apart: a malformed ``entry_points.txt`` anywhere in the environment costs only its own
    plugins. A distribution that is shadowed by an earlier folder of ``sys.path`` is left out, as imports do.
    """
    found: list[Candidate] = []
    seen: set[str] = set()
    for dist in metadata.distributions():
        try:
            text = dist.read_text("entry_points.txt") or ""
        except (OSError, UnicodeDecodeError):
            continue  # unreadable, so it offers nothing to anybody
        if f"[{ENTRY_POINT_GROUP}]" not in text:  # quick, as most distributions are of no concern
            continue
        name, version = _identity(dist)
        if name not in seen and not _shadowed(name, version):
            seen.add(name)
            found.extend(_entry_points(dist, name, version))
    return sorted(found, key=lambda c: (c.dist, c.name))


def _identity(dist: metadata.Distribution) -> tuple[str, str]:
    try:
        fields = dist.metadata  # parsed once: the properties name and version parse it again each time
        return canonical(fields["Name"] or "unknown"), str(fields["Version"] or "unknown")
    except Exception:  # a distribution without metadata still has its plugins named in errors
        return "unknown", "unknown"


def _shadowed(name: str, version: str) -> bool:
    try:
        return metadata.distribution(name).metadata["Version"] not in (version, None)
    except Exception:  # unknown name or no metadata: nothing to compare with
        return False


def _entry_points(dist: metadata.Distribution, name: str, version: str) -> Iterator[Candidate]:
    try:
        points = list(dist.entry_points.select(group=ENTRY_POINT_GROUP))
    except Exception as err:
        yield Candidate(name, name, version, "entry_points.txt", _raiser("entry_points.txt is malformed", err))
        return
    for point in points:
        yield Candidate(point.name, name, version, point.value, point.load)


def _raiser(message: str, cause: Exception) -> Callable[[], object]:
    def load() -> object:
        raise PluginError(f"{message}: {cause}") from cause

    return load


def check_plugin(plugin: object) -> tuple[str, ...]:
    """Names of the hooks that ``plugin`` implements.

    Raises:
        PluginError: it is a class, was written for another API, misspells a hook or forgot to mark one.
    """
    if isinstance(plugin, type):
        raise PluginError(f"the plugin is the class {plugin.__name__}; give an instance of it, or a module")
    _check_api(plugin)
    hooks: list[str] = []
    for attribute in dir(plugin):
        value = getattr(plugin, attribute, None)
        if not inspect.isroutine(value):
            continue
        options: dict[str, Any] | None = getattr(value, f"{PROJECT}_impl", None)
        name = attribute if options is None else (options.get("specname") or attribute)
        if options is None and not name.startswith(_PREFIX):
            continue
        if name not in HOOKS:
            if options is not None and options.get("optionalhook"):
                continue
            raise PluginError(f"there is no hook {name!r}{nearest(name, HOOKS)}")
        if options is None:
            raise PluginError(f"{name} is not marked with @hookimpl, so it would never be called")
        if options.get("hookwrapper") or options.get("wrapper"):
            raise PluginError(f"{name} is a hook wrapper; hooks of dspark only build and can't be wrapped")
        hooks.append(name)
    return tuple(h for h in HOOKS if h in hooks)


def _check_api(plugin: object) -> None:
    api = getattr(plugin, "DSPARK_API", None)
    if api is None:
        raise PluginError(
            f"it does not declare DSPARK_API; write `DSPARK_API = {DSPARK_API}` in the plugin, for the plugin API that "
            f"it was written for"
        )
    if isinstance(api, bool) or api != DSPARK_API:
        raise PluginError(
            f"it declares DSPARK_API = {api!r}, but this dspark has plugin API {DSPARK_API}; "
            f"install a version of the plugin for API {DSPARK_API}"
        )
