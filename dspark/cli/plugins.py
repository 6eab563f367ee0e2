"""``dspark plugins``: what is installed, what it registers, and what is wrong with it."""

from __future__ import annotations

import json as jsonlib
import warnings
from collections.abc import Sequence
from typing import Annotated

import typer

from dspark.plugins import DSPARK_API, PluginManager, PluginRecord, PluginWarning

_COLOURS = {"ok": "green", "disabled": "dim", "conflict": "yellow", "error": "red"}


def plugins(
    json: Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")] = False,
) -> None:
    """List the plugins and the components that they register."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)  # the list says the same, one line a plugin
        manager = PluginManager()
        manager.load()
    if json:
        typer.echo(as_json(manager.records))
    else:
        _print_table(manager.records)


def as_json(records: Sequence[PluginRecord]) -> str:
    """``{"api": 1, "plugins": [{name, version, distribution, hooks, components, status, error}]}``."""
    return jsonlib.dumps({"api": DSPARK_API, "plugins": [r.as_dict() for r in records]}, indent=2)


def _print_table(records: Sequence[PluginRecord]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("name", "version", "distribution", "status", "components", "hooks", title="dspark plugins")
    for record in records:
        table.add_row(
            Text(record.name),
            Text(record.version),
            Text(record.distribution),
            Text(record.status, style=_COLOURS[record.status]),
            Text("\n".join(_components(record))),
            Text(", ".join(h.removeprefix("dspark_").removeprefix("register_") for h in record.hooks)),
        )
    console = Console()
    console.print(table)
    for record in records:
        if record.error:
            console.print(Text(f"{record.name}: {record.error}", style=_COLOURS[record.status]))


def _components(record: PluginRecord) -> list[str]:
    """One line a kind: ``drafter: none, ngram``."""
    by_kind: dict[str, list[str]] = {}
    for entry in record.components:
        by_kind.setdefault(entry.kind.label, []).append(entry.name)
    return [f"{kind}: {', '.join(names)}" for kind, names in by_kind.items()]
