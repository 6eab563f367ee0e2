"""The ``dspark`` command: lists its commands, imports one when it is called, and turns errors into one line.

A command ``name`` is the function ``name`` in ``dspark.cli.name``, with typer's annotations; it returns nothing. A
typer app of that name is a group of commands.
In Python, its hyphens are underscores.
``dspark --help`` imports none of these modules, and neither torch nor transformers.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from dspark import __version__
from dspark.errors import ConfigError, DSparkError, DSparkWarning, PluginError, nearest

COMMANDS = {
    "demo": "Decode real prompts plainly and speculatively, and compare.",
    "generate": "Decode your own prompt, chat or file of prompts.",
    "serve": "Serve a model behind OpenAI's interface, with a live page.",
    "data": "Let the target answer prompts, for training a drafter.",
    "train": "Train a drafter for a target.",
    "inspect": "Say what a drafter checkpoint is, what it needs, and whether it fits a target.",
    "export": "Write a drafter checkpoint in DeepSpec's or speculators' format.",
    "profile": "Measure what forwards and drafts cost here, and keep it for engines to plan with.",
    "advise": "Say whether drafting is worth it here, with which gamma and scheduler.",
    "bench": "Measure speed under load, against plain decoding, static gammas and others.",
    "simulate": "Replay recorded drafts under a cost curve and a load, with the real schedulers.",
    "calibrate": "Fit temperatures for a drafter's confidences, and write them into its checkpoint.",
    "eval": "Measure one drafter or several: accepted length, positions, thresholds, calibration.",
    "doctor": "Check the environment, the plugins and a target; a control run says who differs.",
    "plugins": "List the plugins and the components that they register.",
    "new-plugin": "Write a plugin's package: one component, its tests, and what installs it.",
}
"""Commands that ship: name -> the line that ``--help`` shows."""

PLUGIN_PANEL = "Commands of plugins"


def command_from(function: Any, name: str) -> Any:
    """The command that typer makes of an annotated function; a group, of a typer app."""
    if isinstance(function, typer.Typer):
        group = typer.main.get_group(function)
        group.name = name
        return group
    app = typer.Typer(add_completion=False)
    app.command(name)(function)
    return typer.main.get_command(app)


class LazyCommand(TyperCommand):
    """Stands for a command that ships, and imports it when it is called."""

    def load(self) -> Any:
        """Import the command.

        Raises:
            DSparkError: naming the command and what could not be imported.
        """
        try:
            name = str(self.name).replace("-", "_")
            module = import_module(f"dspark.cli.{name}")
        except ImportError as err:
            raise DSparkError(f"the command {self.name!r} can't be loaded: {err}") from err
        return command_from(getattr(module, name), str(self.name))

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return self.load().make_context(info_name, args, parent=parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        return ctx.command.invoke(ctx)


class CommandGroup(TyperGroup):
    """The commands that ship, then those of plugins, which are loaded for ``--help`` or an unknown name."""

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        self._plugins_loaded = False
        for name, text in COMMANDS.items():
            self.add_command(LazyCommand(name, help=text))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name, or None."""
        if cmd_name not in self.commands:
            self._load_plugins()
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the order of ``--help``."""
        self._load_plugins()
        return list(self.commands)

    def _load_plugins(self) -> None:
        if self._plugins_loaded:
            return
        self._plugins_loaded = True
        for name, command in plugin_commands():
            self.add_command(command, name)


def plugin_commands() -> list[tuple[str, Any]]:
    """Commands that plugins register through ``dspark_register_commands``. What is wrong with one costs it its own."""
    app = typer.Typer(add_completion=False)
    for name in COMMANDS:  # so that a plugin which takes one of these names is refused
        app.command(name)(_placeholder)
    try:
        from dspark.plugins.manager import PluginManager

        manager = PluginManager()
        manager.load()
        manager.register_commands(app)
    except (DSparkError, ImportError) as err:
        typer.echo(f"dspark: plugins are left out: {one_line(err)}", err=True)
        return []
    group = typer.main.get_group(app)
    found = [(name, command) for name, command in group.commands.items() if name not in COMMANDS]
    for _, command in found:
        command.rich_help_panel = PLUGIN_PANEL  # type: ignore[attr-defined]
    return found


def _placeholder() -> None:
    """Stands for a command that ships."""


def one_line(err: BaseException) -> str:
    """What an exception says, on one line."""
    return " ".join(str(err).split()) or type(err).__name__


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"dspark {__version__}")
        raise typer.Exit


def _set_debug(ctx: typer.Context, value: bool) -> bool:
    ctx.ensure_object(dict)["debug"] = value
    return value


def _to_environment(ctx: typer.Context, param: typer.CallbackParam, value: str | None) -> str | None:
    if value is not None:  # where the plugin manager reads it, whoever makes one
        source = ctx.get_parameter_source(str(param.name))
        if param.name == "plugins" and source is not None and source.name == "COMMANDLINE":
            _check_installed(value)
        os.environ[f"DSPARK_{param.name}".upper()] = value
    return value


def _check_installed(names: str) -> None:
    """Refuse a plugin of ``--plugins`` that is not there: who types its name means it.

    Raises:
        PluginError: with the nearest name.
    """
    from dspark.plugins.discovery import find_candidates
    from dspark.plugins.kinds import canonical

    known = {name for c in find_candidates() for name in (c.dist, canonical(c.name))}
    for name in filter(None, (n.strip() for n in names.split(","))):
        if canonical(name) not in known:
            listed = ", ".join(sorted(known)) or "none"
            hint = nearest(canonical(name), known)
            raise PluginError(f"--plugins: no plugin {name!r} is installed{hint} (installed: {listed})")


def dspark(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and leave.", callback=_show_version, is_eager=True)
    ] = False,
    debug: Annotated[
        bool,
        typer.Option(
            "--debug", help="Show an error's traceback.", envvar="DSPARK_DEBUG", callback=_set_debug, is_eager=True
        ),
    ] = False,
    plugins: Annotated[
        str | None,
        typer.Option(
            help="Load the plugins of these distributions alone, comma-separated; '' for none.",
            envvar="DSPARK_PLUGINS",
            callback=_to_environment,
            is_eager=True,
        ),
    ] = None,
    disable_plugins: Annotated[
        str | None,
        typer.Option(
            help="Do not load the plugins of these distributions, comma-separated.",
            envvar="DSPARK_DISABLE_PLUGINS",
            callback=_to_environment,
            is_eager=True,
        ),
    ] = None,
) -> None:
    """Lossless speculative decoding for Hugging Face causal language models."""


@contextmanager
def warnings_on_one_line() -> Iterator[None]:
    """Show dspark's own warnings as ``dspark: warning: ...``, and others as ever."""
    with warnings.catch_warnings():
        others = warnings.showwarning

        def show(message: Any, category: Any, *where: Any, **more: Any) -> None:
            if issubclass(category, DSparkWarning):
                typer.echo(f"dspark: warning: {one_line(message)}", err=True)
            else:
                others(message, category, *where, **more)

        warnings.showwarning = show
        yield


def build() -> Any:
    """The whole command."""
    app = typer.Typer(name="dspark", cls=CommandGroup, no_args_is_help=True, add_completion=False)
    app.callback()(dspark)
    return typer.main.get_command(app)


def main(args: Sequence[str] | None = None) -> None:
    """Run ``dspark``.

    Exit codes: 0; 2 for wrong usage or configuration: an option, a setting, a component or a plugin that can't be as
    it is given; 1 for anything else that dspark explains; 130 after an interruption.

    Args:
        args: arguments without the program's name; None for those of the process.
    """
    state: dict[str, Any] = {}
    try:
        with warnings_on_one_line():
            build().main(args=None if args is None else list(args), prog_name="dspark", obj=state)
    except DSparkError as err:
        if state.get("debug"):
            raise
        typer.echo(f"dspark: {one_line(err)}", err=True)
        sys.exit(2 if isinstance(err, (ConfigError, PluginError)) else 1)


if __name__ == "__main__":
    main()
