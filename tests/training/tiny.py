"""A small target with data of its own making, for whole runs in a second or two."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dspark.training.config import TrainConfig
from dspark.training.run import Run

torch.set_num_threads(1)


def write_lines(path: Path, records: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path


def responses(count: int = 12, vocab: int = 200, seed: int = 0, length: int = 30) -> list[dict[str, Any]]:
    """Conversations of random ids, in the form that ``dspark data`` writes."""
    random = np.random.default_rng(seed)
    out = []
    for i in range(count):
        prompt, response = random.integers(2, vocab, 5), random.integers(2, vocab, length - i % 7)
        out.append(
            {
                "index": i,
                "source": None,
                "temperature": 1.0,
                "prompt_ids": prompt.tolist(),
                "response_ids": response.tolist(),
                "finish_reason": "length",
            }
        )
    return out


def hf_target(model: Any, tokenizer: Any = None) -> Any:
    from dspark.targets.hf import HFTarget

    return HFTarget(model, tokenizer, name="tiny")


def settings(folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """A run of a few steps over ``folder/data.jsonl``, which is made where it is not there."""
    data = folder / "data.jsonl"
    if not data.exists():
        write_lines(data, responses())
    values: dict[str, dict[str, Any]] = {
        "target": {"model": "tiny"},
        "data": {"files": str(data), "max_length": 64, "holdout": 6},
        "drafter": {"layers": 2, "gamma": 4, "rank": 8, "mask_token_id": 1, "num_taps": 1},
        "optim": {"steps": 4, "sequences": 2, "anchors": 6, "precision": "fp32", "lr": 1e-3},
        "run": {"output": str(folder / "out"), "log_every": 1, "eval_every": 2, "save_every": 2},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return values


def make_run(folder: Path, target: Any, lines: list[str] | None = None, **sections: dict[str, Any]) -> Run:
    config = TrainConfig.of(settings(folder, **sections))
    return Run(config, say=(lines if lines is not None else []).append, target=target)


def records(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.output / "log.jsonl").read_text().splitlines()]
