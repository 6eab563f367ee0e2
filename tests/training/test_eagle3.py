"""EAGLE-3's training-time test: DeepSpec's recorded steps, and the inference drafter's."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dspark.checkpoints import load_checkpoint
from dspark.training.config import LossSettings
from dspark.training.eagle3 import EagleObjective, TrainableEagle3
from dspark.training.features import Features
from dspark.training.metrics import Tally
from dspark.training.samples import Sample
from dspark.training.teacher import Teacher, log_sum_exp
from tests.drafters.golden import assert_close
from tests.training.golden import ROOT, io, samples_of

torch.set_num_threads(1)
CASE = "deepspec_eagle3"


def eagle(steps: int | None = None) -> TrainableEagle3:
    checkpoint = load_checkpoint(ROOT / CASE)
    config = checkpoint.config if steps is None else dataclasses.replace(checkpoint.config, block_size=steps)
    tensors = dict(checkpoint.tensors)
    embedding, head = tensors.pop("embed_tokens.weight"), tensors.pop("lm_head.weight")
    return TrainableEagle3(config, tensors, embedding=embedding, head=head)


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
