"""The load-time probe on the golden target: right checkpoints pass, wrong layouts and layers are named."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from dspark.checkpoints import make_checkpoint, random_tensors
from dspark.errors import CheckpointError
from dspark.targets.hf import HFTarget
from dspark.types import TargetOutput, VerifyLayout
from tests.drafters.golden import ROOT, checkpoint, commit, make_drafter, propose, request

torch.set_num_threads(1)
TRAINED = ("deepspec_dspark_vanilla", "deepspec_dspark_gated", "deepspec_dspark_rnn", "deepspec_dflash", "zlab_dflash")
START = [41, 15, 14, 84, 37, 41, 89, 14]


@pytest.fixture(scope="module")
def target() -> Any:
    made = HFTarget.from_pretrained(str(ROOT / "target_qwen3_tiny"), dtype="float32", device="cpu")
    made.allocate(1, 128)
    return made


@pytest.mark.parametrize("case", TRAINED)
def test_right_checkpoints_pass(case: str, target: Any) -> None:
    report = make_drafter(case, target).probe(target, START)
    assert report.warnings == ()
    assert report.score > report.chance + 0.5
    assert report.first_hits > 0.2


@pytest.mark.parametrize("case", TRAINED)
def test_the_wrong_layout_is_named(case: str, target: Any) -> None:
    """Case 33: the layouts load silently into each other; the probe says which one it is."""
    right = checkpoint(case).config.sample_from_anchor
    report = make_drafter(case, target, sample_from_anchor=not right).probe(target, START)
    assert any(f"the {'anchor-first' if right else 'mask-only'} layout" in line for line in report.warnings)


@pytest.mark.parametrize("case", TRAINED)
def test_wrong_layers_are_named(case: str, target: Any) -> None:
    """Case 34: the right count, but ids one too low (another format's numbering)."""
    loaded = checkpoint(case)
    shift = 1 if min(loaded.config.target_layer_ids) < 0 else -1
    wrong = tuple(k + shift for k in loaded.config.target_layer_ids)
    config = dataclasses.replace(loaded.config, target_layer_ids=wrong)
    report = make_drafter(dataclasses.replace(loaded, config=config), target).probe(target, START)
    assert any(f"ids {-shift:+d}" in line for line in report.warnings)


def test_untrained_weights_are_named(target: Any) -> None:
    config = checkpoint("deepspec_dspark_vanilla").config
    drafter = make_drafter(make_checkpoint(config, random_tensors(config, seed=0), source="fresh"), target)
    report = drafter.probe(target)
    assert len(report.warnings) == 1
    assert "fresh predicts this target no better than chance" in report.warnings[0]


def test_a_pruned_vocabulary_is_scored_on_what_it_knows(target: Any) -> None:
    report = make_drafter("speculators_dspark_vanilla", target).probe(target, START)
    assert -20 < report.score < 0


def test_overflow_names_the_layer(target: Any) -> None:
    """Case 38, before the first request."""
    loaded = checkpoint("deepspec_dspark_vanilla")
    tensors = dict(loaded.tensors)
    for name in ("gate", "up", "down"):
        tensors[f"layers.1.mlp.{name}_proj.weight"] = tensors[f"layers.1.mlp.{name}_proj.weight"] * 500
    hot = dataclasses.replace(loaded, tensors=tensors)
    with pytest.raises(CheckpointError, match=r"layers.1 are not finite in torch.float16; use bfloat16 or float32"):
        make_drafter(hot, target, dtype=torch.float16).probe(target, START)
    make_drafter(hot, target, dtype=torch.bfloat16).probe(target, START)


def test_features_that_are_not_finite_name_their_layer(target: Any) -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            return getattr(target, name)

        def forward(self, layout: VerifyLayout, taps: Any = ()) -> TargetOutput:
            out = target.forward(layout, taps)
            out.taps[:, -32:] = torch.inf
            return out

    drafter = make_drafter("deepspec_dspark_vanilla", target)
    config = dataclasses.replace(drafter.checkpoint.config, target_layer_ids=(1, 5))
    drafter.tap_layers = config.target_layer_ids
    with pytest.raises(CheckpointError, match="features of target layer 5 are not finite"):
        drafter.probe(Broken(), START)


def test_live_slots_are_left_alone(target: Any) -> None:
    drafter = make_drafter("deepspec_dspark_vanilla", target)
    taps = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    commit(drafter, taps, start=0, end=8)
    before, _ = propose(drafter, [request(START + [3])])
    drafter.probe(target, START)
    after, _ = propose(drafter, [request(START + [3])])
    assert torch.equal(before.hidden, after.hidden)
