"""The tiny real target of the golden files with drafters that were trained on it, and prompts of token ids."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspark import SpeculativeDecoder
from dspark.evaluation.collect import Item
from dspark.evaluation.rounds import RoundLog

torch.set_num_threads(1)
GOLDEN = Path(__file__).parents[1] / "golden"


class Talk:
    """A dialogue of token ids: each turn is the last answer and some new tokens."""

    def __init__(self, turns: list[list[int]]) -> None:
        self.ids: list[int] = []
        self.todo: list[Any] = [*turns]

    def next_prompt(self) -> list[int]:
        self.ids = [*self.ids, *self.todo.pop(0)]
        return self.ids

    def answer(self, result: Any) -> None:
        self.ids = [*self.ids, *result.ids]


def item(dataset: str, number: int, turns: int = 1) -> Item:
    rng = np.random.default_rng([number, len(dataset)])
    said = [rng.integers(0, 97, size=5 + number % 4).tolist() for _ in range(turns)]
    return Item(dataset, str(number), f"digest-{said}", lambda: Talk(said))


ITEMS = [item(name, number, 1 + number % 2) for number in range(4) for name in ("alpha", "beta")]


@pytest.fixture(scope="session")
def target() -> Any:
    from dspark.targets.hf import HFTarget

    return HFTarget.from_pretrained(str(GOLDEN / "target_qwen3_tiny"), dtype="float32", device="cpu")


@pytest.fixture
def drafter(tmp_path: Path) -> Callable[[str], str]:
    """A copy of a golden drafter, for tests that write into it."""

    def copy(case: str = "deepspec_dspark_vanilla") -> str:
        folder = tmp_path / case
        if not folder.exists():
            shutil.copytree(GOLDEN / case, folder)
        return str(folder)

    return copy


@pytest.fixture
def decoder(target: Any) -> Callable[..., tuple[SpeculativeDecoder, RoundLog]]:
    """A decoder at full verify length, and the log of its rounds."""

    def build(drafter: str = "ngram", **settings: Any) -> tuple[SpeculativeDecoder, RoundLog]:
        log = RoundLog()
        settings = {"scheduler": "fixed", "max_slots": 3, "max_len": 128} | settings
        return SpeculativeDecoder.from_pretrained(target, drafter, cost=None, observers=[log], **settings), log

    return build
