"""Key-value memory: sized before it is taken, refused with both numbers, and not touched before it is used."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from dspark.errors import CapacityError, ConfigError
from dspark.targets.fingerprint import config_hash
from dspark.targets.hf import HFTarget, HFTargetConfig, build
from dspark.targets.memory import _group_bytes, available_bytes, human_bytes, lazy_zeros

from .toys import toy_model


@pytest.fixture
def target() -> HFTarget:
    return HFTarget(toy_model("llama", torch.float32), probe=False)


PER_TOKEN = 2 * 2 * (8 + 8) * 4  # layers, heads, key and value width, bytes


def test_an_explicit_length_must_fit_the_budget(target: HFTarget) -> None:
    assert target.allocate(4, 100, budget_bytes=4 * 100 * PER_TOKEN) == 100
    assert target.cache_bytes == 4 * 100 * PER_TOKEN
    with pytest.raises(CapacityError) as error:
        target.allocate(4, 100, budget_bytes=4 * 100 * PER_TOKEN - 1)
    asked, allowed = 4 * 100 * PER_TOKEN, 4 * 100 * PER_TOKEN - 1
    for part in (str(asked), str(allowed), "max_len to 99 or less", "max_slots to 3 or less", "kv_budget_bytes"):
        assert part in str(error.value)


def test_without_a_length_it_takes_what_fits(target: HFTarget, caplog: pytest.LogCaptureFixture) -> None:
    assert target.allocate(4, None) == target.model_limit == 128
    assert target.allocate(4, None, budget_bytes=4 * 100 * PER_TOKEN) == 64
    assert "slots of 64 tokens, not 128" in caplog.text
    with pytest.raises(CapacityError, match="max_slots"):
        target.allocate(4, None, budget_bytes=4 * 63 * PER_TOKEN)


def test_device_memory_bounds_what_no_budget_does(target: HFTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dspark.targets.cache.available_bytes", lambda device: 50_000)
    with pytest.raises(CapacityError, match="free memory of cpu allows 45000 bytes"):
        target.allocate(32, 128)
    with pytest.raises(CapacityError, match="45000"):
        target.allocate(32, 128, budget_bytes=10**9)


def test_lengths_beyond_the_model_are_refused(target: HFTarget) -> None:
    with pytest.raises(CapacityError, match=r"129 exceeds .* 128"):
        target.allocate(1, 129)
    with pytest.raises(CapacityError, match="at least 1"):
        target.allocate(0, 8)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotations_that_follow_the_longest_neighbour_bound_the_length(kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    model = toy_model("llama", torch.float32, rope_parameters=rope)
    assert HFTarget(model, probe=False).model_limit == 32


def test_pages_are_not_touched_before_they_are_written() -> None:
    resident = _resident_bytes()
    if resident is None:
        pytest.skip("the platform does not say how much memory is resident")
    big = lazy_zeros((256, 1024, 1024), torch.bfloat16, torch.device("cpu"))
    grown = _resident_bytes()
    assert grown is not None
    assert grown - resident < 64 * 2**20
    assert big[3, 5].eq(0).all()
    assert big.dtype == torch.bfloat16
    big[0, 0, 0] = 1.0
    assert big[0, 0, 0] == 1


def _resident_bytes() -> int | None:
    try:
        with open("/proc/self/status", encoding="ascii") as lines:
            found = re.search(r"VmRSS:\s+(\d+) kB", lines.read())
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def test_a_control_group_can_allow_less_than_the_system(tmp_path: Path) -> None:
    assert _group_bytes(str(tmp_path)) is None
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert _group_bytes(str(tmp_path)) is None
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.stat").write_text("anon 500\nfile 150\n")
    assert _group_bytes(str(tmp_path)) == 450


def test_free_memory_is_known_and_readable() -> None:
    free = available_bytes(torch.device("cpu"))
    assert free is None or free > 2**20
    assert human_bytes(1536) == "1.5 KiB"
    assert human_bytes(12) == "12 B"


def test_fingerprint_names_what_a_cost_depends_on(target: HFTarget) -> None:
    print_ = target.fingerprint()
    assert set(print_) == {"model", "config", "device", "dtype", "threads", "attention", "torch", "transformers"}
    assert print_["dtype"] == "float32"
    assert print_["threads"] == str(torch.get_num_threads())
    assert print_["device"].startswith("cpu ")
    other = HFTarget(toy_model("llama", torch.float32, intermediate_size=52), probe=False)
    assert other.fingerprint()["config"] != print_["config"]
    again = toy_model("llama", torch.float32)
    again.config._attn_implementation_internal = "sdpa"
    assert config_hash(again.config) == print_["config"]


def test_a_config_hash_is_that_of_the_computation() -> None:
    """A GGUF file rounds and leaves out; what it gives is the original's hash all the same."""
    config = toy_model("llama", torch.float32).config
    whole = config_hash(config)
    same = copy.deepcopy(config)
    same.dtype, same.initializer_range, same.is_llama_config, same.rope_interleaved = torch.bfloat16, 0.04, True, False
    same.rms_norm_eps = float(np.float32(config.rms_norm_eps))
    assert same.rms_norm_eps != config.rms_norm_eps
    assert config_hash(same) == whole
    for field, value in (("rms_norm_eps", 2e-5), ("num_hidden_layers", 7), ("vocab_size", config.vocab_size + 1)):
        other = copy.deepcopy(config)
        setattr(other, field, value)
        assert config_hash(other) != whole, field


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="attention"):
        HFTargetConfig(model="x", attention="flash")
    with pytest.raises(ConfigError, match="name a hub id"):
        build(HFTargetConfig())
