"""Loss terms against their formulas in plain autograd, whole and pruned vocabularies, and a table by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.training.config import LossSettings
from dspark.training.features import Features
from dspark.training.losses import confidence_loss, decay_weights, draft_losses
from dspark.training.metrics import Tally
from dspark.training.objective import BlockObjective
from dspark.training.samples import Sample
from dspark.training.teacher import Teacher, log_sum_exp
from tests.drafters.golden import near
from tests.training.golden import trainable

torch.set_num_threads(1)


def problem(rows: int = 37, whole: int = 19, kept: int = 11) -> tuple[Tensor, Tensor, Tensor]:
    """Draft logits [rows, kept], log t over ``kept`` of ``whole`` tokens, labels of which some are outside."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(rows, kept, dtype=torch.float64, generator=generator)
    teacher = torch.randn(rows, whole, dtype=torch.float64, generator=generator).mul(2).log_softmax(-1)[:, :kept]
    labels = torch.randint(-1, kept, (rows,), generator=generator)
    return logits, teacher, labels


def plain(logits: Tensor, teacher: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor]:
    """CE and TV by their definitions."""
    logp, t = logits.log_softmax(-1), teacher.exp()
    tv = (logp.exp() - t).abs().sum(-1) + (1 - t.sum(-1))
    if labels is None:
        return -(t * logp).sum(-1), tv
    ce = -logp.gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1)
    return torch.where(labels >= 0, ce, 0.0), tv


@pytest.mark.parametrize("hard", [True, False])
@pytest.mark.parametrize("kept", [11, 19])
def test_values_and_gradients_are_those_of_the_formulas(hard: bool, kept: int) -> None:
    logits, teacher, labels = problem(kept=kept)
    y = labels if hard else None
    generator = torch.Generator().manual_seed(5)
    a, b = torch.rand(2, len(logits), dtype=torch.float64, generator=generator)
    mine, reference = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    out = draft_losses(mine, teacher, y, a, b)
    ce, tv = plain(reference, teacher, y)
    expected = (ce * a).sum() + (tv * b).sum()
    near(out.total.detach(), expected.detach(), 1e-12)
    near(out.ce, ce.detach(), 1e-12)
    near(out.tv, tv.detach(), 1e-12)
    assert torch.equal(out.best, logits.argmax(-1))
    (2.5 * out.total).backward()
    (2.5 * expected).backward()
    near(mine.grad, reference.grad, 1e-12)


def test_a_label_outside_the_vocabulary_has_no_cross_entropy() -> None:
    logits, teacher, labels = problem()
    ones = torch.ones(len(logits), dtype=torch.float64)
    mine = logits.clone().requires_grad_()
    out = draft_losses(mine, teacher, labels, ones, ones * 0)
    out.total.backward()
    assert (labels < 0).any()
    assert (out.ce[labels < 0] == 0).all()
    assert (mine.grad[labels < 0] == 0).all()
    assert (mine.grad[labels >= 0] != 0).any(1).all()


def test_mass_outside_the_vocabulary_counts_as_difference() -> None:
    """t = (.5, .3) of a third token with .2; p = (.6, .4): |.1| + |.1| + .2."""
    logits = torch.tensor([[0.6, 0.4]]).log()
    out = draft_losses(logits, torch.tensor([[0.5, 0.3]]).log(), torch.tensor([0]), torch.ones(1), torch.ones(1))
    assert float(out.tv) == pytest.approx(0.4)
    assert float(out.ce) == pytest.approx(-math.log(0.6))


