"""Reading folders: strict tensors, vocabulary maps, prefixes, shards, pickles, Hub ids."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dspark.checkpoints import (
    expected_tensors,
    load_checkpoint,
    make_checkpoint,
    random_tensors,
    read_config,
    resolve_source,
)
from dspark.errors import CheckpointError

ROOT = Path(__file__).parents[1] / "golden"
LOADABLE = sorted(p.parent.name for p in ROOT.glob("*/model.safetensors") if p.parent.name != "target_qwen3_tiny")


def write(folder: Path, case: str, tensors: dict[str, Tensor] | None = None, **changes: Any) -> Path:
    """A copy of a golden checkpoint with other tensors or config keys."""
    folder.mkdir(exist_ok=True)
    config = json.loads((ROOT / case / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        tensors if tensors is not None else load_file(ROOT / case / "model.safetensors"), folder / "model.safetensors"
    )
    return folder


def tensors_of(case: str) -> dict[str, Tensor]:
    return load_file(ROOT / case / "model.safetensors")


@pytest.mark.parametrize("case", LOADABLE)
def test_golden_folders_load(case: str) -> None:
    checkpoint = load_checkpoint(ROOT / case)
    stored = tensors_of(case)
    assert set(checkpoint.tensors) == set(stored) - {"d2t", "t2d"}
    assert all(torch.equal(checkpoint.tensors[name], stored[name]) for name in checkpoint.tensors)
    assert set(checkpoint.tensors) <= set(expected_tensors(checkpoint.config))
    if "d2t" in stored:
        assert checkpoint.token_map is not None
        assert torch.equal(checkpoint.token_map, torch.arange(66) + stored["d2t"])
        assert torch.equal(checkpoint.token_map, stored["t2d"].nonzero().flatten())
    else:
        assert checkpoint.token_map is None


def test_one_error_lists_missing_unexpected_and_misshapen(tmp_path: Path) -> None:
    """Case 35: one renamed, one extra, one misshapen."""
    tensors = tensors_of("deepspec_dspark_vanilla")
    tensors["layers.1.mlp.gate_prj.weight"] = tensors.pop("layers.1.mlp.gate_proj.weight")
    tensors["layers.0.self_attn.sinks"] = torch.zeros(4)
    tensors["norm.weight"] = torch.ones(31)
    with pytest.raises(CheckpointError) as err:
        load_checkpoint(write(tmp_path / "x", "deepspec_dspark_vanilla", tensors))
    text = str(err.value)
    assert "4 tensors do not fit" in text
    gate = "layers.1.mlp.gate_proj.weight [48, 32] (the file has layers.1.mlp.gate_prj.weight)"
    assert f"missing {gate}" in text
    assert "unexpected layers.1.mlp.gate_prj.weight [48, 32] (nearest layers.1.mlp.gate_proj.weight)" in text
    assert "unexpected layers.0.self_attn.sinks [4]" in text
    assert "misshapen norm.weight: expected [32], got [31]" in text


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_embedding_and_head_are_optional_where_the_format_leaves_them_out(tmp_path: Path, name: str) -> None:
    tensors = tensors_of("deepspec_dspark_vanilla")
    del tensors[name]
    with pytest.raises(CheckpointError, match=f"missing {name}"):
        load_checkpoint(write(tmp_path / "a", "deepspec_dspark_vanilla", tensors))
    legacy = tensors_of("speculators_dspark_vanilla_legacy_layout")
    del legacy[name]
    load_checkpoint(write(tmp_path / "b", "speculators_dspark_vanilla_legacy_layout", legacy))


def test_pruned_vocabulary_needs_head_and_map(tmp_path: Path) -> None:
    for name in ("lm_head.weight", "d2t"):
        tensors = tensors_of("speculators_dspark_vanilla")
        del tensors[name]
        with pytest.raises(CheckpointError, match=f"missing {name}"):
            load_checkpoint(write(tmp_path / name, "speculators_dspark_vanilla", tensors))


def test_vocabulary_maps_are_checked(tmp_path: Path) -> None:
    """Case 36: a map shorter than the draft vocabulary; absolute ids, duplicates and a foreign t2d as well."""
    good = tensors_of("speculators_dspark_vanilla")
    absolute = torch.arange(66) + good["d2t"]
    duplicate = good["d2t"].clone()
    duplicate[1] = duplicate[0] - 1
    foreign = good["t2d"].roll(1)
    for key, value, words in (
        ("d2t", good["d2t"][:65].clone(), "misshapen d2t: expected \\[66\\], got \\[65\\]"),
        ("d2t", absolute, "looks like absolute ids"),
        ("d2t", duplicate, "appear more than once"),
        ("d2t", good["d2t"].float(), "expected integers"),
        ("t2d", foreign, "t2d marks 66 target ids"),
    ):
        with pytest.raises(CheckpointError, match=words):
            load_checkpoint(write(tmp_path / "x", "speculators_dspark_vanilla", {**good, key: value}))


def test_prefixes_of_old_files(tmp_path: Path) -> None:
    stored = tensors_of("specforge_dspark_gated_swa")
    old = {(f"logit_head.{n}" if n.startswith(("markov", "confidence")) else n): t for n, t in stored.items()}
    assert old.keys() != stored.keys()
    assert load_checkpoint(write(tmp_path / "a", "specforge_dspark_gated_swa", old)).tensors.keys() == stored.keys()
    wrapped = {f"model.{n}": t for n, t in stored.items()}
    assert load_checkpoint(write(tmp_path / "b", "specforge_dspark_gated_swa", wrapped)).tensors.keys() == stored.keys()
    with pytest.raises(CheckpointError, match="stored twice"):
        load_checkpoint(
            write(tmp_path / "c", "specforge_dspark_gated_swa", {**wrapped, "fc.weight": stored["fc.weight"].clone()})
        )


def test_deepseek_tensors_are_refused(tmp_path: Path) -> None:
    tensors = {**tensors_of("deepspec_dspark_vanilla"), "mtp.0.main_norm.weight": torch.ones(4)}
    with pytest.raises(CheckpointError, match="DeepSeek-V4's own drafter layers"):
        load_checkpoint(write(tmp_path / "x", "deepspec_dspark_vanilla", tensors))


def test_quantised_tensors_are_refused(tmp_path: Path) -> None:
    tensors = tensors_of("deepspec_dspark_vanilla")
    tensors["fc.weight"] = tensors["fc.weight"].to(torch.int8)
    with pytest.raises(CheckpointError, match=r"fc.weight: expected a floating dtype, got torch.int8"):
        load_checkpoint(write(tmp_path / "x", "deepspec_dspark_vanilla", tensors))


def test_shards(tmp_path: Path) -> None:
    folder = write(tmp_path / "x", "deepspec_dspark_vanilla")
    tensors = tensors_of("deepspec_dspark_vanilla")
    names = sorted(tensors)
    (folder / "model.safetensors").unlink()
    files = {"model-00001.safetensors": names[:10], "model-00002.safetensors": names[10:]}
    for file, own in files.items():
        save_file({n: tensors[n] for n in own}, folder / file)
    index = {"weight_map": {n: file for file, own in files.items() for n in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load_checkpoint(folder).tensors.keys() == tensors.keys()
    (folder / "model-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-00002"):
        load_checkpoint(folder)


def test_pickles_are_never_loaded(tmp_path: Path) -> None:
    folder = write(tmp_path / "x", "deepspec_dspark_vanilla")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin is a pickle, which is never loaded"):
        load_checkpoint(folder)
    folder = write(tmp_path / "y", "zlab_dflash")
    (folder / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="mask embedding is a pickle"):
        load_checkpoint(folder)


def test_damaged_files(tmp_path: Path) -> None:
    folder = write(tmp_path / "x", "deepspec_dspark_vanilla")
    (folder / "model.safetensors").write_bytes(b"\x00" * 64)
    with pytest.raises(CheckpointError, match=r"model.safetensors"):
        load_checkpoint(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json"):
        load_checkpoint(folder)


def test_sources(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "deepspec_dspark_vanilla", tmp_path / "run" / "step_10")
    with pytest.raises(CheckpointError, match="did you mean one of its folders: step_10"):
        resolve_source(tmp_path / "run")
    assert resolve_source(tmp_path / "run" / "step_10") == tmp_path / "run" / "step_10"
    with pytest.raises(CheckpointError, match="revision 'v1' applies to Hub ids"):
        resolve_source(tmp_path / "run" / "step_10", "v1")
    with pytest.raises(CheckpointError, match="neither a folder nor a Hub id"):
        resolve_source(tmp_path / "absent" / "folder")


def test_hub_id_with_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hub id goes to the Hub's cache with its revision, tensors and JSON alone; its failure is told as ours."""
    asked: dict[str, Any] = {}

    def snapshot(repo: str, **kwargs: Any) -> str:
        asked.update(kwargs, repo=repo)
        if repo == "someone/absent":
            raise OSError("no such repository")
        return str(ROOT / "zlab_dflash")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    checkpoint = load_checkpoint("someone/drafter", revision="v2")
    assert checkpoint.config.source_format == "zlab"
    assert asked["repo"] == "someone/drafter"
    assert asked["revision"] == "v2"
    assert not any("bin" in p or "pt" in p for p in asked["allow_patterns"])
    with pytest.raises(CheckpointError, match=r"at revision 'v3'.*no such repository"):
        load_checkpoint("someone/absent", revision="v3")


@pytest.mark.parametrize("case", LOADABLE)
def test_random_tensors_are_a_checkpoint_of_their_config(case: str) -> None:
    config = read_config(json.loads((ROOT / case / "config.json").read_text()))
    first, again = random_tensors(config, seed=1), random_tensors(config, seed=1)
    assert all(torch.equal(first[n], again[n]) for n in first)
    checkpoint = make_checkpoint(config, first, source="random")
    pruned = config.draft_vocab_size < config.vocab_size
    assert (checkpoint.token_map is not None) == pruned
