"""The tiny real target of the golden files, decoders around it, and prompts that repeat themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspark import SpeculativeDecoder

torch.set_num_threads(1)
GOLDEN = Path(__file__).parents[1] / "golden"
DSPARK = str(GOLDEN / "deepspec_dspark_vanilla")


def prompts(count: int = 4) -> list[list[int]]:
    """Token ids with repetitions, so that prompt lookup finds something; lengths differ."""
    rng = np.random.default_rng(5)
    return [(rng.integers(2, 90, size=4 + i % 3).tolist() * 4)[: 9 + i] for i in range(count)]


@pytest.fixture(scope="session")
def target() -> Any:
    from dspark.targets.hf import HFTarget

    return HFTarget.from_pretrained(str(GOLDEN / "target_qwen3_tiny"), dtype="float32", device="cpu")


@pytest.fixture
def build(target: Any) -> Callable[..., SpeculativeDecoder]:
    """A decoder around the shared target; use one at a time."""

    def make(drafter: str = "ngram", **settings: Any) -> SpeculativeDecoder:
        cost = settings.pop("cost", None)
        values = {"max_slots": 4, "max_len": 160} | settings
        return SpeculativeDecoder.from_pretrained(target, drafter, cost=cost, **values)

    return make
