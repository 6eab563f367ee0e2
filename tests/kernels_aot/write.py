"""Write the report of what the kernels take on each architecture:

    python -m tests.kernels_aot.write [--dtypes bfloat16] [architecture ..]

Without dtypes, of models in every one, which takes a quarter of an hour of one core. Architectures that are not named
keep what the report has of them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPORT = Path(__file__).with_name("report.json")


def dtypes_of(names: Sequence[str] | None) -> list[Any] | None:
    """Torch's dtypes by name; None stays None, which is all."""
    import torch

    return None if names is None else [getattr(torch, name) for name in names]


def main() -> None:
    from dspark.ops.triton.aot import ARCHITECTURES, report

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", default=list(ARCHITECTURES))
    parser.add_argument("--dtypes", help="of models, comma-separated")
    options = parser.parse_args()
    names = options.dtypes.split(",") if options.dtypes else None
    found = {"dtypes": names, **report(tuple(options.architectures), dtypes_of(names))}
    if REPORT.exists() and set(options.architectures) != set(ARCHITECTURES):
        known = json.loads(REPORT.read_text(encoding="utf-8"))
        if known["dtypes"] != names:
            raise SystemExit(f"the other architectures were reported for {known['dtypes']}: name all, or these dtypes")
        found["kernels"] = {**known["kernels"], **found["kernels"]}
    found["kernels"] = {a: found["kernels"][a] for a in ARCHITECTURES if a in found["kernels"]}
    REPORT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
