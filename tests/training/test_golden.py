"""Other projects' own training forwards: blocks, hidden states, logits, the target's law, loss terms and gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dspark.training.blocks import Blocks
from dspark.training.losses import decay_weights
from dspark.training.model import Result, Scales, TrainableDrafter
from dspark.training.teacher import Teacher, log_sum_exp
from tests.drafters.golden import assert_close
from tests.training.golden import io, kept, packed, packed_blocks, trainable

torch.set_num_threads(1)
DEEPSPEC = ("deepspec_dspark_vanilla", "deepspec_dspark_gated", "deepspec_dspark_rnn", "deepspec_dflash")
OTHERS = ("deepspec_dspark_gemma4", "specforge_dspark_gated_swa")


def check_forward(case: str) -> tuple[TrainableDrafter, dict[str, Tensor], Blocks, Tensor]:
    """Compare everything in front of the losses; returns the drafter, the recording, its blocks and log t."""
    drafter, data = trainable(case), io(case)
    blocks = packed_blocks(data, drafter.gamma)
    valid = kept(data["train.eval_mask"], data)
    assert torch.equal(blocks.valid, valid)
    if "train.target_ids" in data:
        assert torch.equal(blocks.labels[valid], kept(data["train.target_ids"], data)[valid])
    if "train.prev_token_ids" in data:
        assert torch.equal(blocks.prev[valid], kept(data["train.prev_token_ids"], data)[valid])
    with torch.no_grad():
        hidden = drafter.hidden(packed(data["train.target_hidden_states"]), blocks)
        logits = drafter.corrected(hidden, blocks.prev)
        score = drafter.confidence(hidden, blocks.prev)
    if "train.hidden" in data:
        assert_close("hidden", hidden[valid], kept(data["train.hidden"], data)[valid])
    assert_close("logits", logits[valid], kept(data["train.draft_logits"], data)[valid])
    if score is not None:
        assert_close("confidence", score[valid], kept(data["train.confidence_pred"], data)[valid])
    head, cap = drafter.core.head.detach(), drafter.core.softcap
    last = packed(data["train.target_last_hidden_states"])
    lse, _ = log_sum_exp(last, head, cap)
    rows = blocks.teacher.flatten()
    log_teacher = Teacher(head, cap).log_probs(last[rows], lse[rows])
    if "train.aligned_target_logits" in data:
        expected = kept(data["train.aligned_target_logits"], data).log_softmax(-1)
        assert_close("teacher", log_teacher.view(expected.shape)[valid], expected[valid])
    return drafter, data, blocks, log_teacher


def run(drafter: TrainableDrafter, taps: Tensor, blocks: Blocks, log_teacher: Tensor, scales: Scales) -> Result:
    """The losses at the labels that count."""
    rows = blocks.valid.flatten().nonzero().flatten()
    at_rows = Scales(*(s.flatten()[rows] for s in (scales.ce, scales.tv, scales.confidence)))
    return drafter(taps, blocks, rows, blocks.labels.flatten()[rows], log_teacher[rows], at_rows)


@pytest.mark.parametrize("case", DEEPSPEC)
def test_deepspec(case: str) -> None:
    """Sums of each loss term, their divisor, the loss, and all recorded gradients."""
    drafter, data, blocks, log_teacher = check_forward(case)
    weights = blocks.valid * decay_weights(drafter.gamma, 4.0)
    assert float(weights.sum()) == pytest.approx(float(data["train.ce_loss_den"]), rel=1e-6)
    alpha = (0.1, 0.9, 1.0) if drafter.config.confidence else (1.0, 0.0, 0.0)
    scale = weights / (weights.sum() + 1e-6)
    taps = packed(data["train.target_hidden_states"])
    result = run(drafter, taps, blocks, log_teacher, Scales(*(scale * a for a in alpha)))
    assert float((result.ce * weights).sum()) == pytest.approx(float(data["train.ce_loss_num"]), rel=1e-5)
    if drafter.config.confidence:
        assert float((result.tv * weights).sum()) == pytest.approx(float(data["train.l1_loss_num"]), rel=1e-5)
    assert float(result.loss.detach()) == pytest.approx(float(data["train.loss"]), rel=1e-5)

    result.loss.backward()
    gradients = {n: g for n, g in canonical_gradients(drafter).items() if f"train.grad.{n}" in data}
    assert len(gradients) == sum(name.startswith("train.grad.") for name in data) > 0
    for name, gradient in gradients.items():
        assert_close(f"gradient of {name}", gradient, data[f"train.grad.{name}"], 1e-4)


@pytest.mark.parametrize("case", OTHERS)
def test_forwards_of_other_layers(case: str) -> None:
    """Gemma 4's layers and soft cap; a gated head over a sliding layer, causal in the block, and a full one."""
    drafter, data, blocks, log_teacher = check_forward(case)
    if "train.loss" not in data:
        return
    # SpecForge divides all terms by one sum of weights, without an epsilon.
    weights = blocks.valid * decay_weights(drafter.gamma, 4.0)
    scale = weights / weights.sum()
    for term in ("ce", "l1", "confidence"):
        assert float(weights.sum()) == pytest.approx(float(data[f"train.{term}_loss_den"]), rel=1e-6)
    taps = packed(data["train.target_hidden_states"])
    with torch.no_grad():
        result = run(drafter, taps, blocks, log_teacher, Scales(scale * 0.1, scale * 0.9, scale))
    assert float((result.ce * weights).sum()) == pytest.approx(float(data["train.ce_loss_num"]), rel=1e-5)
    assert float((result.tv * weights).sum()) == pytest.approx(float(data["train.l1_loss_num"]), rel=1e-5)
    loss = float(data["train.loss"])
    assert math.isfinite(loss)
    assert float(result.loss) == pytest.approx(loss, rel=1e-5)


def canonical_gradients(drafter: TrainableDrafter) -> dict[str, Tensor]:
    """Gradients by canonical name: the parameters hold their gradients while the names are made."""
    values = {p: p.data for p in drafter.parameters()}
    for p in values:
        p.data = torch.zeros_like(p.data) if p.grad is None else p.grad
    try:
        return {n: t.clone() for n, t in drafter.canonical().items()}
    finally:
        for p, value in values.items():
            p.data = value
