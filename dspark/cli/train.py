"""``dspark train``: train a drafter for a target."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Annotated, Any

import typer

FEW_PRIMITIVES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
"""oneDNN keeps what it compiled for each shape, 1,024 of them by default. Shapes of a step depend on what it drew, so
that in bfloat16 on a CPU hardly one comes again, and they would fill three gibibytes."""


def train(
    config: Annotated[Path, typer.Argument(help="Settings of the run: a .yaml, .toml or .json file.")],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Override a setting: optim.lr=1e-3. Repeatable."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in run.output.")] = False,
    fill_cache: Annotated[bool, typer.Option("--fill-cache", help="Only run the target, and fill data.cache.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say how large the target cache would be, and what is left out.")
    ] = False,
) -> None:
    """Train a drafter. The result is a folder that generate, demo and from_pretrained take as a drafter.

    Ctrl-C ends the run after its step, with a checkpoint that --resume goes on from.
    """
    os.environ.setdefault(*FEW_PRIMITIVES)
    from dspark.errors import TrainingError
    from dspark.training.checkpoint import checkpoints
    from dspark.training.config import TrainConfig
    from dspark.training.config_file import override, read_file
    from dspark.training.run import DRAFTER, Run

    run = Run(TrainConfig.of(override(read_file(config), settings or [])), say=typer.echo)
    if dry_run:
        filler = run.filler()
        typer.echo(f"left out: {filler.skipped}")
        typer.echo(filler.estimate())
        filler.check_budget(run.config.data.cache_budget_gib)
        return
    if fill_cache:
        run.fill()
        return
    last = checkpoints(run.output)
    if resume and not last:
        raise TrainingError(f"--resume: no checkpoint in {run.output}")
    if last and not resume:
        raise TrainingError(f"{run.output} holds a run ({last[-1].name}): --resume goes on, or name another run.output")
    trainer = run.train(last[-1] if resume else None, stop_on_signals)
    state = "done" if trainer.step == trainer.steps else f"stopped at step {trainer.step} of {trainer.steps}"
    run.say(f"{state}; the drafter is in {run.output / DRAFTER}")


def stop_on_signals(trainer: Any) -> None:
    """End the run after its step when asked to; at the second time at once."""

    def ask(number: int, _: Any) -> None:
        trainer.stopping = True
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ask)
