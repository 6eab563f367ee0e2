"""Hooks only build: none is called within a round, however many plugins there are. And what building a catalog does."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import warnings
from collections import Counter
from typing import Any

import pytest

from dspark import EngineConfig, SamplingParams
from dspark.engine.build import build_engine
from dspark.plugins import PluginManager, load_plugins
from dspark.plugins.discovery import HOOKS
from dspark.testing import TableTarget
from dspark.testing.toys import random_table

EVERYTHING = """
calls = []

class Observer:
    def on_round(self, record): ...
    def on_finish(self, request, reason): ...

@hookimpl
def dspark_make_observers(config):
    calls.append("make_observers")
    return [Observer()]

@hookimpl
def dspark_engine_started(engine):
    calls.append("started")

@hookimpl
def dspark_engine_stopped(engine):
    calls.append("stopped")

@hookimpl
def dspark_load_checkpoint(source, config): ...

@hookimpl
def dspark_register_commands(cli): ...

@hookimpl
def dspark_register_routes(app): ...

@hookimpl
def dspark_register_schedulers(register):
    register("quick", build, config=Config, capabilities=SchedulerCapabilities())
"""


def count_calls(manager: PluginManager) -> Counter[str]:
    """Count every call that pluggy dispatches from now on, of any hook and by any way."""
    counts: Counter[str] = Counter()

    def before(hook_name: str, hook_impls: Any, kwargs: Any) -> None:
        counts[hook_name] += 1

    manager._pluggy.add_hookcall_monitoring(before, lambda *_: None)
    return counts


def test_no_hook_is_called_within_a_round(site: Any) -> None:
    parts = """
class Scheduler:
    capabilities = SchedulerCapabilities()
    def plan(self, batch, cost):
        import math
        from dspark.types import VerifyPlan
        return VerifyPlan(batch.max_lens.copy(), float(len(batch.max_lens) + batch.survival.sum()), math.nan, "all")
    def release(self, slot, generation): ...

@dataclass(frozen=True)
class Config:
    value: int = 1

def build(config, context):
    return Scheduler()
"""
    module = site.add("acme-all", parts + EVERYTHING)
    config = EngineConfig(scheduler="acme-all/quick", drafter="ngram", drafter_config={"min_n": 1}, max_len=32)
    manager = load_plugins(config)
    counts = count_calls(manager)
    engine = build_engine(config, target=TableTarget(random_table(4, 3, 3)), cost=None, plugins=manager)
    built = dict(counts)
    assert built["dspark_make_observers"] == built["dspark_engine_started"] == 1
    for i in range(3):
        engine.submit([0, 1, 2, 0, 1], SamplingParams(temperature=float(i), max_tokens=8))
    chunks = list(engine.run())
    assert sum(len(c.ids) for c in chunks) == 24
    assert engine.stats.acceptance.committed == 24
    assert engine.stats.drafted > 0
    assert dict(counts) == built  # admission, rounds, observers, finishing: nothing was dispatched
    engine.close()
    assert counts["dspark_engine_stopped"] == 1
    assert sys.modules[module].calls == ["make_observers", "started", "stopped"]


def twenty(site: Any) -> list[str]:
    return [site.scheduler(f"acme-part-{i}", f"quick-{i}") for i in range(20)]


def test_a_catalog_of_twenty_plugins_reads_each_once(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts, not seconds: metadata of the environment is walked once, every plugin is imported and asked once."""
    modules = twenty(site)
    walks: Counter[str] = Counter()
    real = importlib.metadata.distributions

    def distributions(**arguments: Any) -> Any:
        walks["distributions"] += 1
        return real(**arguments)

    monkeypatch.setattr(importlib.metadata, "distributions", distributions)
    manager = PluginManager()
    counts = count_calls(manager)
    catalog = manager.load()
    assert walks["distributions"] == 1
    assert all(m in sys.modules for m in modules)
    assert {r.key for r in catalog.of("scheduler") if r.dist != "dspark"} == {
        f"acme-part-{i}/quick-{i}" for i in range(20)
    }
    assert counts["dspark_register_schedulers"] == 21  # the built-in plugin, and each of the twenty
    assert set(counts) <= {h for h in HOOKS if h.startswith("dspark_register_")}
    before = dict(counts)
    for i in range(20):
        catalog.build("scheduler", f"acme-part-{i}/quick-{i}")
    assert dict(counts) == before  # resolving and building dispatch nothing


def test_a_catalog_imports_no_component_and_no_torch(site: Any) -> None:
    twenty(site)
    code = (
        "import sys, json\n"
        "from dspark.plugins import load_plugins\n"
        "catalog = load_plugins().catalog\n"
        "parts = ('drafters', 'heads', 'confidence', 'scheduling', 'verifiers', 'targets', 'engine', 'testing')\n"
        "loaded = [m for m in sys.modules if m.startswith(tuple(f'dspark.{p}' for p in parts))]\n"
        "print(json.dumps([len(catalog.of('scheduler')) >= 27, loaded, 'torch' in sys.modules]))"
    )
    environment = {**os.environ, "PYTHONPATH": str(site.folder)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [True, [], False]


def test_a_fault_in_a_plugins_head_is_the_heads(site: Any) -> None:
    """Not its drafter's: who has to repair it is named, with version and phase."""
    from tests.drafters.toys import FeatureTarget, toy_checkpoint

    site.add(
        "acme-head",
        """
def build(config, context):
    from dspark.heads.markov import MarkovHead

    class Faulty(MarkovHead):
        def step(self, state, prev, hidden):
            return self.helper(prev)

        def helper(self, prev):
            raise ZeroDivisionError("boom")

    return Faulty(config, {}, context.device, context.dtype)

def config():
    from dspark.heads.markov import MarkovConfig
    return MarkovConfig

@hookimpl
def dspark_register_sequential_heads(register):
    register("faulty", build, config=config, capabilities=HeadCapabilities())
""",
        version="4.2",
    )
    settings = {"checkpoint": toy_checkpoint("markov", vocab=3), "dtype": "float64", "head": "acme-head/faulty"}
    config = EngineConfig(
        drafter="dspark", drafter_config=settings, scheduler="fixed", estimator="constant", max_len=24
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = build_engine(config, target=FeatureTarget(random_table(4, 3, 3), mix=0.4), cost=None)
    engine.submit([0, 1, 2, 0], SamplingParams(max_tokens=6))
    with pytest.warns(UserWarning, match=r"acme-head/faulty 4\.2 failed in phase 'draft' \(ZeroDivisionError: boom\)"):
        chunks = list(engine.run())
    assert chunks[-1].finish_reason == "length"
    assert engine.stats.faults == {"acme-head/faulty:draft": 1}
