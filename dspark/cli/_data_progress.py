"""How far a data run is: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from dspark.training.data_output import Report
    from dspark.training.data_plan import Estimate
    from dspark.training.data_run import DataRun

SECONDS_BETWEEN_LINES = 30.0
SECONDS_BETWEEN_FRAMES = 0.1


@contextmanager
def progress(run: DataRun, plan: Estimate) -> Iterator[Callable[[Report], None]]:
    """Shows reports on standard error as they come."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from dspark.cli._render import console_for

    console = console_for(stderr=True)
    began = time.monotonic()
    totals = {"prompts": plan.prompts, "responses": plan.responses + plan.there}

    def counts(report: Report) -> tuple[int, str]:
        done = report.prompts if report.phase == "prompts" else report.responses
        speed = report.tokens / max(1e-9, time.monotonic() - began)
        return done, f"{report.tokens:,} tokens, {speed:,.0f}/s"

    shown = began

    def due(seconds: float) -> bool:
        nonlocal shown
        if (now := time.monotonic()) - shown < seconds:
            return False
        shown = now
        return True

    if not console.is_terminal:

        def say(report: Report) -> None:
            if due(SECONDS_BETWEEN_LINES):
                done, speed = counts(report)
                typer.echo(f"{done:,} of {totals[report.phase]:,} {report.phase}, {speed}", err=True)

        yield say
        return
    columns = (
        TextColumn("{task.fields[phase]}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"),
        TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as bar:
        report = run.report
        task = bar.add_task("", total=totals[report.phase], completed=counts(report)[0], phase=report.phase)

        def draw(report: Report) -> None:
            if due(SECONDS_BETWEEN_FRAMES):
                done, speed = counts(report)
                bar.update(task, completed=done, total=totals[report.phase], description=speed, phase=report.phase)

        yield draw
        done, speed = counts(report)
        bar.update(task, completed=done, total=totals[report.phase], description=speed, phase=report.phase)
