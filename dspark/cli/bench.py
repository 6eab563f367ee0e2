"""``dspark bench``: speed under load (``sweep``, where no command is named) and whatever else is timed."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from dspark.cli._bench_kernels import kernels
from dspark.cli._bench_sweep import sweep

DEFAULT = "sweep"


class BenchGroup(TyperGroup):
    """Its commands; what is none of them are options of ``sweep``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("--help", "-h"):
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)


bench = typer.Typer(cls=BenchGroup, add_completion=False, no_args_is_help=True)
bench.command(DEFAULT)(sweep)
bench.command("kernels")(kernels)


@bench.callback()
def about() -> None:
    """Measure speed: `dspark bench --data FILE` sweeps over systems and loads."""
