"""Drafter checkpoints: DeepSpec, speculators, SpecForge and z-lab files, read strictly into one description."""

from __future__ import annotations

from dspark.checkpoints.formats import detect, read_config
from dspark.checkpoints.load import Checkpoint, load_checkpoint, make_checkpoint, read_json, resolve_source
from dspark.checkpoints.schema import DrafterConfig, LayerConfig, RopeConfig
from dspark.checkpoints.tensors import expected_tensors, random_tensors

__all__ = [
    "Checkpoint",
    "DrafterConfig",
    "LayerConfig",
    "RopeConfig",
    "detect",
    "expected_tensors",
    "load_checkpoint",
    "make_checkpoint",
    "random_tensors",
    "read_config",
    "read_json",
    "resolve_source",
]
