"""What the benchmarks share: the process's environment, what machine it is, and where results go."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import sys
import time
from pathlib import Path
from typing import Any

from dspark.server.memory import keep_memory

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "results.md"


def prepare() -> None:
    """Quiet libraries and a steady allocator, for everything that this process measures, whosever code it is."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    keep_memory()
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def machine() -> dict[str, Any]:
    """Date, processor, cores, threads, memory and versions, for the head of a result."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = [round(x, 2) for x in os.getloadavg()] if hasattr(os, "getloadavg") else []
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": _processor(),
        "cores": cores,
        "torch_threads": torch.get_num_threads(),
        "memory_gib": _memory_gib(),
        "load_average_at_start": load,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("dspark", "torch", "transformers", "numpy")},
    }


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="ascii"), re.MULTILINE)
    except (OSError, UnicodeDecodeError):
        found = None
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def _memory_gib() -> int | None:
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return None
    return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30)


def describe(about: dict[str, Any]) -> str:
    """The machine in one sentence."""
    return (
        f"{about['date']}, {about['cpu']}, {about['cores']} cores ({about['torch_threads']} threads), "
        f"{about['memory_gib']} GiB, {about['system']}, Python {about['python']}, torch {about['torch']}, "
        f"transformers {about['transformers']}, dspark {about['dspark']}."
    )


def table(head: list[str], rows: list[list[str]], left: int = 1) -> str:
    """A markdown table; columns after the first ``left`` are aligned right."""
    rule = ["---" if i < left else "--:" for i in range(len(head))]
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, rule, *rows])


def write_json(name: str, result: dict[str, Any]) -> Path:
    """Store a result as ``results/name.json``."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return path


def read_json(name: str) -> dict[str, Any] | None:
    """A stored result, or None."""
    path = RESULTS / f"{name}.json"
    if not path.is_file():
        return None
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


def write_section(name: str, text: str, page: Path = PAGE) -> None:
    """Replace what stands between ``<!-- name:begin -->`` and ``<!-- name:end -->`` in the results page.

    Raises:
        ValueError: the page has no such marks.
    """
    old = page.read_text(encoding="utf-8")
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if begin not in old or end not in old:
        raise ValueError(f"{page} has no section {begin} .. {end}")
    before, rest = old.split(begin, 1)
    after = rest.split(end, 1)[1]
    page.write_text(f"{before}{begin}\n{text.strip()}\n{end}{after}", encoding="utf-8")


class Progress:
    """One line a block, with the seconds since the start."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.perf_counter() - self._began

    def __call__(self, text: str) -> None:
        print(f"[{self.seconds:7.1f} s] {text}", flush=True, file=sys.stdout)
