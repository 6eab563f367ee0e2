"""Lossless speculative decoding for Hugging Face causal language models.

Public names are imported on first use: ``import dspark`` loads neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspark.api import SpeculativeDecoder
    from dspark.config import EngineConfig, SamplingParams
    from dspark.engine.engine import Engine
    from dspark.errors import (
        CapacityError,
        CheckpointError,
        ComponentError,
        ConfigError,
        CostTableError,
        DataError,
        DSparkError,
        DSparkWarning,
        EvaluationError,
        PluginError,
        RequestError,
        RowFault,
        TargetError,
        TrainingError,
        UnknownComponentError,
    )
    from dspark.plugins.hookspecs import DSPARK_API, hookimpl

__version__ = "0.1.0"

_HOMES = {
    "DSPARK_API": "dspark.plugins.hookspecs",
    "CapacityError": "dspark.errors",
    "CheckpointError": "dspark.errors",
    "ComponentError": "dspark.errors",
    "ConfigError": "dspark.errors",
    "CostTableError": "dspark.errors",
    "DataError": "dspark.errors",
    "DSparkError": "dspark.errors",
    "DSparkWarning": "dspark.errors",
    "Engine": "dspark.engine.engine",
    "EngineConfig": "dspark.config",
    "EvaluationError": "dspark.errors",
    "PluginError": "dspark.errors",
    "RequestError": "dspark.errors",
    "RowFault": "dspark.errors",
    "SamplingParams": "dspark.config",
    "SpeculativeDecoder": "dspark.api",
    "TargetError": "dspark.errors",
    "TrainingError": "dspark.errors",
    "UnknownComponentError": "dspark.errors",
    "hookimpl": "dspark.plugins.hookspecs",
}
"""Public name -> the module that defines it. A test holds this, the imports above and ``__all__`` to one another."""

__all__ = [
    "DSPARK_API",
    "CapacityError",
    "CheckpointError",
    "ComponentError",
    "ConfigError",
    "CostTableError",
    "DSparkError",
    "DSparkWarning",
    "DataError",
    "Engine",
    "EngineConfig",
    "EvaluationError",
    "PluginError",
    "RequestError",
    "RowFault",
    "SamplingParams",
    "SpeculativeDecoder",
    "TargetError",
    "TrainingError",
    "UnknownComponentError",
    "__version__",
    "hookimpl",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        from dspark.deprecations import deprecated_name

        home, _, name = (deprecated_name(name) or f":{name}").partition(":")
        if not home:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(home), name)
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
