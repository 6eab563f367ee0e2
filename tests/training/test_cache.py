"""Target caches: what is stored, appended and refused, and their size before the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspark.errors import CapacityError, ConfigError, DataError
from dspark.training.cache import CacheReader, CacheSpec, CacheWriter, read_manifest
from dspark.training.config import TrainConfig
from dspark.training.features import TargetReader, labelled_rows
from dspark.training.samples import Sample, SampleReader
from dspark.training.sources import CacheFiller
from tests.drafters.golden import near
from tests.training.tiny import hf_target, make_run, responses, settings, write_lines


@pytest.fixture(scope="module")
def target(tiny_model: Any, tiny_tokenizer: Any) -> Any:
    return hf_target(tiny_model, tiny_tokenizer)


def spec(**changes: Any) -> CacheSpec:
    values = {"target": "tiny", "taps": (0,), "hidden_size": 32, "vocab_size": 300, "max_length": 64}
    return CacheSpec(**(values | changes))


def test_features_are_those_of_the_plain_model(target: Any, tiny_model: Any) -> None:
    """Raw outputs of layers, the state behind the final norm, the log-sum-exp of the logits, their argmax."""
    random = np.random.default_rng(0)
    samples = [Sample(random.integers(0, 300, n), np.arange(n) >= 3) for n in (9, 17, 5)]
    found = TargetReader(target, (-1, 0), max_length=32, max_tokens=32).read(samples)
    for sample, features in zip(samples, found, strict=True):
        with torch.no_grad():
            out = tiny_model(torch.from_numpy(sample.ids)[None], output_hidden_states=True)
        near(features.taps, torch.cat(out.hidden_states[:2], dim=-1)[0], 1e-5)
        at = labelled_rows(sample)
        assert at.tolist() == list(range(2, len(sample) - 1))
        near(features.last[at], out.hidden_states[-1][0, at], 1e-5)
        near(features.lse[at], out.logits[0, at].logsumexp(-1), 1e-5)
        assert torch.equal(features.best[at].long(), out.logits[0, at].argmax(-1))
        assert not features.lse[[0, 1, len(sample) - 1]].any()


def test_a_cache_grows_with_its_file(target: Any, tmp_path: Path) -> None:
    lines, path, folder = responses(6), tmp_path / "a.jsonl", tmp_path / "cache"
    reader, target_reader = SampleReader(64), TargetReader(target, (0,), max_length=64)
    write_lines(path, [*lines[:4], {"prompt_ids": [1, 2], "response_ids": []}])
    filler = CacheFiller(CacheWriter(folder, spec()), [path], reader)
    assert filler.skipped.counts.total() == 1
    seen: list[tuple[int, int]] = []
    filler.fill(target_reader, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (filler.tokens, filler.tokens)
    cache = CacheReader(folder)
    assert len(cache) == 4

    write_lines(path, [*lines[:4], {"prompt_ids": [1, 2], "response_ids": []}, *lines[4:]])
    again = CacheFiller(CacheWriter(folder, spec()), [path], reader)
    assert again.tokens == sum(len(r["prompt_ids"]) + len(r["response_ids"]) for r in lines[4:])
    again.fill(target_reader)
    assert cache.refresh() == 6
    manifest = read_manifest(folder)
    assert (manifest.samples, len(manifest.shards), manifest.skipped) == (
        6, 2, {"no token of the assistant (loss mask all zero)": 1},
    )  # fmt: skip
    assert CacheFiller(CacheWriter(folder, spec()), [path], reader).tokens == 0
    assert [cache.sample(i).index for i in range(6)] == list(range(6))
    assert cache.sample(4).line == 5
    for i in (0, 5):
        (fresh,) = target_reader.read([cache.sample(i)])
        stored = cache.features(i)
        assert torch.equal(stored.taps, fresh.taps.bfloat16())
        assert torch.equal(stored.last, fresh.last.bfloat16())
        assert torch.equal(stored.lse, fresh.lse)
        assert torch.equal(stored.best, fresh.best)


def test_a_cache_of_something_else_is_refused(tmp_path: Path) -> None:
    CacheWriter(tmp_path, spec()).add([], [], {})
    CacheWriter(tmp_path, spec())
    with pytest.raises(ConfigError, match=r"taps: \(0,\) there, \(0, 1\) asked; hidden_size: 32 there, 16 asked"):
        CacheWriter(tmp_path, spec(taps=(0, 1), hidden_size=16))
    for content, message in (
        ('{"format": "other"}', "got 'other'"),
        ("{", "not a target cache"),
        ("[]", "not a target"),
    ):
        (tmp_path / "manifest.json").write_text(content)
        with pytest.raises(ConfigError, match=message):
            CacheReader(tmp_path)


def test_one_process_fills_a_cache_at_a_time(target: Any, tmp_path: Path) -> None:
    path, reader = write_lines(tmp_path / "a.jsonl", responses(3)), SampleReader(64)
    first = CacheFiller(CacheWriter(tmp_path / "cache", spec()), [path], reader)
    target_reader = TargetReader(target, (0,), max_length=64)
    with (
        CacheWriter(tmp_path / "cache", spec()).alone(),
        pytest.raises(DataError, match="being filled by another process"),
    ):
        first.fill(target_reader)
    CacheFiller(CacheWriter(tmp_path / "cache", spec()), [path], reader).fill(target_reader)
    with pytest.raises(DataError, match="was filled by another process"):
        first.fill(target_reader)
    assert len(CacheReader(tmp_path / "cache")) == 3


def test_size_before_the_run_is_the_size_after(target: Any, tmp_path: Path) -> None:
    """tokens x (taps + 1) x width x bytes, and what else is stored; headers are all that is left out."""
    path = write_lines(tmp_path / "a.jsonl", responses(400, length=60))
    filler = CacheFiller(CacheWriter(tmp_path / "cache", spec()), [path], SampleReader(64))
    tokens = filler.tokens
    assert f"{tokens:,} new tokens x (1 + 1) layers x 32 wide x 2 bytes = " in filler.estimate()
    filler.fill(TargetReader(target, (0,), max_length=64))
    written = sum(p.stat().st_size for p in (tmp_path / "cache").glob("*.safetensors"))
    assert written == pytest.approx(tokens * spec().bytes_per_token, rel=0.03)
    assert spec().bytes_per_token == 2 * 32 * 2 + 13


def test_a_budget_stops_before_the_target_runs(target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"cache": str(tmp_path / "cache"), "cache_budget_gib": 1e-5}
    run = make_run(tmp_path, target, data=data)
    monkeypatch.setattr(TargetReader, "read", lambda *_: pytest.fail("the target ran"))
    with pytest.raises(CapacityError, match=r"data.cache_budget_gib allows 1e-05 GiB, 76 tokens.*runs online"):
        run.prepare()
    assert not list((tmp_path / "cache").glob("*.safetensors"))
    config = TrainConfig.of(settings(tmp_path, data={**data, "cache_budget_gib": 1.0}))
    assert config.data.cache_budget_gib == 1.0
