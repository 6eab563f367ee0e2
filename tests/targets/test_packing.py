"""Packed linear layers of a bfloat16 target on CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from dspark.ops.packed import pack
from dspark.targets.hf import HFTarget
from dspark.targets.packing import pack_linears

pytestmark = pytest.mark.skipif(
    pack(torch.zeros(8, 8, dtype=torch.bfloat16)) is None, reason="this torch has no packed bfloat16 products here"
)


@pytest.fixture
def model(tiny_model: Any) -> Any:
    return copy.deepcopy(tiny_model).bfloat16()


def packed_layers(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if type(m) is nn.Linear and "forward" in vars(m)]


def test_the_logits_are_the_plain_ones_up_to_rounding_and_the_users_model_is_untouched(model: Any) -> None:
    ids = list(range(2, 20))
    plain = HFTarget(model, pack=False).plain_logits(ids).float()
    target = HFTarget(model)
    assert len(packed_layers(target.model)) == sum(type(m) is nn.Linear for m in target.model.modules())
    assert packed_layers(model) == []
    for part in (ids, ids[:1]):
        packed = target.plain_logits(part).float()
        assert (packed - plain[: len(part)]).abs().max() <= 0.03 * plain.abs().max()
    target.close()
    assert packed_layers(target.model) == []


def test_copies_stay_within_a_quarter_of_the_free_memory(model: Any) -> None:
    weights = {m.weight.data_ptr(): m.weight.nbytes for m in model.modules() if type(m) is nn.Linear}
    size = sum(weights.values())
    pack_linears(model, 4 * size - 1)
    assert packed_layers(model) == []
    undo = pack_linears(model, 4 * size)
    assert packed_layers(model)
    undo()
    assert packed_layers(model) == []


def test_other_dtypes_stay_plain(tiny_model: Any) -> None:
    assert packed_layers(HFTarget(tiny_model, probe=False).model) == []
