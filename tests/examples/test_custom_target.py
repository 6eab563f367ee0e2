"""``custom_target``: what every target promises, and the same tokens with drafts as without."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from dspark import hookimpl
from dspark.capabilities import TargetCapabilities
from dspark.testing import TargetSuite

PATH = Path(__file__).parents[2] / "examples" / "custom_target.py"
spec = importlib.util.spec_from_file_location("custom_target", PATH)
assert spec is not None
assert spec.loader is not None
custom_target = importlib.util.module_from_spec(spec)
spec.loader.exec_module(custom_target)


@dataclass(frozen=True)
class Config:
    steps: int = 1


class Plugin:
    DSPARK_API = 1

    @hookimpl
    def dspark_register_targets(self, register: Any) -> None:
        register(
            "byte-gru",
            lambda config, context: custom_target.GRUTarget(custom_target.trained(config.steps)),
            config=Config,
            capabilities=TargetCapabilities(ragged=True, taps=False),
        )


class TestGRU(TargetSuite):
    component = "example/byte-gru"
    plugins: ClassVar[Mapping[str, object]] = {"example": Plugin()}


def test_it_runs_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    custom_target.main(steps=60, max_tokens=120)
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "the same as without drafts: True"
    assert int(said[-2].split()[0]) > 20  # a text that repeats itself is drafted well
