"""Batches and cost tables for tests of schedulers."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from dspark._sched import CostTable, survival
from dspark.config import build_config
from dspark.protocols import BuildContext
from dspark.types import FloatArray, ScheduleInput

MODULES = {
    "causal": "CausalConfig",
    "lookahead": "LookaheadConfig",
    "lagged": "LaggedConfig",
    "global_": "GlobalConfig",
    "fixed": "FixedConfig",
    "threshold": "ThresholdConfig",
    "off": "OffConfig",
}
HONEST = tuple(name for name in MODULES if name != "global_")
NEED_COST = ("causal", "lookahead", "lagged", "global_")


def make(name: str, **settings: Any) -> Any:
    """A scheduler as the catalog builds it."""
    module = importlib.import_module(f"dspark.scheduling.{name}")
    return module.build(build_config(getattr(module, MODULES[name]), settings), BuildContext())


def batch(probs: Any, *, max_lens: Any = None, base: int | None = None, **fields: Any) -> ScheduleInput:
    """A schedule input from confidences [R, gamma]; row r has slot r of generation 1."""
    c = np.array(probs, dtype=np.float64)
    rows, gamma = c.shape
    lens = np.full(rows, gamma, dtype=np.int64) if max_lens is None else np.array(max_lens, dtype=np.int64)
    a = np.empty_like(c)
    survival(c, lens, a)
    defaults: dict[str, Any] = {
        "slots": np.arange(rows, dtype=np.int64),
        "generations": np.ones(rows, dtype=np.int64),
        "context": 0,
    }
    return ScheduleInput(
        probs=c, survival=a, max_lens=lens, base_tokens=rows if base is None else base, gamma=gamma, **defaults | fields
    )


def jagged(rng: np.random.Generator) -> CostTable:
    """A table with steps, ramps and falls."""
    steps = rng.integers(1, 7, size=10)
    rises = np.where(rng.random(10) < 0.15, rng.uniform(-0.4, 0.0, 10), rng.uniform(0.02, 0.9, 10))
    seconds = rng.uniform(1.0, 3.0) * np.cumprod(1.0 + rises)
    points = [(int(n), float(t)) for n, t in zip(np.cumsum(steps), seconds, strict=True)]
    return CostTable(points, mode=str(rng.choice(["staircase", "interpolated"])), glue=float(rng.uniform(0, 0.5)))


def confidences(rng: np.random.Generator, rows: int, gamma: int) -> FloatArray:
    """c with ties and certainties."""
    c = rng.uniform(0.4, 1.0, size=(rows, gamma))
    kind = rng.random((rows, gamma))
    c[kind < 0.1] = 0.5
    c[kind > 0.92] = 1.0
    c[kind > 0.97] = 0.0
    return c


def theta(given: ScheduleInput, lens: Any, cost: CostTable) -> float:
    """Theta of verify lengths, from its definition."""
    tau = sum(1.0 + given.survival[r, :n].sum() for r, n in enumerate(lens))
    return cost.throughput(float(tau), given.base_tokens + int(sum(lens)), len(lens), given.gamma, given.context)
