"""``dspark bench``, ``advise`` and ``simulate`` on a tiny random target: real runs, small ones."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

TEXTS = ["the quick brown fox jumps over the lazy dog", "runs away from a small white house by the sea"]
FEW = ("--max-tokens", 8, "--drafter", "ngram", "--dtype", "float32")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in TEXTS), encoding="utf-8")
    return path


def test_a_sweep_prints_a_table_and_writes_a_page(
    dspark: Callable[..., Any], tiny_folder: str, data: Path, tmp_path: Path
) -> None:
    systems = [arg for name in ("plain", "gamma-2", "auto", "generate", "vllm") for arg in ("-s", name)]
    done = dspark(
        "bench", "--data", data, "--target", tiny_folder, *FEW, *systems, "-c", 2, "--repeat", 1, "--per-user", 1,
        "--least", 2, "--vllm", tmp_path / "no-python", "--output", tmp_path / "out", "--gamma", 3,
    )  # fmt: skip
    assert done.code == 0, done.out + done.err
    result = json.loads((tmp_path / "out" / "result.json").read_text(encoding="utf-8"))
    assert [r["system"] for r in result["rows"]] == ["plain", "auto", "gamma-2", "generate"]
    assert all(r["same_as_plain"] == [2, 2] for r in result["rows"])
    assert "has no vLLM" in result["skipped"][0]
    assert "left out: vllm" in done.err
    assert result["settings"]["prompts"].startswith("not judged"), "a random target can't tell"
    for name in ("plain", "gamma-2", "generate", "over best static"):
        assert name in done.out
    assert "<svg" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_token_ids_and_unknown_systems_are_refused(
    dspark: Callable[..., Any], tiny_folder: str, data: Path, tmp_path: Path
) -> None:
    ids = tmp_path / "ids.jsonl"
    ids.write_text(json.dumps({"prompt": [5, 6, 7]}) + "\n", encoding="utf-8")
    done = dspark("bench", "sweep", "--data", ids, "--target", tiny_folder, *FEW)
    assert done.code == 1
    assert "a prompt of token ids" in done.err
    done = dspark("bench", "--data", data, "--target", tiny_folder, *FEW, "-s", "generat")
    assert done.code == 2
    assert "did you mean 'generate'" in done.err


def test_advice_is_given_with_numbers_and_measured(
    dspark: Callable[..., Any], tiny_folder: str, data: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    done = dspark(
        "advise", "--data", data, "--target", tiny_folder, *FEW, "-c", 1, "--gamma", 3, "--trace", trace, "--json",
        "--measure", "--repeat", 1,
    )  # fmt: skip
    assert done.code == 0, done.out + done.err
    (advice,) = done.json["advice"]
    assert advice["plain"]["throughput"] > 0
    assert set(advice["measured"]) == {"plain", "advised", "auto"}
    assert advice["worth"] == (advice["gain"] >= 0.04)
    assert "measured" in advice["sentence"]
    assert len(done.json["acceptance"]) == 3

    page = tmp_path / "sim"
    limits = ("--parameters", 1e6, "--bandwidth", 1e9, "--flops", 1e11)
    done = dspark("simulate", trace, *limits, "-c", 1, "-c", 4, "--rate", 5, "--tier", 10, "--lag", "-o", page)
    assert done.code == 0, done.out + done.err
    assert "lag of two rounds at load 4: " in done.out
    assert "service levels" in done.out
    result = json.loads((page / "result.json").read_text(encoding="utf-8"))
    assert len(result["points"]) == 6 * 3
    again = dspark("simulate", trace, *limits, "-c", 1, "-c", 4, "--rate", 5, "--tier", 10, "--lag", "--json")
    assert again.json["points"] == result["points"], "a simulation is a function of its arguments"
    assert dspark("simulate", trace).err.startswith("dspark: say what steps take")


def test_a_trace_is_recorded_first_where_prompts_are_given(
    dspark: Callable[..., Any], tiny_folder: str, data: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "made.jsonl"
    limits = ("--parameters", 1e6, "--bandwidth", 1e9, "--flops", 1e11)
    done = dspark(
        "simulate", trace, "--data", data, "--target", tiny_folder, *FEW, *limits, "-c", 2, "--scheduler", "causal",
        "--adaptive", "--gamma", 2, "--json",
    )  # fmt: skip
    assert done.code == 0, done.out + done.err
    assert [p["label"] for p in done.json["points"]] == ["plain", "causal, gamma 2", "causal, adaptive gamma"]
    assert len(trace.read_text(encoding="utf-8").splitlines()) == 1 + len(TEXTS)


@pytest.mark.slow
def test_a_real_server_under_load(tiny_folder: str) -> None:
    """dspark's own server speaks the same interface as vLLM's."""
    from dspark.bench.load import Closed, Job, run_load
    from dspark.bench.vllm import ServerBackend, free_port
    from dspark.config import SamplingParams

    pytest.importorskip("uvicorn")
    port = free_port()
    serve = ["serve", "--target", tiny_folder, "--drafter", "none", "--model-name", "bench", "--port", str(port)]
    command = [sys.executable, "-m", "dspark", *serve]
    with closing(ServerBackend(command, port, extended=False, start_seconds=240)) as server:
        made = [Job(str(i), (5, 9, 13, 40 + i), SamplingParams(max_tokens=10, ignore_eos=True)) for i in range(4)]
        run = run_load(server, made, Closed(2))
    assert [r.tokens for r in run.requests] == [10] * 4
    assert run.requests[2].arrival > run.requests[0].arrival
    assert run.as_dict()["throughput"] > 0
