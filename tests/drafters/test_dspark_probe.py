"""The load-time probe: right checkpoints pass, wrong layouts, layers, targets and dtypes are named."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from dspark.drafters.dspark import DSparkDraft
from dspark.errors import CheckpointError
from dspark.types import TargetOutput, VerifyLayout
from tests.drafters.golden import commit, make_drafter, propose, request, stub_target
from tests.drafters.trained import VOCAB, RuleTarget, fresh, train

torch.set_num_threads(1)
CASES = ("deepspec_dspark_vanilla", "speculators_dspark_rnn_bonus_anchor")
START = [3, 7]


@pytest.fixture(scope="module", params=CASES)
def trained(request: pytest.FixtureRequest) -> DSparkDraft:
    return train(request.param, RuleTarget())


def variant(drafter: DSparkDraft, **changes: Any) -> DSparkDraft:
    """The same weights under another config."""
    config = dataclasses.replace(drafter.checkpoint.config, **changes)
    tensors = dict(drafter.checkpoint.tensors) | {n: t.data for n, t in drafter.backbone.canonical().items()}
    tensors |= {f"markov_head.{n}": t.data for n, t in drafter.head.canonical().items()}
    changed = dataclasses.replace(drafter.checkpoint, config=config, tensors=tensors)
    return make_drafter(changed, stub_target(VOCAB, name="rule"))


def test_the_right_checkpoint_passes(trained: DSparkDraft) -> None:
    report = trained.probe(RuleTarget(), START)
    assert report.warnings == ()
    assert report.first_hits > 0.8
    assert report.score > report.chance + 1.5
    assert len(report.alternatives) == 3


def test_the_wrong_layout_is_named(trained: DSparkDraft) -> None:
    """Case 33: the layouts load silently into each other; the probe says which one it is."""
    right = trained.checkpoint.config.sample_from_anchor
    report = variant(trained, sample_from_anchor=not right).probe(RuleTarget(), START)
    assert len(report.warnings) == 1
    assert f"the {'anchor-first' if right else 'mask-only'} layout" in report.warnings[0]


@pytest.mark.parametrize("shift", [-1, 1])
def test_wrong_layers_are_named(trained: DSparkDraft, shift: int) -> None:
    """Case 34: the right count, but ids of another format's numbering."""
    wrong = tuple(k + shift for k in trained.checkpoint.config.target_layer_ids)
    report = variant(trained, target_layer_ids=wrong).probe(RuleTarget(), START)
    assert len(report.warnings) == 1
    assert f"target layers {list(trained.checkpoint.config.target_layer_ids)} (ids {-shift:+d})" in report.warnings[0]


def test_another_targets_drafter_is_named(trained: DSparkDraft) -> None:
    other = RuleTarget()
    other.codes = other.codes.flip(1)
    other.rule = other.rule.roll(5)
    report = trained.probe(other, START)
    assert len(report.warnings) == 1
    assert "no better than chance" in report.warnings[0]


def test_untrained_weights_are_named() -> None:
    report = make_drafter(fresh(CASES[0]), stub_target(VOCAB)).probe(RuleTarget())
    assert len(report.warnings) == 1
    assert "untrained" in report.warnings[0]


def test_overflow_names_the_layer() -> None:
    """Case 38, before the first request."""
    loaded = fresh(CASES[0])
    tensors = dict(loaded.tensors)
    for name in ("gate", "up", "down"):
        tensors[f"layers.1.mlp.{name}_proj.weight"] = tensors[f"layers.1.mlp.{name}_proj.weight"] * 500
    hot = dataclasses.replace(loaded, tensors=tensors)
    with pytest.raises(CheckpointError, match=r"layers.1 are not finite in torch.float16; use bfloat16 or float32"):
        make_drafter(hot, stub_target(VOCAB), dtype=torch.float16).probe(RuleTarget())
    make_drafter(hot, stub_target(VOCAB), dtype=torch.bfloat16).probe(RuleTarget())


def test_features_that_are_not_finite_name_their_layer() -> None:
    class Broken(RuleTarget):
        def forward(self, layout: VerifyLayout, taps: Any = ()) -> TargetOutput:
            out = super().forward(layout, taps)
            width = 32 * list(taps).index(3)
            out.taps[:, width : width + 32] = torch.inf
            return out

    with pytest.raises(CheckpointError, match="features of target layer 3 are not finite"):
        make_drafter(fresh(CASES[0]), stub_target(VOCAB)).probe(Broken())


def test_live_slots_are_left_alone() -> None:
    drafter = make_drafter(fresh(CASES[0]), stub_target(VOCAB))
    commit(drafter, torch.randn(8, 64, generator=torch.Generator().manual_seed(1)), start=0, end=8)
    row = request([1, 2, 3, 4, 5, 6, 7, 8, 9])
    before, _ = propose(drafter, [row], vocab_size=VOCAB)
    drafter.probe(RuleTarget())
    after, _ = propose(drafter, [row], vocab_size=VOCAB)
    assert torch.equal(before.hidden, after.hidden)
