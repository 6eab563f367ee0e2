"""Several processes: two of gloo give what one gives with twice the batch."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.training.tiny import settings


@pytest.fixture
def config_file(tiny_model: Any, tiny_tokenizer: Any, tmp_path: Path) -> Path:
    tiny_model.save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    values = settings(
        tmp_path,
        target={"model": str(tmp_path / "model"), "dtype": "float32"},
        data={"cache": str(tmp_path / "cache")},
        optim={"steps": 5},
        run={"save_every": 0, "threads": 1},
    )
    (tmp_path / "run.json").write_text(json.dumps(values))
    return tmp_path / "run.json"


def train(config: Path, processes: int, *arguments: str) -> str:
    """``dspark train`` in so many processes, as a launcher starts them."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    running = []
    for rank in range(processes):
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank), "RANK": str(rank)}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "DSPARK_PLUGINS": ""}
        if processes > 1:
            environment |= {**place, "WORLD_SIZE": str(processes), "ACCELERATE_USE_CPU": "true"}
        command = [sys.executable, "-m", "dspark", "train", str(config), *arguments]
        running.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    said = [process.communicate(timeout=240)[0].decode() for process in running]
    assert [process.returncode for process in running] == [0] * processes, "\n".join(said)
    return "".join(said)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["dspark", "eagle3"])
def test_two_processes_are_one_with_twice_the_batch(algorithm: str, config_file: Path) -> None:
    pytest.importorskip("accelerate")
    folder = config_file.parent
    chosen = ["--set", f"drafter.algorithm={algorithm}", "--set"]
    train(config_file, 1, *chosen, f"run.output={folder / 'one'}", "--set", "optim.sequences=4")
    said = train(config_file, 2, *chosen, f"run.output={folder / 'two'}", "--set", "optim.sequences=2")
    assert said.count("eval 4/5") == 1
    one, two = (
        [json.loads(line) for line in (folder / name / "log.jsonl").read_text().splitlines()] for name in ("one", "two")
    )
    assert len(one) == len(two) == 8
    for a, b in zip(one, two, strict=True):
        assert (a["kind"], a["step"], a["total_blocks"]) == (b["kind"], b["step"], b["total_blocks"])
        for key in ("loss", "ce", "tv", "confidence_error", "accepted_length", "grad_norm"):
            assert a.get(key, 0.0) == pytest.approx(b.get(key, 0.0), rel=1e-5, abs=1e-7), (a["step"], key)
    # A run may go on with another number of processes.
    said = train(config_file, 1, *chosen, f"run.output={folder / 'two'}", "--set", "optim.steps=7", "--resume")
    assert "7/7" in said
