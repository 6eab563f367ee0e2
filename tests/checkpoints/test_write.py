"""Writing both formats: what is read, written and read again is the same drafter, bit for bit."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dspark.checkpoints import (
    Checkpoint,
    DrafterConfig,
    LayerConfig,
    RopeConfig,
    TargetParts,
    load_checkpoint,
    make_checkpoint,
    random_tensors,
    read_target,
    write_deepspec,
    write_speculators,
)
from dspark.checkpoints.configs import differences
from dspark.errors import CheckpointError

ROOT = Path(__file__).parents[1] / "golden"
TARGET = ROOT / "target_qwen3_tiny"
GEMMA = "deepspec_dspark_gemma4"
PRUNED = ("speculators_dspark_vanilla", "speculators_dflash")
SLIDING = ("speculators_dspark_rnn_bonus_anchor",)
CASES = sorted(p.name for p in ROOT.iterdir() if p.name.startswith(("deepspec_d", "speculators_d", "specf", "zlab")))
Writer = Callable[..., tuple[str, ...]]
WRITERS: dict[str, Writer] = {"deepspec": write_deepspec, "speculators": write_speculators}


def target() -> TargetParts:
    return dataclasses.replace(read_target(TARGET), name="target_qwen3_tiny")


def without_raw(checkpoint: Checkpoint) -> Checkpoint:
    """As it comes from a training: nothing but the description."""
    return dataclasses.replace(checkpoint, raw=None, path=None)


def assert_same(first: Checkpoint, second: Checkpoint, ignoring: tuple[str, ...] = ()) -> None:
    assert differences(first.config, second.config) == []
    names = set(first.tensors) - set(ignoring)
    assert names == set(second.tensors) - set(ignoring)
    for name in names:
        assert first.tensors[name].dtype == second.tensors[name].dtype
        assert torch.equal(first.tensors[name], second.tensors[name]), name
    assert (first.token_map is None) == (second.token_map is None)
    if first.token_map is not None and second.token_map is not None:
        assert torch.equal(first.token_map, second.token_map)


def refusal(case: str, to: str) -> str | None:
    """Why a golden drafter has no place in a format; None where it has one."""
    if to == "deepspec" and case in PRUNED:
        return "its vocabulary is pruned"
    if to == "deepspec" and case in SLIDING:
        return "measures its window from the anchor, and this format from the query"
    if to == "speculators" and case == GEMMA:
        return "its draft layers are Qwen3's, this drafter has Gemma 4's"
    if to == "speculators" and case.startswith("specforge"):
        return "measures its window from the query, and this format from the anchor"
    return None


@pytest.mark.parametrize("own_config", [True, False], ids=["with its config", "from its description"])
@pytest.mark.parametrize("to", WRITERS)
@pytest.mark.parametrize("case", CASES)
def test_round_trip_of_every_golden_checkpoint(case: str, to: str, own_config: bool, tmp_path: Path) -> None:
    read = load_checkpoint(ROOT / case)
    source = read if own_config else without_raw(read)
    settings: dict[str, Any] = {"target": target()}
    if to == "speculators" and "embed_tokens.weight" in read.tensors:
        settings["keep_embeddings"] = True
    reason = refusal(case, to)
    if reason is not None:
        with pytest.raises(CheckpointError, match=reason):
            WRITERS[to](tmp_path / "out", source, **settings)
        assert list(tmp_path.iterdir()) == [], "nothing is left behind"
        return
    WRITERS[to](tmp_path / "out", source, **settings)
    again = load_checkpoint(tmp_path / "out", target_layers=read.config.num_target_layers)
    assert again.config.source_format == to
    borrowed = {"embed_tokens.weight", "lm_head.weight"} - set(read.tensors) if to == "deepspec" else ()
    assert_same(read, again, tuple(borrowed))
    for name, part in (("embed_tokens.weight", target().embedding), ("lm_head.weight", target().head)):
        if name in borrowed:
            assert torch.equal(again.tensors[name], part)
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


@pytest.mark.parametrize("case", [c for c in CASES if refusal(c, c.partition("_")[0]) is None and c[0] in "ds"])
def test_its_own_config_keeps_its_keys(case: str, tmp_path: Path) -> None:
    read = load_checkpoint(ROOT / case)
    to = read.config.source_format
    if to not in WRITERS:
        return
    WRITERS[to](tmp_path / "out", read, **({"keep_embeddings": True} if to == "speculators" else {}))
    old, new = (json.loads((folder / "config.json").read_text()) for folder in (ROOT / case, tmp_path / "out"))
    old.pop("auto_map", None)
    if to == "speculators":
        old["speculators_version"] = "0.9.0"
    assert new == old
    before, after = (load_file(folder / "model.safetensors") for folder in (ROOT / case, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) and before[n].dtype == after[n].dtype for n in before)
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize(
    "case", [c for c in CASES if refusal(c, "speculators") is None and refusal(c, "deepspec") is None]
)
def test_there_and_back(case: str, tmp_path: Path) -> None:
    """DeepSpec -> speculators 0.9 (which stores no embedding) -> DeepSpec."""
    first, parts = load_checkpoint(ROOT / case), target()
    write_deepspec(tmp_path / "a", first, target=parts)
    a = load_checkpoint(tmp_path / "a")
    write_speculators(tmp_path / "b", a, target=parts)
    assert set(load_file(tmp_path / "b" / "model.safetensors")).isdisjoint({"embed_tokens.weight", "lm_head.weight"})
    write_deepspec(tmp_path / "c", load_checkpoint(tmp_path / "b"), target=parts)
    assert_same(a, load_checkpoint(tmp_path / "c"))


def test_keys_that_servers_read(tmp_path: Path) -> None:
    """vLLM looks for these at the root; speculators' tap ids are one higher; code is never named."""
    drafter = without_raw(load_checkpoint(ROOT / "deepspec_dspark_vanilla"))
    write_deepspec(tmp_path / "a", drafter, target=target())
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    for key in ("markov_rank", "block_size", "enable_confidence_head", "confidence_head_with_markov", "mask_token_id"):
        assert config[key] == drafter.raw[key] if drafter.raw else key in config
    assert config["architectures"] == ["Qwen3DSparkModel"]
    assert config["target_layer_ids"] == [1, 3]
    assert config["dtype"] == "float32"
    write_speculators(tmp_path / "b", drafter, target=target())
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["aux_hidden_state_layer_ids"] == [2, 4]
    assert config["sample_from_anchor"] is True
    assert config["sliding_window_non_causal"] is True, "vLLM takes false for causal full layers"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "target_qwen3_tiny",
        "architectures": ["Qwen3ForCausalLM"],
    }
    assert "model_type" not in config
    assert "auto_map" not in config


