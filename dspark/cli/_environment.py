"""What ``dspark doctor`` looks at without a target: versions, processors, devices, the native module, plugins."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
import warnings
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import dspark

_SHOWN = ("torch", "transformers", "numpy", "pluggy", "safetensors", "typer", "rich")
_VARIABLES = (
    "DSPARK_CACHE",
    "DSPARK_PLUGINS",
    "DSPARK_DISABLE_PLUGINS",
    "HF_HUB_OFFLINE",
    "HF_HOME",
    "OMP_NUM_THREADS",
)


@dataclass(slots=True)
class Findings:
    """What stands in the way, and what is worth knowing.

    Attributes:
        problems: real faults; with any, the exit code is 1.
        notes: nothing wrong, but it explains results.
    """

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def environment(findings: Findings) -> dict[str, Any]:
    """Versions, processor, devices, the native module and the cache folder."""
    versions = {name: _version(name) for name in _SHOWN}
    _check_requirements(findings)
    return {
        "dspark": dspark.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
        "cpu": _cpu(findings),
        "devices": _devices(findings),
        "native": _native(findings),
        "gguf": all(importlib.util.find_spec(name) is not None for name in ("gguf", "accelerate")),
        "cache": _cache_folder(),
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _check_requirements(findings: Findings) -> None:
    """Compare what is installed with what the distribution asks for."""
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        lines = metadata.requires("dspark") or []
    except metadata.PackageNotFoundError:
        findings.notes.append("dspark runs from its sources, uninstalled: versions of what it needs are not checked")
        return
    for line in lines:
        try:
            wanted = Requirement(line)
        except InvalidRequirement:
            continue
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        found = _version(wanted.name)
        if found is None:
            findings.problems.append(f"{wanted.name} is not installed: pip install '{wanted.name}{wanted.specifier}'")
        elif not wanted.specifier.contains(found, prereleases=True):
            findings.problems.append(f"{wanted.name} {found} is installed, dspark needs {wanted.specifier}")


def _cpu(findings: Findings) -> dict[str, Any]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found: dict[str, Any] = {"machine": platform.machine(), "cores": os.cpu_count(), "usable_cores": usable}
    if hasattr(os, "getloadavg"):
        found["load"] = round(os.getloadavg()[0], 2)
        if found["load"] > 1.5 * usable:
            findings.notes.append(
                f"the machine is busy (load {found['load']} on {usable} cores): what is measured now is off"
            )
    try:
        import torch
    except ImportError as err:
        findings.problems.append(f"torch can't be imported: {err}")
        return found
    found["threads"] = torch.get_num_threads()
    found["capability"] = torch.backends.cpu.get_cpu_capability()
    if found["threads"] > usable:
        findings.notes.append(f"torch uses {found['threads']} threads on {usable} usable cores: set OMP_NUM_THREADS")
    return found


def _devices(findings: Findings) -> list[dict[str, Any]]:
    try:
        import torch
    except ImportError:
        return []
    found: list[dict[str, Any]] = [{"device": "cpu"}]
    try:
        for i in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(i)
            name = torch.cuda.get_device_name(i)
            found.append({"device": f"cuda:{i}", "name": name, "free_bytes": free, "total_bytes": total})
    except RuntimeError as err:
        findings.problems.append(f"a CUDA device does not answer: {err}")
    if torch.backends.mps.is_available():
        found.append({"device": "mps"})
    return found


def _native(findings: Findings) -> dict[str, Any]:
    """Import the Rust module and ask it for one plan."""
    try:
        import numpy as np

        from dspark import _sched

        lens = np.zeros(1, dtype=np.int64)
        table = _sched.CostTable([(1, 1.0), (2, 1.1), (4, 4.0)])
        _sched.Causal().plan(np.array([[0.9, 0.5]]), np.array([2], dtype=np.int64), lens, table, 1)
    except (ImportError, AttributeError, TypeError, ValueError) as err:
        findings.problems.append(
            f"the native module dspark._sched does not work ({type(err).__name__}: {err}): build it with 'make setup'"
        )
        return {"ok": False, "error": str(err)}
    if lens.tolist() != [1]:
        findings.problems.append(
            f"the native module dspark._sched plans {lens.tolist()} where [1] is right: rebuild it"
        )
        return {"ok": False, "error": "a wrong plan"}
    return {"ok": True, "file": getattr(_sched, "__file__", None)}


def _cache_folder() -> str | None:
    try:
        from dspark.scheduling.cache import cost_folder
    except ImportError:  # the native module is missing, which is said already
        return None
    return str(cost_folder().parent)


def plugin_records(findings: Findings) -> list[dict[str, Any]]:
    """What ``dspark plugins --json`` says of each plugin."""
    from dspark.errors import DSparkError
    from dspark.plugins import PluginManager, PluginWarning

    manager = PluginManager()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PluginWarning)
            manager.load()
    except DSparkError as err:
        findings.problems.append(f"plugins: {err}")
    records = [record.as_dict() for record in manager.records]
    for record in records:
        who = f"plugin {record['name']} ({record['distribution']} {record['version']})"
        if record["status"] == "error":
            findings.problems.append(f"{who}: {record['error']}")
        elif record["status"] in ("conflict", "disabled"):
            findings.notes.append(f"{who}, {record['status']}: {record['error']}")
    return records


def kernel_records(findings: Findings) -> list[dict[str, Any]]:
    """What runs each operation of a round on each device and dtype of this machine, and why."""
    from dspark.errors import DSparkError
    from dspark.plugins import PluginManager, PluginWarning

    manager = PluginManager()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PluginWarning)
            from dspark.plugins.kernels import kernel_table

            choices = kernel_table(manager.load())
    except (DSparkError, ImportError) as err:
        findings.problems.append(f"kernels: {err}")
        return []
    return [{"op": c.op, "device": c.device, "dtype": c.dtype, "kernel": c.name, "reason": c.reason} for c in choices]


def lines_of(found: dict[str, Any]) -> list[tuple[str, str]]:
    """(label, text) of an environment, for people."""
    cpu = found["cpu"]
    threads = f"{cpu['threads']} torch threads, {cpu['capability']}" if "threads" in cpu else "no torch"
    versions = ", ".join(f"{name} {version or 'missing'}" for name, version in found["versions"].items())
    devices = ", ".join(f"{d['device']} ({d['name']})" if "name" in d else d["device"] for d in found["devices"])
    lines = [
        ("dspark", f"{found['dspark']} on Python {found['python']} ({sys.executable})"),
        ("platform", found["platform"]),
        ("packages", versions),
        ("cpu", f"{cpu['machine']}, {cpu['usable_cores']} of {cpu['cores']} cores usable, {threads}"),
        ("devices", devices or "none"),
        ("native module", "works" if found["native"]["ok"] else found["native"]["error"]),
        ("gguf files", "can be read" if found["gguf"] else "can't be read: pip install 'dspark[gguf]'"),
        ("cache", found["cache"] or "unknown"),
    ]
    if found["variables"]:
        lines.append(("variables", ", ".join(f"{k}={v}" for k, v in found["variables"].items())))
    return lines
