"""The GPU kernels against their floors, torch eager and torch.compile, at Qwen3-4B's sizes.

    python -m benchmarks.kernels [--rows 1,8,64,256] [--compile sm_90,gfx942] [--write]

On a GPU it times; ``--write`` keeps the result. Without one it lists what each call has to move and to compute, and
compiles for the architectures that are named.
"""

from __future__ import annotations

import argparse
import json

import torch

from benchmarks._common import RESULTS, machine
from dspark.cli._bench_kernels import compiled, figures, read_rows, show

GOALS = {"bias_sample": (1.25, 5.0), "reject_sample": (1.3, 0.0)}
"""Most over one read of W2 (of the logits), and least over eager at up to 64 rows."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,8,64,256")
    parser.add_argument("--compile", default="", help="architectures to compile for, comma-separated")
    parser.add_argument("--write", action="store_true", help="keep the result in benchmarks/results")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = figures(device, read_rows(options.rows), 151_936, 256, 7)
    found["compiled"] = compiled(options.compile.split(",")) if options.compile else None
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
