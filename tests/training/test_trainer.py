"""The loop: resuming, accumulating, data that grows, what can't be learnt from, and numbers that are none."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspark.errors import TrainingError
from dspark.training.checkpoint import checkpoints
from dspark.training.features import Features
from dspark.training.trainer import Trainer
from tests.training.tiny import hf_target, make_run, records, responses, write_lines


@pytest.fixture(scope="module")
def target(tiny_model: Any, tiny_tokenizer: Any) -> Any:
    return hf_target(tiny_model, tiny_tokenizer)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in trainer.parameters.items()}


@pytest.mark.parametrize("algorithm", ["dspark", "eagle3"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_resumed_run_is_the_same_bit_for_bit(algorithm: str, precision: str, target: Any, tmp_path: Path) -> None:
    """Stopped in the middle of an epoch and begun anew in another process state: the same weights, the same log."""
    drafter = {"algorithm": algorithm, "vocab_size": 150}
    optim = {"steps": 9, "precision": precision, "sequences": 3}
    whole = make_run(tmp_path, target, drafter=drafter, optim=optim, run={"output": str(tmp_path / "a")})
    expected = weights(whole.train())

    first = make_run(tmp_path, target, drafter=drafter, optim=optim, run={"output": str(tmp_path / "b")})
    trainer = first.prepare()
    trainer.on_log = lambda r, log=first.log: (log(r), setattr(trainer, "stopping", r["step"] == 5))
    trainer.run()
    assert trainer.step == 5
    assert trainer.done not in (0, trainer.epoch_steps)
    torch.manual_seed(999)
    np.random.seed(999)
    second = make_run(tmp_path, target, drafter=drafter, optim=optim, run={"output": str(tmp_path / "b")})
    got = second.train(checkpoints(tmp_path / "b")[-1])
    assert got.step == 9
    for name, tensor in expected.items():
        assert torch.equal(tensor, got.parameters[name]), name

    def figures(output: str) -> list[dict[str, Any]]:
        rows = [json.loads(line) for line in (tmp_path / output / "log.jsonl").read_text().splitlines()]
        return [{k: v for k, v in r.items() if "second" not in k} for r in rows]

    assert figures("a") == figures("b")


def test_accumulated_forwards_are_one_large_forward(target: Any, tmp_path: Path) -> None:
    """Each term is divided by the weights of the whole step, so parts of unequal size add up exactly."""
    for name, optim in (("a", {"sequences": 6}), ("b", {"sequences": 2, "accumulate": 3})):
        make_run(tmp_path, target, optim={"steps": 3, **optim}, run={"output": str(tmp_path / name)}).train()
    a, b = ([json.loads(x) for x in (tmp_path / n / "log.jsonl").read_text().splitlines()] for n in "ab")
    for one, other in zip(a, b, strict=True):
        for key in ("loss", "grad_norm", "ce", "tv"):
            assert one.get(key, 0.0) == pytest.approx(other.get(key, 0.0), rel=1e-5)


def test_every_conversation_is_seen_once_an_epoch(target: Any, tmp_path: Path) -> None:
    trainer = make_run(tmp_path, target, data={"holdout": 0}).prepare()
    orders = []
    for epoch in range(2):
        trainer.epoch, seen = epoch, []
        trainer.begin_epoch()
        for done in range(trainer.epoch_steps):
            trainer.done = done
            seen += [n for part in trainer.batches() for n in part]
        assert sorted(seen) == list(range(12))
        orders.append(seen)
    assert orders[0] != orders[1]


def test_held_out_prompts_are_never_trained_on(target: Any, tmp_path: Path) -> None:
    """All responses of a prompt are on one side."""
    lines = responses(12) + responses(12, seed=1)
    write_lines(tmp_path / "data.jsonl", lines)
    trainer = make_run(tmp_path, target, data={"holdout": 4}).prepare()
    held = {trainer.source.sample(n).index for n in trainer.held}
    assert held == {0, 4, 8}
    assert len(trainer.held) == 6
    assert not held & {trainer.source.sample(n).index for n in trainer.order.tolist()}


def test_what_can_not_be_learnt_from_is_skipped_counted_and_reported(target: Any, tmp_path: Path) -> None:
    """A conversation shorter than a block, an assistant turn of one token, no assistant at all."""
    bad = [
        {"prompt_ids": [5], "response_ids": [6, 7]},
        {"prompt_ids": [5] * 20, "response_ids": [6]},
        {"prompt_ids": [5] * 20, "response_ids": []},
    ]
    write_lines(tmp_path / "data.jsonl", [*responses(6), *bad])
    lines: list[str] = []
    trainer = make_run(tmp_path, target, lines, data={"holdout": 0}).prepare()
    assert len(trainer.order) == 6
    said = "\n".join(lines)
    assert "left out: 1 x assistant turns of one token (first: line 8); 1 x no token of the assistant" in said
    assert "left out: 1 x shorter than an anchor and a block of 4 drafts (first: line 7)" in said


def test_nothing_to_train_on(target: Any, tmp_path: Path) -> None:
    write_lines(tmp_path / "data.jsonl", [{"prompt_ids": [5], "response_ids": [6, 7]}])
    with pytest.raises(TrainingError, match=r"0 conversations to train on.*left out: 1 x shorter"):
        make_run(tmp_path, target).prepare()


def test_data_that_grows_is_taken_in_at_the_next_epoch(target: Any, tmp_path: Path) -> None:
    data = {"cache": str(tmp_path / "cache"), "follow": True, "holdout": 0}
    write_lines(tmp_path / "data.jsonl", responses(4))
    run = make_run(tmp_path, target, data=data, optim={"steps": 6})
    trainer = run.prepare()

    def grow(record: dict[str, Any]) -> None:
        if record["step"] == 1:
            write_lines(tmp_path / "data.jsonl", responses(4) + responses(8, seed=2))

    trainer.on_log = grow
    trainer.run()
    assert (trainer.epoch, trainer.done, trainer.samples) == (1, 4, 12)


class Spoilt:
    """A source that breaks one number of one conversation."""

    def __init__(self, inner: Any, part: str, value: float) -> None:
        self._inner, self._part, self._value = inner, part, value

    def __len__(self) -> int:
        return len(self._inner)

    def sample(self, number: int) -> Any:
        return self._inner.sample(number)

    def features(self, numbers: Any) -> list[Features]:
        out = self._inner.features(numbers)
        for i, number in enumerate(numbers):
            if number == 3:
                broken = getattr(out[i], self._part).clone()
                broken.view(-1)[len(broken.view(-1)) // 2] = self._value
                out[i] = dataclasses.replace(out[i], **{self._part: broken})
        return out


@pytest.mark.parametrize("part", ["taps", "last"])
def test_features_that_are_no_numbers_stop_the_run(part: str, target: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path, target, data={"holdout": 0}, optim={"sequences": 12, "anchors": 40})
    trainer = run.prepare()
    trainer.source = Spoilt(trainer.source, part, float("nan"))
    before = weights(trainer)
    with pytest.raises(
        TrainingError, match=rf"step 0: the loss is nan.*the target's {part} of the conversation in line 4"
    ):
        trainer.run()
    assert all(torch.equal(t, trainer.parameters[n]) for n, t in before.items())


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("core.layers.1.down", float("inf"), r"weight core\.layers\.1\.down"),
        ("core.layers.0.gate_up", 1e30, r"output of layers\.0"),
        ("core.norm", 3e38, "hidden states behind norm"),
        ("confidence_weight", 3e38, "confidence logits"),
    ],
)
def test_the_first_bad_tensor_is_named(name: str, value: float, found: str, target: Any, tmp_path: Path) -> None:
    trainer = make_run(tmp_path, target).prepare()
    with torch.no_grad():
        trainer.parameters[name].fill_(value)
    with pytest.raises(TrainingError, match=rf"First tensor that is not finite: {found}"):
        trainer.run()


def test_a_bad_gradient_is_named(target: Any, tmp_path: Path) -> None:
    trainer = make_run(tmp_path, target).prepare()
    trainer.parameters["core.norm"].register_hook(lambda g: g * float("nan"))
    with pytest.raises(TrainingError, match=r"gradient's norm nan.*gradient of core\.norm"):
        trainer.run()


def test_eagle3_names_the_step(target: Any, tmp_path: Path) -> None:
    trainer = make_run(tmp_path, target, drafter={"algorithm": "eagle3"}).prepare()
    with torch.no_grad():
        trainer.parameters["core.norm"].fill_(3e38)
    with pytest.raises(TrainingError, match=r"First tensor that is not finite: output of step 0"):
        trainer.run()


def test_gradients_too_large_for_their_norm(target: Any, tmp_path: Path) -> None:
    trainer = make_run(tmp_path, target).prepare()
    trainer.parameters["core.norm"].register_hook(lambda g: torch.full_like(g, 1e38))
    with pytest.raises(TrainingError, match=r"norm inf.*every tensor is finite, the norm itself overflows"):
        trainer.run()


def test_checkpoints_are_kept_and_dropped(target: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path, target, optim={"steps": 7}, run={"save_every": 2, "keep": 2, "log_every": 5})
    run.train()
    assert json.loads((run.output / "step-0000006" / "state.json").read_text())["blocks"] == 6 * 12
    assert [p.name for p in checkpoints(run.output)] == ["step-0000006", "step-0000007"]
    state = json.loads((run.output / "step-0000007" / "state.json").read_text())
    assert state["config"] == run.config.plain()
    assert (state["step"], state["format"], state["version"]) == (7, "dspark-training-state", 1)
    assert records(run)[-1]["total_blocks"] == state["blocks"] > 0


def test_settings_that_change_at_a_resume_are_said(target: Any, tmp_path: Path) -> None:
    make_run(tmp_path, target).train()
    lines: list[str] = []
    again = make_run(tmp_path, target, lines, optim={"steps": 6, "lr": 5e-4})
    assert again.train(checkpoints(tmp_path / "out")[-1]).step == 6
    said = "going on from step 4 with other settings: optim.lr: 0.001 -> 0.0005; optim.steps: 4 -> 6"
    assert said in lines


def test_a_checkpoint_of_another_drafter_is_refused(target: Any, tmp_path: Path) -> None:
    make_run(tmp_path, target).train()
    last = checkpoints(tmp_path / "out")[-1]
    with pytest.raises(
        TrainingError, match=r"confidence_weight: .*; sequential\.w1: expected \[300, 4\], got \[300, 8\]"
    ):
        make_run(tmp_path, target, drafter={"rank": 4}).prepare(last)
    (last / "state.json").write_text("{}")
    with pytest.raises(TrainingError, match="not a training checkpoint"):
        make_run(tmp_path, target).prepare(last)
