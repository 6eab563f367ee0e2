"""Run the suite of each package in ``plugins/`` against the wheel of this repository, as its users would have it.

Builds dspark's wheel and each package's, installs both into an environment of its own, and runs the package's tests
there. Third-party libraries (torch and the like) are those of the interpreter that runs this script, which the
environments see behind their own packages; dspark itself comes from the wheel, and that is checked.
"""

from __future__ import annotations

import argparse
import os
import re
import site
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent

QUIET = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

PROBE = """
import importlib, sys
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    print(module.__file__)
"""


class Failed(Exception):
    """A command ended with an error; its output."""


@dataclass(frozen=True)
class Package:
    """A folder of ``plugins/``."""

    folder: Path

    @property
    def name(self) -> str:
        """Its distribution's."""
        return str(tomllib.loads((self.folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"])

    @property
    def module(self) -> str:
        """Its import name."""
        return self.name.replace("-", "_")


def call(*command: str | Path, cwd: Path = ROOT, environment: Mapping[str, str] | None = None) -> str:
    """Run a command; its output.

    Raises:
        Failed: with the output, where it ended with an error.
    """
    variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX")}
    variables |= {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **(environment or {}),
    }
    done = subprocess.run(
        [str(c) for c in command], cwd=cwd, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        raise Failed(f"$ {' '.join(map(str, command))}\n{done.stdout}")
    return done.stdout


def uv(*command: str | Path) -> str:
    """Run uv, which is installed beside this interpreter."""
    return call(sys.executable, "-m", "uv", *command, environment={"PYO3_PYTHON": sys.executable})


def only(folder: Path) -> Path:
    """The wheel in a folder."""
    (wheel,) = folder.glob("*.whl")
    return wheel


def build_dspark(folder: Path) -> Path:
    """This repository's wheel."""
    build = ("build", "--release", "--quiet", "--interpreter", sys.executable, "--out", folder)
    call(sys.executable, "-m", "maturin", *build)
    return only(folder)


def interpreter(environment: Path) -> Path:
    """Python of an environment."""
    return environment / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def install(package: Package, dspark: Path, folder: Path) -> Path:
    """A new environment with the two wheels, and this interpreter's libraries behind them; its Python.

    The libraries' folder is named in a ``.pth``: its own ``.pth`` files are then not read, so what is installed in
    development mode there can't be imported.
    """
    uv("build", "--wheel", "--quiet", "--out-dir", folder / "wheel", package.folder)
    environment = folder / "environment"
    uv("venv", "--quiet", "--python", sys.executable, environment)
    python = interpreter(environment)
    uv("pip", "install", "--quiet", "--no-deps", "--python", python, dspark, only(folder / "wheel"))
    (own,) = {Path(p) for p in call(python, "-c", "import site; print(*site.getsitepackages(), sep='\\n')").split()}
    (own / "libraries.pth").write_text("\n".join(site.getsitepackages()) + "\n", encoding="utf-8")
    found = call(python, "-P", "-c", PROBE, "dspark", package.module).split("\n")[:2]
    strangers = [path for path in found if environment.resolve() not in Path(path).resolve().parents]
    if strangers:
        raise Failed(f"{package.name}: not from the wheels: {', '.join(strangers)}")
    return python


def check(package: Package, dspark: Path, folder: Path) -> tuple[bool, str]:
    """Whether a package's suite passes, and what there is to say."""
    began = time.monotonic()
    try:
        python = install(package, dspark, folder / package.name)
        said = call(python, "-P", "-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider", cwd=package.folder)
    except Failed as failed:
        return False, f"=== {package.name}\n{failed}"
    last = [line for line in said.splitlines() if re.search(r"\d passed", line)]
    summary = last[-1].strip("= ") if last else "no test ran"
    return bool(last), f"=== {package.name}: {summary}; {time.monotonic() - began:.0f} s with its installation"


def main() -> int:
    """The command; 0 where all passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", help="names of folders; all of them by default")
    parser.add_argument("--jobs", type=int, default=2, help="packages at a time (default 2)")
    arguments = parser.parse_args()
    began = time.monotonic()
    known = {p.parent.name: Package(p.parent) for p in sorted(HERE.glob("*/pyproject.toml"))}
    unknown = sorted(set(arguments.packages) - set(known))
    if unknown:
        parser.error(f"no package {', '.join(unknown)} (there are: {', '.join(known)})")
    chosen = [known[name] for name in arguments.packages or known]
    with tempfile.TemporaryDirectory(prefix="dspark-plugins-") as made:
        folder = Path(made)
        try:
            dspark = build_dspark(folder / "dspark")
        except Failed as failed:
            print(failed)
            return 1
        print(f"built {dspark.name} in {time.monotonic() - began:.0f} s", flush=True)
        with ThreadPoolExecutor(arguments.jobs) as pool:
            results = []
            for passed, text in pool.map(lambda p: check(p, dspark, folder), chosen):
                print(text, flush=True)
                results.append(passed)
    bad = results.count(False)
    seconds = time.monotonic() - began
    print(f"{len(results) - bad} packages passed{f', {bad} failed' if bad else ''} in {seconds:.1f} s")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
