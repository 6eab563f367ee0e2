"""Calls to plugins' hooks, one plugin at a time, with every fault attributed to the one that raised."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pluggy

from dspark.errors import DSparkError, PluginError
from dspark.plugins import hookspecs
from dspark.plugins.cli_guard import guarded_commands
from dspark.plugins.hookspecs import PROJECT
from dspark.plugins.kinds import protocol_members
from dspark.plugins.records import Plugin, warn
from dspark.protocols import RoundObserver

if TYPE_CHECKING:
    from dspark.config import EngineConfig


class HookCalls:
    """The hooks that are called after registration.

    A fault of a plugin that the configuration names is a ``PluginError``; else it is one warning, the plugin's status,
    and the call goes on with the next plugin.
    """

    def __init__(self) -> None:
        self._plugins: list[Plugin] = []
        self._pluggy = pluggy.PluginManager(PROJECT)
        self._pluggy.add_hookspecs(hookspecs)

    def register_commands(self, cli: Any) -> None:
        """Let plugins add commands to a ``typer.Typer``; one that takes a taken name, or raises, adds none."""
        hook = "dspark_register_commands"
        for plugin in self._having(hook):
            with self._isolated(plugin, hook), guarded_commands(cli):
                self._call(plugin, hook, cli=cli)

    def register_routes(self, app: Any) -> None:
        """Let plugins add routes to the server's application."""
        hook = "dspark_register_routes"
        for plugin in self._having(hook):
            with self._isolated(plugin, hook):
                self._call(plugin, hook, app=app)

    def load_checkpoint(self, source: str, config: EngineConfig | None = None) -> Any:
        """The first plugin's answer for a drafter checkpoint, or None where nobody knows its format.

        Raises:
            DSparkError: a plugin knows the format and refuses the checkpoint; with a note that names the plugin.
        """
        hook = "dspark_load_checkpoint"
        for plugin in self._having(hook):
            result = None
            with self._isolated(plugin, hook, own_errors=True):
                result = self._call(plugin, hook, source=source, config=config)
            if result is not None:
                return result
        return None

    def make_observers(self, config: EngineConfig) -> list[tuple[str, RoundObserver]]:
        """The observers that plugins make for an engine, each with its distribution and version for messages."""
        hook = "dspark_make_observers"
        made: list[tuple[str, RoundObserver]] = []
        for plugin in self._having(hook):
            source = f"{plugin.candidate.dist} {plugin.candidate.version}"
            with self._isolated(plugin, hook):
                for answer in self._call(plugin, hook, config=config):
                    made.extend((source, observer) for observer in _observers(answer))
        return made

    def engine_started(self, engine: Any) -> None:
        """Tell plugins that an engine is complete."""
        hook = "dspark_engine_started"
        for plugin in self._having(hook):
            with self._isolated(plugin, hook):
                self._call(plugin, hook, engine=engine)

    def engine_stopped(self, engine: Any) -> None:
        """Tell plugins that an engine was shut down. Faults are warnings, whoever raises."""
        hook = "dspark_engine_stopped"
        for plugin in self._having(hook):
            with self._isolated(plugin, hook, never_fatal=True):
                self._call(plugin, hook, engine=engine)

    def _having(self, hook: str) -> list[Plugin]:
        """Loaded plugins that implement a hook, in pluggy's order: last loaded first, tryfirst and trylast kept."""
        by_id = {id(p.plugin): p for p in self._plugins if p.plugin is not None}
        caller: pluggy.HookCaller = getattr(self._pluggy.hook, hook)
        return [by_id[id(impl.plugin)] for impl in reversed(caller.get_hookimpls())]

    def _call(self, plugin: Plugin, hook: str, **arguments: Any) -> Any:
        """Call one plugin's implementation: a list of its answer, empty for None; the answer of a firstresult hook."""
        others = [p for p in self._pluggy.get_plugins() if p is not plugin.plugin]
        return self._pluggy.subset_hook_caller(hook, remove_plugins=others)(**arguments)

    @contextmanager
    def _isolated(
        self, plugin: Plugin, hook: str, *, own_errors: bool = False, never_fatal: bool = False
    ) -> Iterator[None]:
        """Note what a hook raises; re-raise it only for a plugin that is named, or what it raised knowingly."""
        try:
            yield
        except (Exception, SystemExit) as err:
            if own_errors and isinstance(err, DSparkError):
                err.add_note(f"raised by {plugin} in {hook}")
                raise
            plugin.fail(hook, err)
            if plugin.fatal and not never_fatal:
                raise PluginError(plugin.messages[-1]) from err
            warn(plugin.messages[-1])


def _observers(answer: Any) -> list[RoundObserver]:
    if not isinstance(answer, (list, tuple)):
        raise PluginError(f"expected a list of observers, got {type(answer).__name__}")
    for observer in answer:
        missing = [n for n in protocol_members(RoundObserver) if not callable(getattr(observer, n, None))]
        if missing:
            raise PluginError(f"{type(observer).__name__} is not a RoundObserver: it lacks {', '.join(missing)}")
    return list(answer)
