"""Write the report of what the kernels take on each architecture: ``python -m tests.kernels_aot.write``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

REPORT = Path(__file__).with_name("report.json")


def main() -> None:
    from dspark.ops.triton.aot import ARCHITECTURES, report

    asked = tuple(sys.argv[1:]) or ARCHITECTURES
    found = report(asked)
    if REPORT.exists() and asked != ARCHITECTURES:
        known = json.loads(REPORT.read_text(encoding="utf-8"))
        found["kernels"] = {**known["kernels"], **found["kernels"]}
    found["kernels"] = {a: found["kernels"][a] for a in ARCHITECTURES if a in found["kernels"]}
    REPORT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
