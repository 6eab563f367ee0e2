"""``attention="flex"``: every forward of a random walk over slots gives what the model gives by itself."""

from __future__ import annotations

import pytest
import torch

from dspark.errors import ConfigError
from dspark.ops.flex import BLOCK

from .test_packed import target_of, walk
from .toys import CONFIGS, VOCAB, toy_layout, toy_model


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kind", [k for k in CONFIGS if k in ("llama", "qwen3", "gemma2", "mistral")])
def test_logits_are_the_models(kind: str) -> None:
    torch.compiler.reset()  # shapes that earlier cases made dynamic are more than the uncompiled operator takes
    model = toy_model(kind, dtype=torch.float64)
    assert walk(target_of(model, attention="flex"), model, 3, slots=3, steps=6, longest=BLOCK) > 0


def test_slots_must_end_with_a_block() -> None:
    target = target_of(toy_model("llama"), attention="flex")
    target.allocate(2, 60)
    with pytest.raises(ConfigError, match="60"):
        target.forward(toy_layout({0: list(range(3, 3 + min(9, VOCAB - 3)))}, [(0, 0, 4)], "cpu", "all"))