def test_bfloat16_teacher_keeps_likely_tokens_exact() -> None:
    """Logits of about thirty round by an eighth in bfloat16; log t near 0 must not."""
    generator = torch.Generator().manual_seed(0)
    hidden = (torch.randn(64, 48, generator=generator) * 3).bfloat16()
    head = torch.randn(500, 48, generator=generator).bfloat16()
    exact = F.linear(hidden.double(), head.double()).log_softmax(-1)
    sums, best = log_sum_exp(hidden, head)
    assert torch.equal(best.long(), exact.argmax(-1))
    near(sums, F.linear(hidden.double(), head.double()).logsumexp(-1), 2e-2)
    spared, same = log_sum_exp(hidden, head, rows=24, logits=F.linear(hidden, head))
    assert torch.equal(same, best)
    near(spared, sums, 1e-3)
    got = Teacher(head[:200]).log_probs(hidden, sums).double().exp()
    near(got, exact[:, :200].exp(), 8e-3)
    naive = (F.linear(hidden, head[:200]).double() - sums.double().unsqueeze(1)).exp()
    assert float((naive - exact[:, :200].exp()).abs().max()) > 3 * float((got - exact[:, :200].exp()).abs().max())


def test_soft_capped_teacher() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(8, 16, generator=generator) * 4, torch.randn(30, 16, generator=generator) * 4
    exact = (torch.tanh(F.linear(hidden, head) / 5) * 5).log_softmax(-1)
    sums, _ = log_sum_exp(hidden, head, softcap=5.0)
    near(Teacher(head[:9], softcap=5.0).log_probs(hidden, sums), exact[:, :9], 1e-5)


def test_confidence_is_trained_on_the_acceptance() -> None:
    """c* = 1 - TV / 2 is a constant, clipped to [0, 1] (eq. 8)."""
    logits = torch.zeros(3, requires_grad=True)
    acceptance = torch.tensor([0.25, 1.0 + 1e-6, -1e-6], requires_grad=True)
    loss = confidence_loss(logits, acceptance, torch.tensor([1.0, 2.0, 3.0]))
    assert float(loss) == pytest.approx(6 * math.log(2), rel=1e-6)
    loss.backward()
    near(logits.grad, torch.tensor([0.25, -1.0, 1.5]), 1e-6)
    assert acceptance.grad is None


def test_weights_by_hand() -> None:
    """Block 4: exp(-k / 4), k from 0; each label's share of its term's sum; what is out of the mask weighs nothing."""
    near(decay_weights(4, 4.0), torch.tensor([1.0, 0.77880, 0.60653, 0.47237]), 1e-5)
    near(decay_weights(3, None), torch.ones(3))
    drafter = trainable("deepspec_dspark_vanilla")
    objective = BlockObjective(drafter, Teacher(drafter.core.head.detach()), None, LossSettings(0.5, 2.0, 1.0, 4.0), 8)
    ids = np.array([5, 6, 7, 8, 9, 10, 11, 12])
    mask = np.array([0, 0, 1, 1, 1, 1, 0, 1], dtype=bool)
    plan = objective.plan_at([Sample(ids, mask)], [np.array([2, 4])])
    assert plan.blocks.prev.tolist() == [[7, 8, 9, 10], [9, 10, 11, 12]]
    assert plan.blocks.labels.tolist() == [[8, 9, 10, 11], [10, 11, 12, 0]]
    assert plan.blocks.valid.tolist() == [[True, True, True, False], [True, False, False, False]]
    assert plan.blocks.teacher.tolist() == [[2, 3, 4, 0], [4, 0, 0, 0]]
    total = 1.0 + 0.77880 + 0.60653 + 1.0
    assert objective.totals(plan).tolist() == pytest.approx([total, total], abs=1e-4)
    scales = objective.scales(plan, objective.totals(plan), 0.0)
    share = torch.tensor([[1.0, 0.77880, 0.60653, 0.0], [1.0, 0.0, 0.0, 0.0]]) / total
    near(scales.ce, share * 0.5, 1e-5)
    near(scales.tv, share * 2.0, 1e-5)
    near(scales.confidence, share, 1e-5)


BACKBONE = ("fc", "hidden_norm", "norm", "layers.0", "layers.1")
REACHED = {
    "ce": (*BACKBONE, "w1", "w2"),
    "tv": (*BACKBONE, "w1", "w2"),
    "confidence": (*BACKBONE, "w1", "confidence"),
}
"""Which parameters each loss moves: the confidence head reads hidden states and W1, so its loss reaches them too."""


