"""What ships is registered like everything else, quickly, and without importing torch."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from typing import Any

import pytest

import dspark
from dspark.plugins import PluginManager, builtin, load_plugins
from dspark.plugins.kinds import BUILTIN_DIST, KINDS

SHIPPED = {
    "target": {"hf"},
    "drafter": {"none", "ngram", "dspark", "eagle3", "draft-model"},
    "sequential_head": {"none", "markov", "gated", "rnn"},
    "estimator": {"constant", "online", "linear"},
    "calibrator": {"identity", "sts"},
    "scheduler": {"causal", "lookahead", "lagged", "global", "fixed", "threshold", "off"},
    "gamma_policy": {"static", "adaptive"},
    "verifier": {"greedy", "rejection", "coupled"},
    "kernel": {f"{op}.{kind}" for op in ("bias_sample", "reject_sample") for kind in ("triton", "reference")},
    "preset": {"dspark-qwen3-4b", "dspark-qwen3-8b", "dspark-qwen3-14b"},
}
NEED_SETTINGS = {f"dspark/{name}" for name in ("hf", "dspark", "eagle3", "draft-model", "sts", "linear")}
CATALOG = PluginManager(discover=False, environ={}).load()
COMPONENTS = [r for r in CATALOG.registrations if r.kind not in ("preset", "kernel")]


def test_what_ships() -> None:
    found: dict[str, set[str]] = {}
    for entry in CATALOG.registrations:
        assert (entry.dist, entry.version) == (BUILTIN_DIST, dspark.__version__)
        found.setdefault(entry.kind.value, set()).add(entry.name)
    assert found == SHIPPED


@pytest.mark.parametrize("entry", COMPONENTS, ids=lambda r: f"{r.kind.value} {r.key}")
def test_registrations_agree_with_their_modules(entry: Any) -> None:
    module = importlib.import_module(entry.factory.partition(":")[0])
    assert callable(entry.load_factory())
    assert entry.load_config().__dataclass_params__.frozen
    own = module.HFTarget.capabilities if entry.name == "hf" else module.CAPABILITIES
    assert own == entry.capabilities


def test_presets_name_a_checkpoint_for_their_target() -> None:
    for entry in CATALOG.of("preset"):
        size = entry.name.rpartition("-")[2]
        assert entry.capabilities.models == (f"Qwen/Qwen3-{size.upper()}",)
        settings = CATALOG.build("preset", entry.key)
        assert settings["drafter_config"]["checkpoint"] == f"deepseek-ai/dspark_qwen3_{size}_block7"


def test_builtin_is_a_plugin_like_any_other() -> None:
    first = load_plugins().records[0]
    assert (first.name, first.distribution, first.status) == ("builtin", BUILTIN_DIST, "ok")
    assert set(first.hooks) == {KINDS[r.kind].hook for r in CATALOG.registrations}
    assert builtin.DSPARK_API == 1


def settings_free() -> list[Any]:
    return [r for r in COMPONENTS if r.key not in NEED_SETTINGS and r.kind != "sequential_head"]


@pytest.mark.parametrize("entry", settings_free(), ids=lambda r: f"{r.kind.value} {r.key}")
def test_what_needs_no_settings_builds(entry: Any) -> None:
    component = CATALOG.build(entry.kind, entry.key)  # build checks it against its protocol
    assert type(component).__module__.startswith("dspark.")


def test_catalog_of_twenty_plugins_takes_less_than_50_ms(site: Any) -> None:
    for i in range(20):
        site.scheduler(f"acme-{i:02}", f"quick-{i}")
    seconds = []
    for _ in range(5):
        begin = time.process_time()
        manager = load_plugins()
        seconds.append(time.process_time() - begin)
        assert sum(r.status == "ok" for r in manager.records if r.distribution.startswith("acme-")) == 20
    assert min(seconds) < 0.05, seconds


def test_loading_plugins_imports_no_torch(site: Any) -> None:
    site.scheduler("acme-a")
    code = """
import json, sys
from dspark.plugins import load_plugins
import dspark.cli.plugins
catalog = load_plugins().catalog
print(json.dumps([sorted({"torch", "transformers", "triton"} & set(sys.modules)), list(catalog.names("scheduler"))]))
"""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(site.folder), *filter(None, sys.path)])}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    heavy, names = json.loads(run.stdout)
    assert heavy == []
    assert "acme-a/quick" in names
