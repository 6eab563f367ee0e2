"""``dspark new-plugin``: a package with one component that passes its own tests."""

from __future__ import annotations

import keyword
import re
from enum import StrEnum
from importlib import resources
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from dspark.errors import PluginError

LABELS = {
    "head": "sequential head",
    "drafter": "drafter",
    "estimator": "confidence estimator",
    "scheduler": "scheduler",
    "verifier": "verifier",
    "observer": "round observer",
}

USES = {
    "head": "Train with it by `drafter.head: ${name}/${part}` in the file that `dspark train` reads; the checkpoint "
    "then names it, and `dspark generate --drafter CHECKPOINT` decodes with it.",
    "drafter": 'Decode with it: `dspark generate "Once upon a time" --drafter ${name}/${part}`.',
    "estimator": 'Decode with it: `dspark generate "Once upon a time" --estimator ${name}/${part}`.',
    "scheduler": 'Decode with it: `dspark generate "Once upon a time" --scheduler ${name}/${part}`.',
    "verifier": 'Decode with it: `dspark generate "Once upon a time" --set verifier=${name}/${part} --temperature 1`.',
    "observer": "Every engine has one while this package is installed.",
}


class PluginKind(StrEnum):
    """What a new plugin offers."""

    HEAD = "head"
    DRAFTER = "drafter"
    ESTIMATOR = "estimator"
    SCHEDULER = "scheduler"
    VERIFIER = "verifier"
    OBSERVER = "observer"


def new_plugin(
    name: Annotated[str, typer.Argument(help="Name of the distribution, such as dspark-head-mine.")],
    kind: Annotated[PluginKind, typer.Option("--kind", "-k", help="What it offers.")],
    folder: Annotated[
        Path | None, typer.Option("--folder", "-o", help="Where its package goes; a folder of its name by default.")
    ] = None,
) -> None:
    """Write a plugin's package: one component, its tests, and what installs it."""
    written = write_plugin(name, kind.value, folder or Path(name))
    for path in written:
        typer.echo(path.as_posix())
    typer.echo(f"\nNext: cd {(folder or Path(name)).as_posix()} && pip install -e '.[test]' && pytest")


def write_plugin(name: str, kind: str, folder: Path) -> list[Path]:
    """Write the package of a plugin.

    Args:
        name: of the distribution.
        kind: one of :class:`PluginKind`.
        folder: where to; made anew.

    Returns:
        the files.

    Raises:
        PluginError: a name that can't be, or a folder that is not empty.
    """
    names = plugin_names(name, kind)
    if folder.exists() and any(folder.iterdir()):
        raise PluginError(f"{folder}: the folder is not empty")
    package, module = names["package"], names["module"]
    files = {
        "pyproject.toml": "pyproject.toml",
        "README.md": "README.md",
        f"{package}/__init__.py": "init.py",
        f"{package}/plugin.py": f"{kind}/plugin.py",
        f"{package}/{module}.py": f"{kind}/part.py",
        f"tests/test_{module}.py": f"{kind}/test.py",
    }
    written = []
    for path, template in files.items():
        text = resources.files("dspark.cli").joinpath(f"templates/{template}.txt").read_text(encoding="utf-8")
        made = folder / path
        made.parent.mkdir(parents=True, exist_ok=True)
        made.write_text(Template(text).substitute(names), encoding="utf-8")
        written.append(made)
    return written


def plugin_names(name: str, kind: str) -> dict[str, str]:
    """What a distribution's package, module, class and component are called: ``dspark-head-conv`` offers ``conv``.

    Raises:
        PluginError: for what is no name, or is taken by dspark.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*", name):
        raise PluginError(f"{name!r} is no name of a plugin: use lower case letters, digits and '-', such as my-{kind}")
    package = name.replace("-", "_")
    part = re.sub(rf"^(dspark-)?({kind}-)?", "", name.replace("_", "-")) or name
    if package == "dspark" or keyword.iskeyword(package):
        raise PluginError(f"{name!r} is taken: choose another name, such as {name}-{kind}")
    cls = "".join(word.capitalize() for word in part.split("-"))
    cls = f"Part{cls}" if cls[0].isdigit() else cls
    names = {"name": name, "package": package, "part": part, "module": kind, "cls": cls, "label": LABELS[kind]}
    return {**names, "use": Template(USES[kind]).substitute(names)}
