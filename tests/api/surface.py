"""The public surface, one line a thing: names, signatures, fields, hooks, commands and options.

``python -m tests.api.surface`` (or ``make api``) writes it to ``public.txt``, which the tests compare with the code.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

SNAPSHOT = Path(__file__).with_name("public.txt")

MODULES = ("dspark", "dspark.plugins", "dspark.testing")
"""Packages whose ``__all__`` is public."""

CONTRACTS = ("dspark.protocols", "dspark.abilities", "dspark.types", "dspark.capabilities")
"""Modules that components are written against: every public class of theirs."""


def surface() -> list[str]:
    """All lines, sorted within their groups."""
    from importlib import import_module

    lines: list[str] = []
    for module in MODULES:
        found = import_module(module)
        for name in sorted(found.__all__):
            lines += describe(f"{module}.{name}", getattr(found, name))
    for module in CONTRACTS:
        for name, value in sorted(vars(import_module(module)).items()):
            if inspect.isclass(value) and value.__module__ == module and not name.startswith("_"):
                lines += describe(f"{module}.{name}", value)
    return [*lines, *hooks(), *commands()]


def describe(name: str, value: Any) -> Iterator[str]:
    """Lines of one name."""
    if inspect.isclass(value):
        yield from describe_class(name, value)
    elif inspect.isroutine(value):
        yield f"{name}{signature(value)}"
    elif isinstance(value, (int, str)) and not name.endswith("__version__"):
        yield f"{name} = {value!r}"
    else:
        yield f"{name}: {type(value).__name__}"


def describe_class(name: str, cls: type[Any]) -> Iterator[str]:
    """The class, its constructor, fields and public members, inherited ones of dspark included."""
    bases = ", ".join(b.__name__ for b in cls.__bases__ if b is not object)
    if issubclass(cls, enum.Enum):
        yield f"{name}({bases}): " + ", ".join(f"{m.name} = {m.value!r}" for m in cls)
        return
    yield f"{name}({bases})"
    fields = {f.name for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    if fields or "__init__" in vars(cls):
        yield f"{name}.__init__{signature(cls.__init__)}"
    for attribute, value in sorted(members(cls).items()):
        if attribute in fields:
            continue
        if isinstance(value, property):
            yield f"{name}.{attribute}: property"
        elif inspect.isroutine(value) or isinstance(value, (classmethod, staticmethod)):
            inner = getattr(value, "__func__", value)
            yield f"{name}.{attribute}{signature(inner)}"
        else:
            yield f"{name}.{attribute}"


def members(cls: type[Any]) -> dict[str, Any]:
    """Public attributes and annotations, from dspark's own bases too."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.partition(".")[0] == "dspark":
            found |= dict.fromkeys(inspect.get_annotations(base))
            found |= vars(base)
    return {n: v for n, v in found.items() if not n.startswith("_")}


def signature(function: Any) -> str:
    """Without addresses, and without what differs between Python versions."""
    text = str(inspect.signature(function))
    return re.sub(r"<(\w[\w.]*)[^<>]* at 0x[0-9a-f]+>|<factory>", r"<\1>", text)


def hooks() -> Iterator[str]:
    """Every hook with its arguments, in the order of their file."""
    from dspark.plugins import hookspecs
    from dspark.plugins.discovery import HOOKS

    for name in HOOKS:
        function = getattr(hookspecs, name)
        yield f"hook {name}({', '.join(inspect.signature(function).parameters)})"


def commands() -> Iterator[str]:
    """Every command that ships, with its arguments and options, read off the annotated functions."""
    from importlib import import_module

    from dspark.cli.main import COMMANDS, dspark

    yield from options("command dspark", dspark)
    for name in sorted(COMMANDS):
        own = name.replace("-", "_")
        yield from command(f"command {name}", getattr(import_module(f"dspark.cli.{own}"), own))


def command(name: str, found: Any) -> Iterator[str]:
    """A function, or a group of them in a ``typer.Typer``."""
    yield name
    if inspect.isfunction(found):
        yield from options(name, found)
        return
    if found.registered_callback is not None:
        yield from options(name, found.registered_callback.callback)
    for inner in sorted(found.registered_commands, key=lambda c: c.name or c.callback.__name__):
        yield from command(f"{name} {inner.name or inner.callback.__name__.replace('_', '-')}", inner.callback)


def options(command: str, function: Any) -> Iterator[str]:
    """``--drafter, -d: str = 'ngram'``; an argument in capitals."""
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        info = next((m for m in getattr(hints[name], "__metadata__", ()) if hasattr(m, "param_decls")), None)
        if info is None:
            continue  # a context that typer passes
        argument = type(info).__name__ == "ArgumentInfo"
        declared = (info.default, *(info.param_decls or ()))  # typer takes an annotation's first name for a default
        given = [d for d in declared if isinstance(d, str) and d.startswith("-")]
        names = name.upper() if argument else ", ".join(given) or f"--{name.replace('_', '-')}"
        kind = hints[name].__origin__
        shown = kind.__name__ if inspect.isclass(kind) and not get_args(kind) else str(kind)
        default = "" if parameter.default is inspect.Parameter.empty else f" = {plain(parameter.default)!r}"
        yield f"{command}: {names}: {shown}{default}"


def plain(value: Any) -> Any:
    """Members of enumerations by their value, paths as text."""
    return value.value if isinstance(value, enum.Enum) else value.as_posix() if isinstance(value, Path) else value


def write() -> None:
    """Take what is there as the surface."""
    SNAPSHOT.write_text("\n".join(surface()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
    print(f"{SNAPSHOT}: {len(SNAPSHOT.read_text(encoding='utf-8').splitlines())} lines")
