"""The GPU kernels against their floors, torch eager and torch.compile, at Qwen3-4B's sizes.

    python -m benchmarks.kernels [--rows 1,8,64,256] [--compile sm_90,gfx942 | --no-compile] [--write]

On a GPU it times; ``--write`` keeps the result. Without one it lists what each call has to move and to compute, and
compiles what a bfloat16 model launches on an H100, a minute or two. ``--compile`` names other architectures, and
compiles every dtype; ``--no-compile`` leaves it out.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch

from benchmarks._common import RESULTS, machine
from dspark.cli._bench_kernels import compiled, figures, read_rows, show

GOALS = {"bias_sample": (1.25, 5.0), "reject_sample": (1.3, 0.0)}
"""Most over one read of W2 (of the logits), and least over eager at up to 64 rows."""

BRIEFLY = "sm_90"
"""Compiled for where nothing is said, by a machine without a GPU."""


def compilation(asked: str | None, skipped: bool, device: str) -> dict[str, Any] | None:
    """Registers, spills and shared memory; None where nothing is to be compiled.

    Args:
        asked: architectures, comma-separated; None for the default, which is none on a GPU.
        skipped: compile nothing.
        device: type of the device.
    """
    if skipped or (asked is None and device == "cuda"):
        return None
    if asked is not None:
        return compiled(asked.split(","))
    from dspark.ops.triton.aot import report

    return report((BRIEFLY,), [torch.bfloat16])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,8,64,256")
    parser.add_argument("--compile", help="architectures to compile for, comma-separated")
    parser.add_argument("--no-compile", action="store_true", help="compile nothing")
    parser.add_argument("--write", action="store_true", help="keep the result in benchmarks/results")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = figures(device, read_rows(options.rows), 151_936, 256, 7)
    found["compiled"] = compilation(options.compile, options.no_compile, device.type)
    show(found)
    for call in found["calls"]:
        if "milliseconds" in call:
            most, least = GOALS[call["op"]]
            met = call["over_goal_read"] <= most and (call["rows"] > 64 or call["eager_over_ours"] >= least)
            print(f"{call['op']} at {call['rows']} rows: {'meets' if met else 'misses'} its goal")
    if options.write:
        if device.type != "cuda":
            raise SystemExit("--write keeps times, and there is no GPU here")
        path = RESULTS / "kernels.json"
        path.write_text(json.dumps({"machine": machine(), **found}, indent=2) + "\n", encoding="utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