def test_mask_only_layout_is_written_out(tmp_path: Path) -> None:
    """Case 33: absent, the key means anchor-first in one format and mask-only in the other."""
    drafter = load_checkpoint(ROOT / "zlab_dflash")
    notes = write_deepspec(tmp_path / "a", drafter, target=target())
    assert any("DeepSpec's own code does not read sample_from_anchor" in note for note in notes)
    write_speculators(tmp_path / "b", drafter, target=target())
    for name in "ab":
        assert load_checkpoint(tmp_path / name).config.layout == "mask-only"
        assert json.loads((tmp_path / name / "config.json").read_text())["sample_from_anchor"] is False


def test_what_is_left_out_is_compared_first(tmp_path: Path) -> None:
    drafter = load_checkpoint(ROOT / "deepspec_dspark_vanilla")
    with pytest.raises(CheckpointError, match="name the target to compare it with, or keep the embeddings"):
        write_speculators(tmp_path / "a", dataclasses.replace(drafter, config=named(drafter.config)))
    other = dict(drafter.tensors)
    other["lm_head.weight"] = other["lm_head.weight"] + 1e-6
    with pytest.raises(CheckpointError, match=r"lm_head.weight is not the target's"):
        write_speculators(tmp_path / "a", dataclasses.replace(drafter, tensors=other), target=target())
    assert not (tmp_path / "a").exists()


