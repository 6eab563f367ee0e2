"""Packed linear layers and fused norms of a target on CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from dspark.ops.packed import pack
from dspark.targets.fast import speed_up
from dspark.targets.hf import HFTarget

pytestmark = pytest.mark.skipif(
    pack(torch.zeros(8, 8, dtype=torch.bfloat16)) is None, reason="this torch has no packed bfloat16 products here"
)


@pytest.fixture
def model(tiny_model: Any) -> Any:
    return copy.deepcopy(tiny_model).bfloat16()


def packed_layers(model: nn.Module) -> list[nn.Module]:
    """Linear layers, and decoder layers that stand for their own."""
    return [m for m in model.modules() if isinstance(m, (nn.Linear, LlamaDecoderLayer)) and "forward" in vars(m)]


def test_the_logits_are_the_plain_ones_up_to_rounding_and_the_users_model_is_untouched(model: Any) -> None:
    ids = list(range(2, 20))
    plain = HFTarget(model, fast=False).plain_logits(ids).float()
    target = HFTarget(model)
    assert len(packed_layers(target.model)) == model.config.num_hidden_layers + 1, "decoder layers, and the head"
    assert packed_layers(model) == []
    for part in (ids, ids[:1]):
        packed = target.plain_logits(part).float()
        assert (packed - plain[: len(part)]).abs().max() <= 0.03 * plain.abs().max()
    target.close()
    assert packed_layers(target.model) == []


def test_copies_stay_within_a_quarter_of_the_free_memory(model: Any) -> None:
    weights = {m.weight.data_ptr(): m.weight.nbytes for m in model.modules() if type(m) is nn.Linear}
    size = sum(weights.values())
    speed_up(model, 4 * size - 1)
    assert packed_layers(model) == []
    undo = speed_up(model, 4 * size)
    assert packed_layers(model)
    undo()
    assert packed_layers(model) == []


def test_other_dtypes_keep_their_products(tiny_model: Any) -> None:
    changed = packed_layers(HFTarget(tiny_model, probe=False).model)
    assert [type(m) for m in changed] == [LlamaDecoderLayer] * tiny_model.config.num_hidden_layers
    assert not any(type(m) is nn.Linear for m in changed)


def norms(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if type(m).__name__.endswith("RMSNorm")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_are_fused_where_they_give_the_same(tiny_model: Any, dtype: torch.dtype) -> None:
    model = copy.deepcopy(tiny_model).to(dtype)
    undo = speed_up(model, None)
    assert len(norms(model)) == 5
    assert all("forward" in vars(m) for m in norms(model))
    undo()
    model.model.norm.forward = lambda x: 2 * x
    speed_up(model, None)
    x = torch.randn(3, 32, dtype=dtype)
    assert (model.model.norm(x) == 2 * x).all(), "a forward that somebody set stays"


def test_a_norm_that_scales_otherwise_is_left_alone(tiny_model: Any) -> None:
    class ShiftedRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.variance_epsilon = nn.Parameter(torch.full((32,), 0.5)), 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.rms_norm(x, (32,), 1 + self.weight, self.variance_epsilon)

    model = copy.deepcopy(tiny_model)
    model.model.norm = ShiftedRMSNorm()
    speed_up(model, None)
    assert "forward" not in vars(model.model.norm)
