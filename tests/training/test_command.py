"""``dspark train`` as a user calls it."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from dspark.checkpoints import load_checkpoint
from dspark.cli.main import main
from dspark.cli.train import stop_on_signals
from dspark.training.checkpoint import checkpoints
from tests.training.tiny import hf_target, make_run, settings


@pytest.fixture
def config_file(tiny_model: Any, tiny_tokenizer: Any, tmp_path: Path) -> Path:
    tiny_model.save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    target = {"model": str(tmp_path / "model"), "dtype": "float32"}
    values = settings(tmp_path, target=target, data={"cache": str(tmp_path / "cache")}, run={"save_every": 0})
    (tmp_path / "run.json").write_text(json.dumps(values))
    return tmp_path / "run.json"


def train(*arguments: Any) -> int:
    try:
        main(["train", *map(str, arguments)])
    except SystemExit as left:
        return int(left.code or 0)
    return 0


def test_from_nothing_to_a_drafter(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A dry run, the cache alone, a run, a second one that is refused, and one that goes on."""
    folder = config_file.parent
    assert train(config_file, "--dry-run") == 0
    said = capsys.readouterr().out
    assert "new tokens x (1 + 1) layers x 32 wide x 2 bytes" in said
    assert not list((folder / "cache").glob("shard*"))

    assert train(config_file, "--fill-cache") == 0
    assert (folder / "cache" / "shard-00000.safetensors").is_file()
    assert not (folder / "out").exists()
    capsys.readouterr()

    assert train(config_file, "--set", "drafter.gamma=3", "--set", "optim.steps=3") == 0
    said = capsys.readouterr().out
    assert "target cache" not in said
    assert "train 3/3" in said
    assert f"done; the drafter is in {folder / 'out' / 'drafter'}" in said
    assert load_checkpoint(folder / "out" / "drafter", target_layers=2).config.max_gamma == 3

    assert train(config_file) == 1
    assert "--resume goes on, or name another run.output" in capsys.readouterr().err
    assert train(config_file, "--set", "drafter.gamma=3", "--set", "optim.steps=5", "--resume") == 0
    said = capsys.readouterr().out
    assert "going on from step 3 with other settings: optim.steps: 3 -> 5" in said
    assert [p.name for p in checkpoints(folder / "out")] == ["step-0000003", "step-0000005"]


@pytest.mark.parametrize(
    ("setting", "message", "code"),
    [
        ("optim.lrr=1", "unknown setting 'lrr'; did you mean 'lr'", 2),
        ("opt.lr=1", "unknown section 'opt'; did you mean 'optim'", 2),
        ("data.cache_budget_gib=1e-6", "data.cache_budget_gib allows 1e-06 GiB", 1),
        ("drafter.head=markow", "markow", 2),
        ("drafter.taps=[0, 7]", "expected rising layers from -1 to 1", 2),
        ("target.model=/nowhere", "no such file or folder", 1),
    ],
)
def test_errors_are_one_line(
    setting: str, message: str, code: int, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(config_file, "--set", setting) == code
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("dspark: ")
    assert message in said


def test_nothing_to_resume(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(config_file, "--resume") == 1
    assert "--resume: no checkpoint in" in capsys.readouterr().err


def test_a_signal_ends_the_run_after_its_step(tiny_model: Any, tiny_tokenizer: Any, tmp_path: Path) -> None:
    """With a checkpoint; the second one ends the process as ever."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    run = make_run(tmp_path, hf_target(tiny_model, tiny_tokenizer), optim={"steps": 50})
    try:

        def interrupt(record: dict[str, Any]) -> None:
            if record["step"] == 3:
                os.kill(os.getpid(), signal.SIGTERM)

        def begin(trainer: Any) -> None:
            stop_on_signals(trainer)
            trainer.on_log = interrupt

        trainer = run.train(on_start=begin)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert trainer.step == 3
    assert checkpoints(run.output)[-1].name == "step-0000003"


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is not None, reason="TensorBoard is installed")
def test_tensorboard_that_is_not_there(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(config_file, "--set", "run.tensorboard=true") == 2
    assert "run.tensorboard: needs TensorBoard (pip install tensorboard)" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="TensorBoard is not installed")
def test_tensorboard_events(config_file: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert train(config_file, "--set", "run.tensorboard=true") == 0
    events = EventAccumulator(str(config_file.parent / "out" / "tensorboard")).Reload()
    assert [e.step for e in events.Scalars("train/accept/1")] == [1, 2, 3, 4]
    assert {"train/loss", "eval/accepted_length", "train/match/4"} <= set(events.Tags()["scalars"])