def test_a_borrowed_head_comes_back(tmp_path: Path) -> None:
    """Of a pruned vocabulary: the target's rows of its map, taken by the drafter and by the next export."""
    from types import SimpleNamespace

    from dspark.drafters.fit import fit

    drafter, whole = load_checkpoint(ROOT / "speculators_dspark_vanilla"), target()
    other = {**drafter.tensors, "lm_head.weight": drafter.tensors["lm_head.weight"] + 1e-6}
    with pytest.raises(CheckpointError, match=r"lm_head.weight is not the target's"):
        write_speculators(tmp_path / "a", dataclasses.replace(drafter, tensors=other), target=whole, borrow_head=True)
    assert whole.head is not None
    assert drafter.token_map is not None
    own = {**drafter.tensors, "lm_head.weight": whole.head[drafter.token_map].to(torch.float32)}
    drafter = dataclasses.replace(drafter, tensors=own)
    write_speculators(tmp_path / "a", drafter, target=whole, borrow_head=True)
    small = load_checkpoint(tmp_path / "a")
    assert small.config.borrows_head
    assert set(drafter.tensors) - set(small.tensors) >= {"lm_head.weight"}
    with pytest.raises(CheckpointError, match="stores the target's head, which is not here"):
        write_speculators(tmp_path / "b", small)
    write_speculators(tmp_path / "b", small, target=whole)
    assert torch.equal(load_checkpoint(tmp_path / "b").tensors["lm_head.weight"], own["lm_head.weight"])
    assert "head_from_target" not in json.loads((tmp_path / "b" / "config.json").read_text())
    vocab, width = whole.head.shape
    model = SimpleNamespace(
        name="t", vocab_size=vocab, num_layers=None, lm_head=SimpleNamespace(weight=whole.head, bias=None),
        input_embeddings=torch.nn.Embedding(vocab, width),
    )  # fmt: skip
    heads = [fit(c, model, torch.device("cpu"), torch.float32).head for c in (small, load_checkpoint(tmp_path / "b"))]
    assert torch.equal(heads[0], heads[1])


def test_without_the_key_a_pruned_head_has_to_be_there(tmp_path: Path) -> None:
    drafter = load_checkpoint(ROOT / "speculators_dspark_vanilla")
    write_speculators(tmp_path / "a", drafter, target=target())
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "a" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        load_checkpoint(tmp_path / "a")


def named(config: DrafterConfig) -> DrafterConfig:
    return dataclasses.replace(config, target_name="owner/target")


@pytest.mark.parametrize("case", ["deepspec_eagle3", "speculators_eagle3"])
@pytest.mark.parametrize("to", WRITERS)
def test_eagle3_is_not_written(case: str, to: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="EAGLE-3 drafters are read and run, not written"):
        WRITERS[to](tmp_path / "out", load_checkpoint(ROOT / case), target=target())


def test_what_is_missing_is_asked_for(tmp_path: Path) -> None:
    zlab = load_checkpoint(ROOT / "zlab_dflash")
    with pytest.raises(CheckpointError, match="this one names none; name it"):
        write_speculators(tmp_path / "a", zlab)
    with pytest.raises(CheckpointError, match="stores the target's embedding, which is not here; name the target"):
        write_deepspec(tmp_path / "a", zlab)
    legacy = load_checkpoint(ROOT / "speculators_dspark_vanilla_legacy_layout")
    with pytest.raises(CheckpointError, match="number of the target's layers is not known"):
        write_deepspec(tmp_path / "a", legacy)
    scaled = dataclasses.replace(target(), model_type="gemma3_text")
    with pytest.raises(CheckpointError, match="scales its embeddings"):
        write_deepspec(tmp_path / "a", zlab, target=scaled)
    narrow = dataclasses.replace(target(), embedding=torch.zeros(96, 32))
    with pytest.raises(CheckpointError, match=r"misshapen embed_tokens.weight: expected \[97, 32\], got \[96, 32\]"):
        write_deepspec(tmp_path / "a", zlab, target=narrow)