@pytest.mark.parametrize("loss", sorted(REACHED))
def test_which_parameters_each_loss_reaches(loss: str) -> None:
    drafter = trainable("deepspec_dspark_vanilla")
    weights = {name: float(name == loss) for name in REACHED}
    objective = BlockObjective(drafter, Teacher(drafter.core.head.detach()), None, LossSettings(**weights), 8)
    generator = torch.Generator().manual_seed(1)
    sample = Sample(np.arange(20), np.arange(20) >= 4)
    plan = objective.plan_at([sample], [np.array([5, 9, 12])])
    taps, last = torch.randn(20, 64, generator=generator), torch.randn(20, 32, generator=generator)
    features = Features(taps, last, *log_sum_exp(last, drafter.core.head.detach()))
    objective.loss(plan, [features], objective.totals(plan), 0.0, Tally(4)).backward()
    moved = {n for n, p in drafter.named_parameters() if p.grad is not None and bool((p.grad != 0).any())}
    assert {group(name) for name in moved} == set(REACHED[loss])


def group(name: str) -> str:
    """``core.layers.0.qkv`` -> ``layers.0``; ``sequential.w1`` -> ``w1``; ``confidence_bias`` -> ``confidence``."""
    part = name.removeprefix("core.").removeprefix("sequential.")
    if part.startswith("layers."):
        return ".".join(part.split(".")[:2])
    return "confidence" if part.startswith("confidence") else part


def test_thinned_labels_weigh_the_same_on_average() -> None:
    """Label k counts with probability w_k, always after the labels before it; what counts weighs one."""
    drafter = trainable("deepspec_dspark_vanilla")
    objective = BlockObjective(drafter, Teacher(drafter.core.head.detach()), None, LossSettings(thin=True), 500)
    sample = Sample(np.arange(2000) % 90, np.ones(2000, dtype=bool))
    plan = objective.plan([sample] * 8, [np.random.default_rng([9, i]) for i in range(8)])
    assert len(plan.blocks) == 4000
    near(plan.counted.double().mean(0), torch.exp(-torch.arange(4) / 4.0), 0.03)
    assert bool((plan.counted[:, :-1] | ~plan.counted[:, 1:]).all())
    assert objective.totals(plan).tolist() == [float(plan.counted.sum())] * 2


def test_cross_entropy_against_the_law() -> None:
    """Value and gradients are those of -sum_v t(v) log p(v) over the labels that count, whatever the tokens are."""
    drafter = trainable("deepspec_dspark_vanilla")
    head = drafter.core.head.detach()
    settings = LossSettings(ce=1.0, tv=0.0, confidence=0.0, decay=3.0, against="law")
    objective = BlockObjective(drafter, Teacher(head), None, settings, 8)
    generator = torch.Generator().manual_seed(2)
    plan = objective.plan_at([Sample(np.arange(20), np.arange(20) >= 4)], [np.array([5, 9, 17])])
    assert bool((~plan.counted).any())
    taps, last = torch.randn(20, 64, generator=generator), torch.randn(20, 32, generator=generator)
    loss = objective.loss(plan, [Features(taps, last, *log_sum_exp(last, head))], objective.totals(plan), 0.0, Tally(4))
    loss.backward()
    found = {n: p.grad.clone() for n, p in drafter.named_parameters() if p.grad is not None}
    drafter.zero_grad()
    logp = drafter.corrected(drafter.hidden(taps, plan.blocks), plan.blocks.prev).log_softmax(-1)
    law = F.linear(last[plan.blocks.teacher], head).softmax(-1)
    weights = plan.counted * torch.exp(-torch.arange(4) / 3.0)
    expected = (-(law * logp).sum(-1) * weights).sum() / weights.sum()
    near(loss.detach(), expected.detach(), 1e-4)
    expected.backward()
    assert {"core.fc", "sequential.w1"} <= set(found)
    for name, p in drafter.named_parameters():
        if p.grad is not None:
            near(found[name], p.grad, 1e-4)
