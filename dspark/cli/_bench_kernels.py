"""``dspark bench kernels``: floors, times and tile sizes of the GPU kernels."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import Annotated, Any

import typer

from dspark.errors import ConfigError, DSparkError


def kernels(
    rows: Annotated[str, typer.Option(help="Numbers of rows, comma-separated.")] = "1,8,64,256",
    vocab: Annotated[int, typer.Option(min=1, help="Vocabulary.")] = 151_936,
    rank: Annotated[int, typer.Option(min=0, help="Rank of the sequential head.")] = 256,
    gamma: Annotated[int, typer.Option(min=1, help="Block size.")] = 7,
    device: Annotated[str, typer.Option("--device", "-d", help="A device, or auto.")] = "auto",
    compile_for: Annotated[
        str | None, typer.Option("--compile", help="Compile for these architectures, comma-separated, and list usage.")
    ] = None,
    tune: Annotated[bool, typer.Option("--tune", help="Find the quickest tiles on this GPU.")] = False,
    write: Annotated[
        Path | None, typer.Option(help="Where --tune writes the table; by default, the table that is installed.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")] = False,
) -> None:
    """Time the GPU kernels against their floors, torch eager and torch.compile; without a GPU, list the floors."""
    import torch

    where = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    if tune:
        found = tuned_table(where, write)
    else:
        found = figures(where, read_rows(rows), vocab, rank, gamma)
        found["compiled"] = compiled(compile_for.split(",")) if compile_for else None
    if json:
        typer.echo(jsonlib.dumps(found, indent=2))
    elif not tune:
        show(found)


def read_rows(text: str) -> list[int]:
    """Numbers of rows.

    Raises:
        ConfigError: what is no positive number.
    """
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError as err:
        raise ConfigError(f"--rows: expected numbers such as 1,8,64, got {text!r}") from err
    if any(n < 1 for n in found):
        raise ConfigError(f"--rows: expected positive numbers, got {text!r}")
    return found


def figures(device: Any, rows: list[int], vocab: int, rank: int, gamma: int) -> dict[str, Any]:
    """Floors of every call and, on a GPU, times."""
    import torch

    from dspark.ops.triton.launch import architecture
    from dspark.ops.triton.measure import OPS, Size, bandwidth, floor_of, measure, product_rate

    sizes = [(op, Size(n, vocab, rank, gamma)) for op in OPS for n in rows]
    found: dict[str, Any] = {"device": str(device), "architecture": architecture(device)}
    if device.type == "cuda":
        rates = bandwidth(device), product_rate(device, torch.bfloat16)
        found |= {"bytes_per_second": rates[0], "operations_per_second": rates[1]}
        found["calls"] = [measure(op, size, device, rates) for op, size in sizes]
        return found
    found["calls"] = []
    for op, size in sizes:
        floor = floor_of(op, size)
        found["calls"].append(
            {"op": op, "rows": size.rows, "moved_bytes": floor.moved, "operations": floor.operations,
             "goal_bytes": floor.goal_bytes}
        )  # fmt: skip
    return found


def compiled(architectures: list[str]) -> dict[str, Any]:
    """Registers, spills and shared memory of every kernel; see :mod:`dspark.ops.triton.aot`."""
    from dspark.ops.triton.aot import report
    from dspark.ops.triton.launch import interpreted

    if interpreted():
        raise DSparkError("TRITON_INTERPRET is set, which excludes compiling: unset it")
    return report(tuple(architectures))


def tuned_table(device: Any, write: Path | None) -> dict[str, Any]:
    """Find tiles and write them into the table, where they replace those of this architecture.

    Raises:
        DSparkError: no GPU, or the table can't be written.
    """
    import torch

    from dspark.ops.triton import launch
    from dspark.ops.triton.measure import tune

    if device.type != "cuda":
        raise DSparkError("--tune times kernels and needs a GPU; the table that is installed serves until then")
    path = write if write is not None else Path(launch.__file__).with_name(launch.TABLE)
    table = jsonlib.loads(Path(launch.__file__).with_name(launch.TABLE).read_text(encoding="utf-8"))
    name = launch.architecture(device)
    for op, entry in tune(device, typer.echo).items():
        table["tiles"].setdefault(op, {})[name] = entry
    table["measured"][name] = {"device": torch.cuda.get_device_name(device), "torch": torch.__version__}
    try:
        path.write_text(jsonlib.dumps(table, indent=1) + "\n", encoding="utf-8")
    except OSError as err:
        raise DSparkError(f"{path} can't be written ({err}): name another file by --write") from err
    typer.echo(f"wrote {path}")
    return {"architecture": name, "path": str(path), "tiles": {op: table["tiles"][op][name] for op in table["tiles"]}}


def show(found: dict[str, Any]) -> None:
    """Figures for people."""
    from dspark.cli._render import console_for, table_for

    console = console_for()
    if "bytes_per_second" in found:
        console.print(
            f"{found['architecture']}: copies {found['bytes_per_second'] / 1e9:.0f} GB/s, "
            f"multiplies {found['operations_per_second'] / 1e12:.0f} Tflop/s",
            markup=False,
        )
        table = table_for(
            console, "operation", "rows", "ms", "over its floor", "over one read\nof W2 or logits", "eager / ours",
            "compiled / ours",
        )  # fmt: skip
        for c in found["calls"]:
            ratios = (c["over_floor"], c["over_goal_read"], c["eager_over_ours"], c["compiled_over_ours"])
            table.add_row(c["op"], str(c["rows"]), f"{c['milliseconds']['ours']:.4f}", *(f"{x:.2f}" for x in ratios))
    else:
        console.print("no GPU here: what a call has to move and to compute at least", markup=False)
        table = table_for(console, "operation", "rows", "MB", "Gflop", "MB of W2 or logits")
        for c in found["calls"]:
            values = (c["moved_bytes"] / 1e6, c["operations"] / 1e9, c["goal_bytes"] / 1e6)
            table.add_row(c["op"], str(c["rows"]), *(f"{x:.1f}" for x in values))
    console.print(table)
    for architecture, entries in (found.get("compiled") or {}).get("kernels", {}).items():
        table = table_for(console, "kernel", "registers", "spills", "shared bytes", title=architecture)
        for label, use in entries.items():
            table.add_row(label, *(str(use[name]) for name in ("registers", "spills", "shared")))
        console.print(table)
