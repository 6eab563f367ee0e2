"""Decoder layers written out in fewer operators give what the model's own give, bit for bit where nothing is packed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dspark.targets import layers as fast_layers
from dspark.targets.hf import HFTarget
from dspark.targets.layers import is_known

from .toys import VOCAB, plain, toy_layout, toy_model

KNOWN = ["llama", "mistral", "qwen2", "qwen2-window", "qwen3"]
OTHERS = ["gemma2", "gemma3", "phi", "gpt2", "granite", "qwen3-moe"]


def written(target: HFTarget) -> list[nn.Module]:
    return [layer for layer in target._layers if "forward" in vars(layer)]


def both(target: HFTarget, text: list[int], rows: int = 1) -> torch.Tensor:
    """Logits [n, V] of a text that is read in two steps: a prompt, and then ``rows`` tokens."""
    target.allocate(3, 128)
    first = len(text) - rows
    out = [target.forward(toy_layout({2: text}, [(2, 0, first)])).logits.clone()]
    out.append(target.forward(toy_layout({2: text}, [(2, first, rows)])).logits)
    return torch.cat(out)


@pytest.mark.parametrize("kind", KNOWN)
@pytest.mark.parametrize("rows", [1, 6])
def test_known_kinds_are_written_out_and_stay_equal_in_float32(kind: str, rows: int) -> None:
    model = toy_model(kind, torch.float32)
    text = [int(t) for t in np.random.default_rng(0).integers(3, VOCAB, 50)]
    target, slow = HFTarget(model), HFTarget(model, fast=False)
    assert len(written(target)) == 2
    assert not written(slow)
    torch.testing.assert_close(both(target, text, rows), both(slow, text, rows), rtol=0, atol=1e-5)
    torch.testing.assert_close(both(target, text, rows), plain(model, text), rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", KNOWN)
def test_long_queries_in_parts_are_the_plain_attention_up_to_rounding(kind: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("dspark.targets.attention.matrix_tiles", lambda dtype: False)  # as on a CPU without them
    monkeypatch.setattr("dspark.targets.groups._PART", 16)  # several parts of a toy's longest text
    model = toy_model(kind, torch.bfloat16)
    exact = toy_model(kind, torch.float32)
    exact.load_state_dict(model.state_dict())
    text = [int(t) for t in np.random.default_rng(1).integers(3, VOCAB, 120)]
    wanted = plain(exact, text)
    for rows in (1, 40):
        ours, theirs = both(HFTarget(model), text, rows).float(), plain(model, text).float()
        error, usual = (ours - wanted).abs().mean(), (theirs - wanted).abs().mean()
        assert error <= 1.5 * usual + 1e-3, (float(error), float(usual))


@pytest.mark.parametrize("kind", OTHERS)
def test_other_kinds_are_left_alone(kind: str) -> None:
    target = HFTarget(toy_model(kind, torch.float32))
    assert not written(target)


def test_a_layer_that_somebody_changed_is_left_alone() -> None:
    model = toy_model("llama", torch.float32)
    layer = model.model.layers[1]
    assert is_known(layer)
    layer.mlp.up_proj = nn.Sequential(layer.mlp.up_proj)
    assert not is_known(layer)
    assert not written(HFTarget(model))


def test_layers_that_do_not_agree_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rope = fast_layers.signed_rope
    monkeypatch.setattr(fast_layers, "signed_rope", lambda pair: (rope(pair)[0], -rope(pair)[1]))
    assert not written(HFTarget(toy_model("llama", torch.float32)))


def test_taps_are_the_hidden_states_of_the_model() -> None:
    model = toy_model("llama", torch.float32)
    text = list(range(5, 25))
    target = HFTarget(model)
    target.allocate(2, 64)
    out = target.forward(toy_layout({0: text}, [(0, 0, len(text))]), taps=(-1, 0))
    with torch.no_grad():
        states = model(torch.tensor([text]), output_hidden_states=True, use_cache=False).hidden_states
    assert out.taps is not None
    torch.testing.assert_close(out.taps, torch.cat([states[0][0], states[1][0]], dim=-1), rtol=0, atol=2e-5)
