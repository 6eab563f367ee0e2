"""Memory of a run: what is predicted before the first step against what was taken."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspark.checkpoints import load_checkpoint
from dspark.training.memory import in_words, peak_bytes, predict, resident_bytes
from tests.training.golden import ROOT
from tests.training.tiny import hf_target, make_run, write_lines


@pytest.fixture(scope="module")
def target(tiny_model: Any, tiny_tokenizer: Any) -> Any:
    return hf_target(tiny_model, tiny_tokenizer)


def test_parts_grow_with_what_they_hold() -> None:
    config = load_checkpoint(ROOT / "deepspec_dspark_vanilla").config
    sizes = {"parameters": 1000, "tokens": 50, "blocks": 8, "labels": 32, "length": 25, "half": False}
    base = predict(config, **sizes)
    more = predict(config, **{**sizes, "labels": 64})
    assert more["vocabulary"] == 2 * base["vocabulary"]
    assert predict(config, **{**sizes, "blocks": 16})["layers"] > 1.5 * base["layers"]
    assert more["gradients and moments"] == base["gradients and moments"] == 12_000
    assert more["features"] == base["features"]
    wide = predict(dataclasses.replace(config, draft_vocab_size=194), **sizes)
    assert wide["vocabulary"] == 2 * base["vocabulary"]
    assert predict(config, **{**sizes, "half": True})["vocabulary"] == base["vocabulary"] // 2
    assert in_words({"a": 2**30, "b": 2**29}) == "1.50 GiB (1.00 a, 0.50 b)"


def test_what_this_process_holds() -> None:
    place = torch.device("cpu")
    before = resident_bytes(place)
    block = torch.ones(8 * 2**20)
    assert 0 < before <= peak_bytes(place)
    assert peak_bytes(place) >= block.nbytes


_SCATTERED = """
import ctypes, sys
from dspark.training.memory import _status, give_back
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
blocks = [libc.malloc(65536) for _ in range(4096)]
for block in blocks:
    ctypes.memset(block, 1, 65536)
for block in blocks[:-1:2] + blocks[1:-1:2]:
    libc.free(block)
held = _status("RssAnon")
print(give_back(), held - _status("RssAnon"))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator is not glibc's")
def test_freed_memory_below_what_is_used_is_given_back() -> None:
    """The last of 256 MiB stays in use, so that glibc by itself could give nothing back."""
    done = subprocess.run([sys.executable, "-c", _SCATTERED], capture_output=True, text=True, timeout=100)
    said, given = done.stdout.split()
    assert (said, int(given) > 200 * 2**20) == ("True", True), done.stderr


def test_a_run_gives_freed_memory_back_after_every_step(
    target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[None] = []
    monkeypatch.setattr("dspark.training.trainer.give_back", lambda: given.append(None))
    trainer = make_run(tmp_path, target).train()
    assert len(given) == trainer.step == 4


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.parametrize("options", [[], ["optim.sequences=2", "drafter.vocab_size=null", "optim.precision=fp32"]])
def test_two_layers_for_smollm2_fit_into_6_gib(options: list[str], tmp_path: Path) -> None:
    """And the peak was predicted within a fifth, with a pruned vocabulary in bfloat16 and a whole one in float32."""
    random = np.random.default_rng(0)
    prompts = [random.integers(20, 40_000, 100).tolist() for _ in range(16)]
    lines = [{"prompt_ids": p, "response_ids": random.integers(20, 40_000, 250).tolist()} for p in prompts]
    values = {
        "target": {"model": "smollm2", "dtype": "bfloat16"},
        "data": {
            "files": str(write_lines(tmp_path / "data.jsonl", lines)),
            "cache": str(tmp_path / "cache"),
            "holdout": 0,
        },
        "drafter": {"layers": 2, "gamma": 7, "vocab_size": 8192, "mask_token_id": 16},
        "optim": {"steps": 2, "sequences": 8, "anchors": 32},
        "run": {"output": str(tmp_path / "out"), "threads": 1},
    }
    (tmp_path / "run.json").write_text(json.dumps(values))
    sets = [word for option in options for word in ("--set", option)]
    for fill in (["--fill-cache"], []):  # the target's own peak is not the training's
        command = [sys.executable, "-m", "dspark", "train", str(tmp_path / "run.json"), *sets, *fill]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        assert done.returncode == 0, done.stderr
    predicted = float(re.search(r"memory: at most about ([\d.]+) GiB", done.stdout)[1])  # type: ignore[index]
    measured = float(re.search(r"memory: ([\d.]+) GiB at most", done.stdout)[1])  # type: ignore[index]
    assert measured <= 6.0
    assert predicted == pytest.approx(measured, rel=0.2)