def changed(case: str, **fields: Any) -> Checkpoint:
    read = load_checkpoint(ROOT / case)
    return dataclasses.replace(read, config=dataclasses.replace(read.config, **fields))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"layers": (LayerConfig(2, 12, causal=True),) * 2}, "layer 0 is causal in the block"),
        ({"target_layer_ids": (1, 5)}, "5 is the target's last layer"),
        ({"logit_softcap": 30.0}, "logit_softcap: 30.0, None"),
        ({"embed_scale": 2.0}, "embed_scale: 2.0, 1.0"),
        ({"family": "llama"}, "no Llama-style ones"),
        (
            {"layers": (LayerConfig(2, 12), LayerConfig(2, 12, rope=RopeConfig(theta=5.0)))},
            "can't say all of it",
        ),
    ],
)
def test_what_would_read_back_as_another_drafter_is_refused(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        write_deepspec(tmp_path / "out", changed("deepspec_dspark_vanilla", **fields))
    assert list(tmp_path.iterdir()) == []


def test_what_speculators_has_no_drafter_for(tmp_path: Path) -> None:
    wide = changed("deepspec_dspark_vanilla", target_hidden_size=48)
    with pytest.raises(CheckpointError, match="this one is 32 wide and its taps 48"):
        write_speculators(tmp_path / "out", wide, target=target())
    read = load_checkpoint(ROOT / PRUNED[0])
    assert read.token_map is not None
    shuffled = dataclasses.replace(read, token_map=read.token_map.flip(0))
    with pytest.raises(CheckpointError, match="its draft ids rise with the target's"):
        write_speculators(tmp_path / "out", shuffled)


def test_llama_style_layers_are_written_for_this_library_alone(tmp_path: Path) -> None:
    config = changed("deepspec_dspark_vanilla", family="llama", requires_embeddings=False).config
    made = make_checkpoint(config, random_tensors(config, seed=4))
    notes = write_speculators(tmp_path / "out", made, target=target(), keep_embeddings=True)
    assert any("speculators and vLLM build Qwen3's" in note for note in notes)
    assert_same(made, load_checkpoint(tmp_path / "out"))


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(theta=5e5, rope_type="linear", factor=4.0),
        RopeConfig(rope_type="llama3", factor=8.0, original_max=64, low_freq=1.0, high_freq=3.0),
        RopeConfig(rope_type="yarn", factor=4.0, original_max=64, beta_fast=16.0, attention_factor=1.2, truncate=False),
        RopeConfig(rope_type="yarn", factor=4.0, original_max=64, mscale=0.7, mscale_all_dim=0.9),
    ],
    ids=lambda rope: rope.rope_type,
)
def test_scaled_ropes(rope: RopeConfig, tmp_path: Path) -> None:
    config = changed("deepspec_dspark_vanilla", layers=(LayerConfig(2, 12, rope=rope),) * 2).config
    made = make_checkpoint(config, random_tensors(config, seed=1))
    write_deepspec(tmp_path / "out", made)
    assert load_checkpoint(tmp_path / "out").config.layers == config.layers


