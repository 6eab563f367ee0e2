"""The examples as modules, and the tiny target where they expect one: a folder, or a decoder."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dspark import SpeculativeDecoder

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="session")
def example() -> Callable[[str], ModuleType]:
    """Import an example by its name."""

    def load(name: str) -> ModuleType:
        key = f"examples_{name}"
        if key not in sys.modules:
            spec = importlib.util.spec_from_file_location(key, EXAMPLES / f"{name}.py")
            assert spec is not None
            assert spec.loader is not None
            module = sys.modules[key] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        return sys.modules[key]

    return load


@pytest.fixture(scope="session")
def tiny_folder(tiny_model: Any, tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny target as users have theirs: a folder of transformers'."""
    folder = tmp_path_factory.mktemp("target")
    tiny_model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def decoder(tiny_model: Any, tiny_tokenizer: Any) -> Iterator[SpeculativeDecoder]:
    """Two slots, prompt lookup."""
    made = SpeculativeDecoder.from_pretrained(
        tiny_model, "ngram", tokenizer=tiny_tokenizer, cost=None, max_slots=2, max_len=256
    )
    yield made
    made.close()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What ``main`` of an example builds takes little memory, and measures no cost table."""
    real = SpeculativeDecoder.from_pretrained.__func__  # type: ignore[attr-defined]

    def from_pretrained(cls: Any, *args: Any, **settings: Any) -> Any:
        return real(cls, *args, **{"cost": None, "max_slots": 4, "max_len": 256} | settings)

    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(SpeculativeDecoder, "from_pretrained", classmethod(from_pretrained))
