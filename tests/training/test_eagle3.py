"""EAGLE-3's training-time test: DeepSpec's recorded steps, and the inference drafter's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dspark.checkpoints import load_checkpoint
from dspark.training.config import LossSettings
from dspark.training.eagle3 import EagleObjective, TrainableEagle3, plan_entries
from dspark.training.features import Features
from dspark.training.metrics import Tally
from dspark.training.samples import Sample
from dspark.training.teacher import Teacher, log_sum_exp
from tests.drafters.eagle import commit_text, make_eagle
from tests.drafters.golden import assert_close, propose, request, stub_target
from tests.training.golden import ROOT, io, samples_of

torch.set_num_threads(1)
CASE = "deepspec_eagle3"


def eagle(case: str = CASE) -> TrainableEagle3:
    checkpoint = load_checkpoint(ROOT / case, target_layers=6)
    tensors = dict(checkpoint.tensors)
    embedding, head = tensors.pop("embed_tokens.weight"), tensors.pop("lm_head.weight")
    return TrainableEagle3(checkpoint.config, tensors, embedding=embedding, head=head)


def recorded() -> tuple[list[Sample], list[Features]]:
    """The recorded batch without its padding."""
    data, head = io(CASE), load_checkpoint(ROOT / CASE).tensors["lm_head.weight"]
    samples, features = [], []
    for i, sample in enumerate(samples_of(data)):
        n = int(data["train.attention_mask"][i].sum())
        samples.append(Sample(sample.ids[:n], sample.loss_mask[:n]))
        last = data["train.target_last_hidden_states"][i, :n]
        features.append(Features(data["train.target_hidden_states"][i, :n], last, *log_sum_exp(last, head)))
    return samples, features


def test_recorded_steps() -> None:
    """Masks, logits and loss of three steps; the divisor is the number of tokens, padding included."""
    drafter, data = eagle(), io(CASE)
    samples, features = recorded()
    objective = EagleObjective(drafter, Teacher(drafter.core.head.detach()), None, LossSettings(ce=1.0, tv=0.0))
    plan = objective.plan(samples, [])
    taps = torch.cat([f.taps for f in features])
    for k, normed in enumerate(drafter.unrolled(taps, plan.tokens, plan.lengths)):
        mask = torch.cat([m[:n, 0] for m, n in zip(data[f"train.step{k}.position_mask"], plan.lengths, strict=True)])
        assert torch.equal(plan.valid[:, k], mask.bool())
        recorded_logits = data[f"train.step{k}.draft_logits"]
        expected = torch.cat([x[:n] for x, n in zip(recorded_logits, plan.lengths, strict=True)])
        got = torch.nn.functional.linear(normed, drafter.core.head)
        assert_close(f"step {k}", got[mask.bool()].detach(), expected[mask.bool()])
    padded = torch.tensor([float(data["train.input_ids"].numel())])
    tally = Tally(3)
    loss = objective.loss(plan, features, padded, 0.0, tally)
    assert float(loss.detach()) == pytest.approx(float(data["train.loss"]), rel=1e-5)
    assert tally.summary()["blocks"] == int(plan.valid[:, 0].sum())
    loss.backward()
    assert all(p.grad is not None for n, p in drafter.named_parameters() if p.requires_grad)


@pytest.mark.parametrize("case", [CASE, "speculators_eagle3"])
def test_unrolled_steps_are_those_of_inference(case: str) -> None:
    """A text that goes on with what the drafter drafted: the same states, step by step, as when it drafted them."""
    drafter, training = make_eagle(case, stub_target(input_embeddings=None, lm_head=None)), eagle(case)
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(0, 90, (11,), generator=generator).tolist()
    taps = torch.randn(len(ids) - 1, drafter.core.fc.shape[1], generator=generator)
    commit_text(drafter, ids, taps, start=0)
    block, logits = propose(drafter, [request(ids)], 3)
    drafts = block.token_ids[0].tolist()
    sample = Sample(np.array([*ids, *drafts]), np.ones(len(ids) + 3, dtype=bool))
    plan = plan_entries([sample], 3)
    padded = torch.cat([taps, torch.zeros(len(sample) - len(taps), taps.shape[1])])
    with torch.no_grad():
        for k, normed in enumerate(training.unrolled(padded, plan.tokens, plan.lengths)):
            entry = normed[len(ids) - 2]
            assert_close(f"step {k}", entry, block.hidden[0, k])
            assert_close(f"logits {k}", torch.nn.functional.linear(entry, training.core.head), logits[0, k])


def test_entries_by_hand() -> None:
    """Tokens that are paired, entries that count, and the rows of the laws that they predict, of two sequences."""
    first = Sample(np.array([1, 2, 3, 4]), np.array([False, True, True, True]))
    second = Sample(np.array([5, 6, 7]), np.array([True, True, False]))
    plan = plan_entries([first, second], 2)
    assert plan.lengths == (4, 3)
    assert plan.tokens.tolist() == [[2, 3], [3, 4], [4, 0], [0, 0], [6, 7], [7, 0], [0, 0]]
    t, f = True, False
    assert plan.valid.tolist() == [[f, t], [t, t], [t, f], [f, f], [t, t], [t, f], [f, f]]
    assert plan.teacher.tolist() == [[0, 2], [2, 3], [3, 0], [0, 0], [5, 6], [6, 0], [0, 0]]