def test_sliding_layers_of_deepspec_and_gemma(tmp_path: Path) -> None:
    """Windows measured from the query; Gemma 4's two shapes and ropes."""
    full = load_checkpoint(ROOT / GEMMA).config
    layers = (LayerConfig(2, 8, window=7, causal=True, rope=RopeConfig(theta=1e4)), full.layers[0])
    for config in (
        dataclasses.replace(full, layers=layers),
        changed("deepspec_dflash", layers=(layers[0], LayerConfig(2, 8, rope=layers[0].rope))).config,
    ):
        made = make_checkpoint(config, random_tensors(config, seed=2))
        notes = write_deepspec(tmp_path / config.family, made)
        assert any("some layers slide" in note for note in notes)
        assert_same(made, load_checkpoint(tmp_path / config.family))


def test_notes_about_other_readers(tmp_path: Path) -> None:
    def notes(case: str, name: str) -> str:
        return " ".join(write_speculators(tmp_path / name, load_checkpoint(ROOT / case), target=target()))

    text = notes("speculators_dspark_rnn_bonus_anchor", "a")
    assert "vLLM (0.32) runs the Markov head alone, this drafter has the head rnn" in text
    assert "sliding layers are bidirectional in the block: vLLM (0.32) runs them causally" in text
    assert "runs the full ones causally too" not in text
    assert notes("deepspec_dspark_vanilla", "b") == ""
    mixed = load_checkpoint(ROOT / "speculators_dspark_vanilla").config
    dflash = dataclasses.replace(
        load_checkpoint(ROOT / "speculators_dflash").config, layers=mixed.layers, draft_vocab_size=97
    )
    made = make_checkpoint(dflash, random_tensors(dflash, seed=3))
    found = write_speculators(tmp_path / "c", made, target=target(), keep_embeddings=True)
    assert found == ("some layers slide: vLLM (0.32) runs the full ones causally too",)


def test_views_and_shared_memory_are_stored_apart(tmp_path: Path) -> None:
    """Tensors of a running drafter are slices of fused ones; a tied head is the embedding."""
    read = load_checkpoint(ROOT / "deepspec_dspark_vanilla")
    tensors = dict(read.tensors)
    q, k = "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.k_proj.weight"
    tensors[q], tensors[k] = torch.cat([tensors[q], tensors[k]]).split([48, 24])
    tensors["fc.weight"] = tensors["fc.weight"].t().contiguous().t()
    tensors["lm_head.weight"] = tensors["embed_tokens.weight"]
    write_deepspec(tmp_path / "out", dataclasses.replace(read, tensors=tensors))
    again = load_checkpoint(tmp_path / "out")
    assert all(torch.equal(again.tensors[n], tensors[n]) for n in tensors)


