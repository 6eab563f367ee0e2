"""Apply every seeded fault to a copy of the package, one at a time, and see the tests that name it fail.

    python -m tests.mutants.run [--jobs 2] [--only SUBSTRING] [--list]

A mutant is killed when its tests run and one of them fails within the time limit. A mutant whose text no longer applies
exactly once, or whose tests fail without it, is an error of the catalog. The exit code is 0 only if all are killed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 30.0


@dataclass(frozen=True)
class Mutant:
    """One seeded fault.

    Attributes:
        name: what is wrong.
        file: source file, relative to the project.
        old: text that occurs exactly once in it; ``new`` replaces it.
        tests: pytest node ids, relative to the project, that must notice.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply(self, root: Path) -> None:
        path = root / self.file
        source = path.read_text(encoding="utf-8")
        count = source.count(self.old)
        if count != 1:
            raise SystemExit(f"mutant {self.name!r}: its text occurs {count} times in {self.file}, expected once")
        path.write_text(source.replace(self.old, self.new), encoding="utf-8")


@dataclass
class Job:
    """A pytest run in a forked child, its output in a file."""

    name: str
    root: Path
    tests: tuple[str, ...]
    pid: int = 0
    started: float = 0.0
    seconds: float = 0.0
    code: int | None = None
    log: Path = field(default_factory=Path)


def copy_package(into: Path) -> Path:
    """The package (with the compiled scheduler, wherever it is installed) and the tests."""
    skip = shutil.ignore_patterns("__pycache__", ".pytest_cache", "*.pyc")
    shutil.copytree(ROOT / "dspark", into / "dspark", ignore=skip)
    shutil.copytree(ROOT / "tests", into / "tests", ignore=skip)
    shutil.copy(ROOT / "pyproject.toml", into / "pyproject.toml")
    if not list((into / "dspark").glob("_sched*.so")) + list((into / "dspark").glob("_sched*.pyd")):
        spec = importlib.util.find_spec("dspark")
        for place in (spec.submodule_search_locations or []) if spec else []:
            for built in Path(place).glob("_sched.*so"):
                shutil.copy(built, into / "dspark" / built.name)
    return into


def preload() -> None:
    """Import what is slow and is not ours, so that children start with it."""
    import hypothesis  # noqa: F401
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import torch
    from transformers.generation import logits_process  # noqa: F401

    torch.set_num_threads(1)
    ours = [name for name in sys.modules if name.partition(".")[0] == "dspark"]
    for name in ours:
        del sys.modules[name]


def start(job: Job) -> None:
    job.log = job.root / "log.txt"
    job.started = time.monotonic()
    sys.stdout.flush()
    job.pid = os.fork()
    if job.pid == 0:
        os._exit(_child(job))


def _child(job: Job) -> int:
    import pytest

    log = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(job.root)
    sys.path[:] = [str(job.root), *(p for p in sys.path if p not in ("", str(ROOT)))]
    import dspark

    if Path(dspark.__file__ or "").resolve().parent != (job.root / "dspark").resolve():
        print(f"imported {dspark.__file__}, not the copy in {job.root}")
        return 99
    quiet = ["-W", "ignore::pytest.PytestAssertRewriteWarning", "-p", "no:cacheprovider", "-p", "no:xdist"]
    options = ["-q", "-x", *quiet, "-o", "addopts=--import-mode=importlib"]
    code = int(pytest.main([*options, *job.tests]))
    sys.stdout.flush()
    return code


def run_all(jobs: Iterable[Job], parallel: int, limit: float, done: Callable[[Job], None]) -> None:
    """Run jobs, at most ``parallel`` at once; a job over the limit is stopped and has code None."""
    waiting, running = list(jobs), list[Job]()
    while waiting or running:
        while waiting and len(running) < parallel:
            running.append(waiting.pop(0))
            start(running[-1])
        time.sleep(0.02)
        for job in list(running):
            pid, status = os.waitpid(job.pid, os.WNOHANG)
            job.seconds = time.monotonic() - job.started
            if pid == 0 and job.seconds > limit:
                os.kill(job.pid, 9)
                os.waitpid(job.pid, 0)
            elif pid == 0:
                continue
            else:
                job.code = os.waitstatus_to_exitcode(status)
            running.remove(job)
            done(job)


def main(arguments: list[str] | None = None) -> int:
    from tests.mutants.catalog import MUTANTS

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="run the mutants whose name contains this")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds a mutant's tests may take")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args(arguments)
    mutants = [m for m in MUTANTS if options.only in m.name]
    if options.list:
        for mutant in mutants:
            print(f"{mutant.name}  [{mutant.file}]  {' '.join(mutant.tests)}")
        return 0
    preload()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        return _run(mutants, Path(folder), options.jobs, options.limit)


def _run(mutants: list[Mutant], folder: Path, parallel: int, limit: float) -> int:
    clean = copy_package(folder / "clean")
    jobs: list[Job] = []
    for i, mutant in enumerate(mutants):
        root = folder / str(i)
        shutil.copytree(clean, root)
        mutant.apply(root)
        jobs.append(Job(mutant.name, root, mutant.tests))
    tests = tuple(sorted({t for m in mutants for t in m.tests}))
    share = [Job(f"unmutated {k}", clean, tests[k::parallel]) for k in range(parallel) if tests[k::parallel]]
    for job in share:
        job.root = folder / job.name.replace(" ", "-")
        shutil.copytree(clean, job.root)
    broken: list[Job] = []
    run_all(share, parallel, 20 * limit, lambda job: broken.append(job) if job.code != 0 else None)
    if broken:
        for job in broken:
            print(job.log.read_text()[-4000:])
        print("the tests fail without any mutant")
        return 2
    print(f"{len(tests)} tests pass unmutated in {sum(j.seconds for j in share):.0f} s")
    alive: list[Job] = []

    def report(job: Job) -> None:
        killed = job.code == 1
        word = "killed" if killed else {None: "TIMEOUT", 0: "SURVIVED"}.get(job.code, f"ERROR {job.code}")
        print(f"{word:9} {job.seconds:5.1f} s  {job.name}", flush=True)
        if not killed:
            alive.append(job)

    run_all(jobs, parallel, limit, report)
    for job in alive:
        print(f"\n--- {job.name}\n{job.log.read_text()[-2500:]}")
    print(f"{len(jobs) - len(alive)} of {len(jobs)} mutants killed")
    return 1 if alive else 0


if __name__ == "__main__":
    raise SystemExit(main())
