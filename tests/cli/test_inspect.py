"""``dspark inspect`` on golden checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from dspark.cli.inspect import inspect
from dspark.errors import CheckpointError, TargetError
from dspark.targets import load

ROOT = Path(__file__).parents[1] / "golden"
TARGET = str(ROOT / "target_qwen3_tiny")


def run(*args: str) -> Any:
    app = typer.Typer()
    app.command()(inspect)
    return CliRunner().invoke(app, list(args), env={"COLUMNS": "200"})


CASES = sorted(p.parent.name for p in ROOT.glob("*/model.safetensors") if p.parent.name != "target_qwen3_tiny")


@pytest.mark.parametrize("case", CASES)
def test_every_golden_checkpoint_is_described_and_fits(case: str) -> None:
    result = run(str(ROOT / case), "--target", TARGET, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert report["format"] == case.partition("_")[0]
    assert report["target"] == {"name": TARGET, "fits": True, "problems": []}
    assert report["parameters"] > 20_000
    text = run(str(ROOT / case), "--target", TARGET).output
    assert report["layout"] in text
    steps = "trained on 3" if case.endswith("eagle3") else f"gamma up to {report['max_gamma']}"
    assert steps in text
    assert "fits: " in text


def test_what_it_says_of_one() -> None:
    report = json.loads(run(str(ROOT / "speculators_dspark_vanilla"), "--json").output)
    assert report["draft_vocabulary"] == 66
    assert (report["embedding"], report["output_head"]) == ("the target's", "own")
    assert "window 6 from the anchor, causal in the block" in report["layers"][0]
    assert any("input embedding" in line for line in report["needs"])
    assert "target" not in report


def test_a_target_that_does_not_fit(tmp_path: Path) -> None:
    values = json.loads((ROOT / "target_qwen3_tiny" / "config.json").read_text())
    values |= {"num_hidden_layers": 3, "hidden_size": 64, "vocab_size": 200}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": values}))
    result = run(str(ROOT / "deepspec_dspark_vanilla"), "--target", str(tmp_path))
    assert result.exit_code == 1
    for words in ("taps layer 3", "64", "97 token ids, the target has 200", "with 6 layers, this one has 3"):
        assert words in result.output


def test_targets_are_named_as_in_other_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An alias, a .gguf file and a folder with one are converted first; here, to the golden target."""
    wheel = tmp_path / "wheel_of_a_target"
    wheel.mkdir()
    (wheel / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(load.ALIASES, "tiny", ("wheel_of_a_target", "wheel-of-a-target"))
    monkeypatch.setattr(load, "converted", lambda path: Path(TARGET) if path == wheel / "model.gguf" else path)
    for target in ("tiny", str(wheel), str(wheel / "model.gguf")):
        report = json.loads(run(str(ROOT / "deepspec_dspark_vanilla"), "--target", target, "--json").output)
        assert report["target"] == {"name": target, "fits": True, "problems": []}


@pytest.mark.real
def test_the_small_target_inside_a_wheel() -> None:
    result = run(str(ROOT / "deepspec_dspark_vanilla"), "--target", "smollm2")
    assert result.exit_code == 1
    assert "this one has 30" in result.output


def test_what_is_no_target_is_an_error_with_the_nearest_name() -> None:
    result = run(str(ROOT / "deepspec_dspark_vanilla"), "--target", "smollm")
    assert isinstance(result.exception, TargetError)
    assert "did you mean 'smollm2'?" in str(result.exception)


def test_broken_and_large_weights_are_named(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "deepspec_dflash", tmp_path / "x")
    file = tmp_path / "x" / "model.safetensors"
    tensors = load_file(file)
    tensors["norm.weight"] = tensors["norm.weight"] * torch.nan
    tensors["fc.weight"] = tensors["fc.weight"] * 1e9
    save_file(tensors, file)
    result = run(str(tmp_path / "x"))
    assert result.exit_code == 1
    assert "non-finite values in: norm.weight" in result.output
    assert "overflows in float16: fc.weight" in result.output


def test_what_is_no_drafter_is_an_error() -> None:
    result = run(TARGET)
    assert isinstance(result.exception, CheckpointError)