def test_bfloat16(tmp_path: Path) -> None:
    read = load_checkpoint(ROOT / "deepspec_dspark_gated")
    half = dataclasses.replace(read, tensors={n: t.bfloat16() for n, t in read.tensors.items()})
    write_deepspec(tmp_path / "out", half)
    assert_same(half, load_checkpoint(tmp_path / "out"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


# -- calibration, plugin heads, folders -------------------------------------------------------------------------------

TEMPERATURES = {"format": "dspark-sts", "version": 2, "entries": []}


def test_calibration_travels_beside_the_tensors(tmp_path: Path) -> None:
    from dspark.checkpoints.describe import describe
    from dspark.confidence.calibration import read_calibration

    read = load_checkpoint(ROOT / "deepspec_dspark_vanilla")
    write_deepspec(tmp_path / "a", read, calibration=TEMPERATURES)
    write_speculators(tmp_path / "b", load_checkpoint(tmp_path / "a"), target=target())
    for name in "ab":
        folder = tmp_path / name
        assert describe(load_checkpoint(folder))["calibration"] is True
        assert read_calibration(folder / "calibration.json").to_json() == TEMPERATURES
        assert "dspark-sts" not in (folder / "config.json").read_text()
    with pytest.raises(CheckpointError, match="expected format 'dspark-sts', got None"):
        write_deepspec(tmp_path / "c", read, calibration={"entries": []})


@pytest.mark.parametrize("to", WRITERS)
def test_plugin_head_is_named_with_its_version(to: str, tmp_path: Path) -> None:
    read = load_checkpoint(ROOT / "deepspec_dspark_vanilla")
    config = dataclasses.replace(
        read.config, head="acme/lookup", head_version="1.4.0", head_config={"depth": 3, "sizes": (4, 5)}
    )
    tensors = {n: t for n, t in read.tensors.items() if not n.startswith("markov_head.")}
    tensors |= {"markov_head.table.weight": torch.arange(12.0).view(3, 4), "markov_head.steps": torch.arange(3)}
    made = make_checkpoint(config, tensors)
    notes = WRITERS[to](tmp_path / "out", made, target=target())
    assert any("acme/lookup 1.4.0: other readers can't run it" in note for note in notes)
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw["sequential_head"] == {
        "name": "acme/lookup",
        "version": "1.4.0",
        "config": {"depth": 3, "sizes": [4, 5]},
    }
    assert raw["markov_head_type"] == "acme/lookup", "other readers must not take it for a head that they know"
    again = load_checkpoint(tmp_path / "out")
    assert (again.config.head, again.config.head_version) == ("acme/lookup", "1.4.0")
    assert_same(made, again, ("embed_tokens.weight", "lm_head.weight"))


def test_folders(tmp_path: Path) -> None:
    read = load_checkpoint(ROOT / "deepspec_dflash")
    out = tmp_path / "deep" / "out"
    write_deepspec(out, read)
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        write_deepspec(out, read)
    (out / "stale.safetensors").write_bytes(b"")
    write_deepspec(out, load_checkpoint(ROOT / "deepspec_dspark_rnn"), overwrite=True)
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "model.safetensors"]
    assert load_checkpoint(out).config.head == "rnn"
    assert (out / "config.json").stat().st_mode == (out / "model.safetensors").stat().st_mode
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        write_deepspec(tmp_path / "file", read)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["deep", "file"]
    assert [p.name for p in out.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("there", [False, True])
def test_a_failed_write_leaves_what_was_there(there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = load_checkpoint(ROOT / "deepspec_dflash")
    out = tmp_path / "out"
    if there:
        write_deepspec(out, read)

    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(CheckpointError, match="no space left"):
        write_deepspec(out, load_checkpoint(ROOT / "deepspec_dspark_rnn"), overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == (["out"] if there else [])
    if there:
        assert load_checkpoint(out).config.head == "none"


# -- targets -----------------------------------------------------------------------------------------------------------


def test_parts_of_a_target(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from dspark.checkpoints import parts_of
    from dspark.targets.hf import HFTarget

    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    for parts in (target(), parts_of(HFTarget(model, name="target_qwen3_tiny"))):
        assert (parts.name, parts.layers, parts.model_type) == ("target_qwen3_tiny", 6, "qwen3")
        assert parts.architectures == ("Qwen3ForCausalLM",)
        assert torch.equal(parts.embedding, model.get_input_embeddings().weight)
        assert torch.equal(parts.head, model.lm_head.weight)


def test_tied_sharded_and_unclear_targets(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"text_config": {"num_hidden_layers": 3}, "tie_word_embeddings": True, "model_type": "x"})
    )
    embedding = torch.ones(5, 2)
    names = {"model.language_model.embed_tokens.weight": "a.safetensors", "model.visual.embed_tokens.weight": "b"}
    save_file({"model.language_model.embed_tokens.weight": embedding}, tmp_path / "a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    parts = read_target(tmp_path)
    assert parts.layers == 3
    assert parts.head is parts.embedding
    assert torch.equal(parts.embedding, embedding)
    (tmp_path / "model.safetensors.index.json").unlink()
    save_file({"other.embed_tokens.weight": embedding}, tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match=r"expected one tensor embed_tokens\.weight of the target, found 2"):
        read_target(tmp_path)
