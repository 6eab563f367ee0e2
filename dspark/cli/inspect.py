"""``dspark inspect``: what a drafter checkpoint is, what it needs, and whether it fits a target."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark.errors import TargetError, nearest

if TYPE_CHECKING:
    from dspark.checkpoints.describe import TargetShape


def inspect(
    checkpoint: Annotated[str, typer.Argument(help="Folder or Hub id of a drafter checkpoint.")],
    target: Annotated[
        str | None, typer.Option(help="A target to fit it to: Hub id, folder, .gguf file, or smollm2.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.")] = None,
    target_revision: Annotated[str | None, typer.Option(help="The same, of the target.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")] = False,
) -> None:
    """Say what a drafter checkpoint is, what it needs, and whether it fits a target. Exit code 1 where it does not."""
    from dspark.checkpoints import load_checkpoint
    from dspark.checkpoints.describe import describe, fit_problems

    shape = None if target is None else _shape_of(target, target_revision)
    loaded = load_checkpoint(checkpoint, revision=revision, target_layers=None if shape is None else shape.layers)
    report = describe(loaded)
    if shape is not None:
        problems = fit_problems(loaded.config, shape)
        report["target"] = {"name": shape.name, "fits": not problems, "problems": problems}
    if json:
        typer.echo(jsonlib.dumps(report, indent=2))
    else:
        _print(report)
    if report["non_finite"] or (shape is not None and not report["target"]["fits"]):
        raise typer.Exit(1)


inspect_command = inspect


def _shape_of(target: str, revision: str | None) -> TargetShape:
    """The shape of a target as the other commands name it, from its config.json alone."""
    from dspark.checkpoints.describe import shape_of_config
    from dspark.checkpoints.load import read_json, resolve_source
    from dspark.targets.load import ALIASES
    from dspark.targets.load import resolve_source as resolve_target

    place = resolve_target(target)
    if "/" not in place and not Path(place).is_dir():
        hint = nearest(target, ALIASES)
        raise TargetError(f"--target {target}: neither a folder, a .gguf file nor a Hub id (owner/name){hint}")
    return shape_of_config(read_json(resolve_source(place, revision, weights=False) / "config.json"), target)


def _print(report: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, title=f"{report['format']} {report['algorithm']}: {report['source']}")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in _rows(report):
        table.add_row(name, Text(value))
    console = Console()
    console.print(table)
    for label, style, lines in _remarks(report):
        for line in lines:
            console.print(Text(f"{label}: {line}", style=style))


def _rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    size = f"{report['parameters'] / 1e6:.2f} M parameters, {report['bytes'] / 2**20:.1f} MiB"
    vocabulary = f"{report['draft_vocabulary']} of {report['vocabulary']} ids (map: {report['vocabulary_map']})"
    rows = [
        *_block_rows(report),
        (
            "taps",
            ", ".join(map(str, report["target_layer_ids"])) + f" (the last layer's would be {report['last_tap']})",
        ),
        ("sequential head", _head(report)),
        ("confidence head", report["confidence"] + (", calibrated" if report["calibration"] else "")),
        ("vocabulary", vocabulary),
        ("embedding, head", f"{report['embedding']}, {report['output_head']}"),
        ("weights", f"{size}, {', '.join(report['dtypes'])}"),
    ]
    rows += [(f"layer {i}", text) for i, text in enumerate(report["layers"])]
    return rows + [("needs" if i == 0 else "", text) for i, text in enumerate(report["needs"])]


def _block_rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    size = report["block_size"]
    if report["layout"] == "autoregressive":
        return [("steps", f"autoregressive, a token a forward: trained on {size}")]
    layout = {"anchor-first": "every slot drafts", "mask-only": "the anchor's slot is unused"}[report["layout"]]
    return [
        ("block", f"{size} inputs, {report['layout']} ({layout}): gamma up to {report['max_gamma']}"),
        ("mask token", str(report["mask_token_id"])),
    ]


def _head(report: Mapping[str, Any]) -> str:
    name = f"{report['head']} {report['head_version']}".strip()
    return name + (f", rank {report['markov_rank']}" if report["markov_rank"] else "")


def _remarks(report: Mapping[str, Any]) -> list[tuple[str, str, list[str]]]:
    out = [
        ("note", "yellow", list(report["notes"])),
        ("non-finite values in", "red", list(report["non_finite"])),
        ("overflows in float16", "yellow", list(report["overflow_in_float16"])),
    ]
    target = report.get("target")
    if target is not None:
        out.append(("does not fit", "red", list(target["problems"])))
        out.append(("fits", "green", [target["name"]] if target["fits"] else []))
    return out
