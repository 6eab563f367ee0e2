"""Keep a plugin's commands from replacing those that are there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dspark.errors import PluginError

_LISTS = ("registered_commands", "registered_groups")


@contextmanager
def guarded_commands(cli: Any) -> Iterator[None]:
    """Undo what is added to a ``typer.Typer`` where the block raises or takes a name that is taken.

    Raises:
        PluginError: naming the commands that are taken.
    """
    before = {name: list(getattr(cli, name, ())) for name in _LISTS}
    callback = getattr(cli, "registered_callback", None)
    taken = _names(cli)

    def restore() -> None:
        for name, items in before.items():
            if hasattr(cli, name):
                getattr(cli, name)[:] = items
        if hasattr(cli, "registered_callback"):
            cli.registered_callback = callback

    try:
        yield
    except BaseException:
        restore()
        raise
    names = _names(cli)
    twice = sorted({n for n in names if names.count(n) > 1})
    replaced = getattr(cli, "registered_callback", None) is not callback
    if twice or replaced or set(taken) - set(names):
        restore()
        what = f"commands {', '.join(twice)} are taken" if twice else "it may not replace what is there"
        raise PluginError(f"{what}; nothing of it was added")


def _names(cli: Any) -> list[str]:
    """Names of an application's commands and groups."""
    names = []
    for command in getattr(cli, "registered_commands", ()):
        names.append(command.name or _command_name(command.callback))
    for group in getattr(cli, "registered_groups", ()):
        inner = group.typer_instance
        given = [n for n in (group.name, inner.info.name) if isinstance(n, str)]
        names.extend(given[:1] or _names(inner))  # a group without a name merges into its parent
    return names


def _command_name(function: Any) -> str:
    return str(function.__name__).lower().replace("_", "-")
