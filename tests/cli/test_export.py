"""``dspark export``: golden checkpoints in the other format, from the command line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.checkpoints import load_checkpoint

ROOT = Path(__file__).parents[1] / "golden"
TARGET = ROOT / "target_qwen3_tiny"
Command = Callable[..., Any]


def test_to_both_formats(dspark: Command, tmp_path: Path) -> None:
    first = ROOT / "deepspec_dspark_vanilla"
    args = ("--target", TARGET, "--target-name", "owner/target")
    ended = dspark("export", first, "--to", "speculators", "-o", tmp_path / "a", *args)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.splitlines() == [f"wrote {tmp_path / 'a'}: speculators, from deepspec"]
    a = load_checkpoint(tmp_path / "a")
    assert (a.config.source_format, a.config.target_name) == ("speculators", "owner/target")
    ended = dspark("export", tmp_path / "a", "--to", "deepspec", "-o", tmp_path / "b", "--target", TARGET, "--json")
    assert ended.json == {"format": "deepspec", "folder": str(tmp_path / "b"), "notes": []}
    again, original = load_checkpoint(tmp_path / "b"), load_checkpoint(first)
    assert again.tensors.keys() == original.tensors.keys()
    assert all(torch.equal(again.tensors[n], t) for n, t in original.tensors.items())


def test_a_target_is_named_as_elsewhere(dspark: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark.targets.load.resolve_source", lambda name: str(TARGET) if name == "smollm2" else name)
    args = ("--to", "speculators", "-o", tmp_path / "a", "--target", "smollm2")
    assert dspark("export", ROOT / "zlab_dflash", *args).code == 0
    assert load_checkpoint(tmp_path / "a").config.target_name == "smollm2"


def test_notes_are_shown(dspark: Command, tmp_path: Path) -> None:
    ended = dspark("export", ROOT / "zlab_dflash", "--to", "deepspec", "-o", tmp_path / "a", "--target", TARGET)
    assert ended.code == 0
    assert "note: the layout is mask-only: DeepSpec's own code does not read sample_from_anchor" in ended.out


@pytest.mark.parametrize(
    ("case", "args", "code", "words"),
    [
        ("speculators_dflash", ("--to", "deepspec", "--target", TARGET), 1, "its vocabulary is pruned (66 of 97 ids)"),
        ("zlab_dflash", ("--to", "speculators"), 1, "this one names none; name it"),
        ("zlab_dflash", ("--to", "deepspec", "--keep-embeddings"), 2, "stores embedding and head in any case"),
        ("zlab_dflash", ("--to", "gguf"), 2, "'gguf' is not one of"),
    ],
)
def test_refusals(dspark: Command, tmp_path: Path, case: str, args: tuple[Any, ...], code: int, words: str) -> None:
    ended = dspark("export", ROOT / case, "-o", tmp_path / "out", *args)
    assert ended.code == code
    assert words in ended.err
    assert list(tmp_path.glob("out*")) == []


def test_keeping_and_overwriting(dspark: Command, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "deepspec_dflash", tmp_path / "out")
    legacy = ROOT / "speculators_dspark_vanilla_legacy_layout"
    args = ("export", legacy, "--to", "speculators", "-o", tmp_path / "out", "--keep-embeddings")
    ended = dspark(*args)
    assert ended.code == 1
    assert "exists and is not empty" in ended.err
    assert dspark(*args, "--overwrite").code == 0
    assert "embed_tokens.weight" in load_checkpoint(tmp_path / "out").tensors
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["speculators_model_type"] == "dspark"
