"""DeepSpec's own training forward: blocks, hidden states, logits, loss terms and gradients."""

from __future__ import annotations

import pytest
import torch

from dspark.training.losses import decay_weights
from dspark.training.model import Scales
from dspark.training.teacher import Teacher, log_sum_exp
from tests.drafters.golden import assert_close
from tests.training.golden import io, kept, packed, packed_blocks, trainable

torch.set_num_threads(1)
CASES = ("deepspec_dspark_vanilla", "deepspec_dspark_gated", "deepspec_dspark_rnn", "deepspec_dflash")


@pytest.mark.parametrize("case", CASES)
def test_training_forward(case: str) -> None:
    drafter, data = trainable(case), io(case)
    blocks = packed_blocks(data, drafter.gamma)
    valid = kept(data["train.eval_mask"], data)
    assert torch.equal(blocks.valid, valid)
    assert torch.equal(blocks.labels[valid], kept(data["train.target_ids"], data)[valid])

    taps = packed(data["train.target_hidden_states"])
    last = packed(data["train.target_last_hidden_states"])
    hidden = drafter.hidden(taps, blocks)
    logits = drafter.corrected(hidden, blocks.prev)
    assert_close("logits", logits[valid], kept(data["train.draft_logits"], data)[valid])
    score = drafter.confidence(hidden, blocks.prev)
    if score is not None:
        assert_close("confidence", score[valid], kept(data["train.confidence_pred"], data)[valid])

    head = drafter.core.head.detach()
    lse, _ = log_sum_exp(last, head)
    log_teacher = Teacher(head).log_probs(last[blocks.teacher.flatten()], lse[blocks.teacher.flatten()])
    target = kept(data["train.aligned_target_logits"], data).log_softmax(-1)
    assert_close("teacher", log_teacher.view(target.shape)[valid], target[valid])

    decay = decay_weights(drafter.gamma, 4.0)
    weights = valid * decay
    assert float(weights.sum()) == pytest.approx(float(data["train.ce_loss_den"]), rel=1e-6)
    scale = weights / (weights.sum() + 1e-6)
    with_confidence = drafter.config.confidence
    alpha = (0.1, 0.9, 1.0) if with_confidence else (1.0, 0.0, 0.0)
    result = drafter(taps, blocks, blocks.labels, log_teacher, Scales(*(scale * a for a in alpha)))
    assert float((result.ce * weights).sum()) == pytest.approx(float(data["train.ce_loss_num"]), rel=1e-5)
    if with_confidence:
        assert float((result.tv * weights).sum()) == pytest.approx(float(data["train.l1_loss_num"]), rel=1e-5)
    assert float(result.loss) == pytest.approx(float(data["train.loss"]), rel=1e-5)

    result.loss.backward()
    gradients = {n: p for n, p in canonical_gradients(drafter).items() if f"train.grad.{n}" in data}
    assert len(gradients) == sum(name.startswith("train.grad.") for name in data) > 0
    for name, gradient in gradients.items():
        assert_close(f"gradient of {name}", gradient, data[f"train.grad.{name}"], 1e-4)


def canonical_gradients(drafter: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Gradients by canonical name: the parameters are replaced by their gradients while the names are made."""
    values = {p: p.data for p in drafter.parameters()}
    for p in values:
        p.data = torch.zeros_like(p.data) if p.grad is None else p.grad
    try:
        return {n: t.clone() for n, t in drafter.canonical().items()}
    finally:
        for p, value in values.items():
            p.data = value
