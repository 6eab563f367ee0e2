"""``dspark export``: a drafter checkpoint in another format."""

from __future__ import annotations

import dataclasses
import json as jsonlib
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Format(StrEnum):
    """Formats that are written."""

    deepspec = "deepspec"
    speculators = "speculators"


def export(
    checkpoint: Annotated[str, typer.Argument(help="Folder or Hub id of a drafter checkpoint.")],
    to: Annotated[Format, typer.Option(help="Format to write.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write; it must not hold anything yet.")],
    target: Annotated[
        str | None,
        typer.Option(
            help="The target, as a Hub id, folder, .gguf file or smollm2: gives the embedding and head that a format "
            "asks for."
        ),
    ] = None,
    target_name: Annotated[
        str | None, typer.Option(help="What to call the target in the config, if not as the checkpoint or --target do.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.")] = None,
    target_revision: Annotated[str | None, typer.Option(help="The same, of the target.")] = None,
    keep_embeddings: Annotated[
        bool, typer.Option("--keep-embeddings", help="speculators: store embedding and head if the checkpoint does.")
    ] = False,
    borrow_head: Annotated[
        bool,
        typer.Option(
            "--borrow-head",
            help="speculators: leave out the head of a pruned vocabulary, which is rows of the target's. Only dspark "
            "reads that; export it again to have the head back.",
        ),
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a folder that exists.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")] = False,
) -> None:
    """Write a drafter checkpoint in another format. What the format can't say is refused with the reason."""
    from dspark.checkpoints import load_checkpoint, read_target, write_deepspec, write_speculators
    from dspark.errors import ConfigError
    from dspark.targets.load import resolve_source as resolve_target

    if keep_embeddings and to is Format.deepspec:
        raise ConfigError("--keep-embeddings: DeepSpec's format stores embedding and head in any case")
    if borrow_head and (keep_embeddings or to is Format.deepspec):
        raise ConfigError("--borrow-head: only for speculators' format, and not together with --keep-embeddings")
    parts = None if target is None else read_target(resolve_target(target), target_revision)
    if parts is not None and target is not None:
        parts = dataclasses.replace(parts, name=target)
    loaded = load_checkpoint(checkpoint, revision=revision, target_layers=None if parts is None else parts.layers)
    if target_name is not None:
        loaded = dataclasses.replace(loaded, config=dataclasses.replace(loaded.config, target_name=target_name))
    if to is Format.deepspec:
        notes = write_deepspec(output, loaded, target=parts, overwrite=overwrite)
    else:
        notes = write_speculators(
            output,
            loaded,
            target=parts,
            keep_embeddings=keep_embeddings,
            borrow_head=borrow_head,
            overwrite=overwrite,
        )
    if json:
        typer.echo(jsonlib.dumps({"format": to.value, "folder": str(output), "notes": list(notes)}, indent=2))
        return
    source = loaded.config.source_format
    typer.echo(f"wrote {output}: {to.value}{'' if source == to.value else f', from {source}'}")
    for note in notes:
        typer.echo(f"note: {note}")
