"""Drafter checkpoints: DeepSpec, speculators, SpecForge and z-lab files, read strictly into one description.

DeepSpec's and speculators' formats are written from it too.
"""

from __future__ import annotations

from dspark.checkpoints.borrow import TargetParts, parts_of, read_target
from dspark.checkpoints.formats import detect, is_eagle3, read_config
from dspark.checkpoints.load import Checkpoint, load_checkpoint, make_checkpoint, read_json, resolve_source
from dspark.checkpoints.schema import DrafterConfig, EagleConfig, LayerConfig, RopeConfig
from dspark.checkpoints.tensors import expected_tensors, random_tensors
from dspark.checkpoints.write import write_deepspec, write_speculators

__all__ = [
    "Checkpoint",
    "DrafterConfig",
    "EagleConfig",
    "LayerConfig",
    "RopeConfig",
    "TargetParts",
    "detect",
    "expected_tensors",
    "is_eagle3",
    "load_checkpoint",
    "make_checkpoint",
    "parts_of",
    "random_tensors",
    "read_config",
    "read_json",
    "read_target",
    "resolve_source",
    "write_deepspec",
    "write_speculators",
]
