"""Real distributions for plugin tests: a module and a dist-info folder on sys.path, found by importlib.metadata."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HEADER = """
from dataclasses import dataclass
from dspark.capabilities import *
from dspark.plugins import hookimpl

DSPARK_API = 1
"""

SCHEDULER = """
@dataclass(frozen=True)
class Config:
    value: int = 1

class Scheduler:
    capabilities = SchedulerCapabilities()
    def __init__(self, config):
        self.value = config.value
        self.module = __name__
    def plan(self, batch, cost): ...
    def release(self, slot, generation): ...

def build(config, context):
    return Scheduler(config)
"""


class Site:
    """A folder of ``sys.path`` that distributions are written to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(
        self,
        dist: str,
        source: str,
        *,
        version: str = "1.0",
        entry: str | None = None,
        points: str | None = None,
        header: str = HEADER,
    ) -> str:
        """Install a distribution with one module of plugin source; returns the module's name."""
        module = f"{dist.replace('-', '_').lower()}_{self.folder.name}".replace("-", "_").replace(".", "_")
        (self.folder / f"{module}.py").write_text(header + source, encoding="utf-8")
        info = self.folder / f"{dist.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n", encoding="utf-8")
        text = points if points is not None else f"[dspark]\n{entry or dist} = {module}\n"
        (info / "entry_points.txt").write_text(text, encoding="utf-8")
        importlib.invalidate_caches()
        return module

    def scheduler(self, dist: str, name: str = "quick", *, version: str = "1.0", aliases: tuple[str, ...] = ()) -> str:
        """Install a distribution that offers one scheduler."""
        hook = f"""
@hookimpl
def dspark_register_schedulers(register):
    register({name!r}, build, config=Config, capabilities=SchedulerCapabilities(), aliases={aliases!r})
"""
        return self.add(dist, SCHEDULER + hook, version=version)

    def broken(self, dist: str, *, version: str = "1.0") -> str:
        """Install a distribution that registers a scheduler, then raises in the next hook."""
        hook = """
@hookimpl
def dspark_register_schedulers(register):
    register("broken-one", build, config=Config, capabilities=SchedulerCapabilities())

@hookimpl
def dspark_register_verifiers(register):
    raise ZeroDivisionError("boom")
"""
        return self.add(dist, SCHEDULER + hook, version=version)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """An empty folder on ``sys.path``; what is imported from it is forgotten afterwards."""
    for name in ("DSPARK_PLUGINS", "DSPARK_DISABLE_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield Site(tmp_path)
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "") or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def scheduler_source() -> str:
    """Config, class and factory of a scheduler, for plugins with hooks of their own."""
    return SCHEDULER
