"""What plugins cost at the start: ``python -m benchmarks.catalog``.

Twenty distributions, each with a module, an entry point and one component, are written to a folder on ``sys.path``. In
fresh interpreters, with dspark's plugin modules imported, the time of ``PluginManager().load()`` is taken: metadata of
the whole environment is read, and every plugin is imported, checked and asked. The figure is the median; without
plugins, it is taken too. The bound is 50 ms with twenty.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks._common import describe, machine, write_json

LIMIT_MS = 50.0
PLUGINS = 20

MODULE = """
from dataclasses import dataclass
from dspark.capabilities import SchedulerCapabilities
from dspark.plugins import hookimpl

DSPARK_API = 1

@hookimpl
def dspark_register_schedulers(register):
    register("quick-{i}", "part_{i}.parts:build", config="part_{i}.parts:Config", capabilities=SchedulerCapabilities())
"""

PROBE = """
import json, sys, time
from dspark.plugins import PluginManager
began, cpu = time.perf_counter(), time.process_time()
catalog = PluginManager().load()
seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
components = sum(r.dist != "dspark" for r in catalog.registrations)
print(json.dumps({"seconds": seconds, "cpu": cpu, "components": components}))
"""


def write_plugins(folder: Path, count: int) -> None:
    """``count`` distributions as an installer leaves them."""
    for i in range(count):
        (folder / f"part_{i}.py").write_text(MODULE.replace("{i}", str(i)), encoding="utf-8")
        info = folder / f"part_{i}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: part-{i}\nVersion: 1.0\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(f"[dspark]\npart-{i} = part_{i}\n", encoding="utf-8")


def measure(count: int, repeat: int) -> dict[str, Any]:
    """Milliseconds of loading with ``count`` plugins beside those of the environment."""
    with tempfile.TemporaryDirectory() as folder:
        write_plugins(Path(folder), count)
        environment = {**os.environ, "PYTHONPATH": folder}
        found = []
        for _ in range(repeat + 1):  # the first one writes bytecode
            done = subprocess.run(
                [sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, check=True
            )
            found.append(json.loads(done.stdout.splitlines()[-1]))
    times = [1e3 * f["seconds"] for f in found[1:]]
    return {
        "plugins": count,
        "components": found[0]["components"],
        "median_ms": statistics.median(times),
        "least_ms": min(times),
        "processor_ms": statistics.median(1e3 * f["cpu"] for f in found[1:]),
    }


def main(arguments: Iterable[str] | None = None) -> int:
    """Run; 1 where the bound is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=15, help="fresh interpreters a case")
    parser.add_argument("--no-write", action="store_true", help="leave results/ alone")
    options = parser.parse_args(None if arguments is None else list(arguments))
    about = machine()
    cases = [measure(count, options.repeat) for count in (0, PLUGINS)]
    for case in cases:
        print(
            f"{case['plugins']:2} plugins: median {case['median_ms']:.1f} ms, least {case['least_ms']:.1f} ms, "
            f"processor {case['processor_ms']:.1f} ms"
        )
    print(describe(about))
    if not options.no_write:
        write_json("catalog", {"machine": about, "limit_ms": LIMIT_MS, "cases": cases})
    return int(cases[-1]["median_ms"] >= LIMIT_MS)


if __name__ == "__main__":
    sys.exit(main())
