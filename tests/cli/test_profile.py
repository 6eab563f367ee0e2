"""``dspark profile``: measured, kept, plotted, and refused elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

QUICK = ("--tokens", 16, "--seconds", 1, "--max-slots", 4, "--set", "max_len=256")


@pytest.fixture
def profile(dspark: Callable[..., Any], tiny_folder: str) -> Callable[..., Any]:
    return lambda *args: dspark("profile", "--target", tiny_folder, *QUICK, *args)


def test_a_profile_is_measured_kept_and_used(
    profile: Callable[..., Any], dspark: Callable[..., Any], tiny_folder: str, tmp_path: Path
) -> None:
    done = profile("--context", 16, "--context", 64, "-o", tmp_path / "p.json", "--html", tmp_path / "p.html")
    assert done.code == 0, done.err
    for words in ("forwards", "drafts, milliseconds", "tokens over sequences", "state", "written:"):
        assert words in done.out
    found = json.loads((tmp_path / "p.json").read_text())
    assert [b["max_context"] for b in found["buckets"]] == [16, None]
    assert {1, 2, 4, 8, 16} <= {n for n, _ in found["buckets"][0]["points"]}
    assert {g for _, g, _ in found["draft"]} == {1, 2, 3, 5, 7}
    assert {r for r, _, _ in found["draft"]} == {1, 2, 4}
    assert {r for _, r, _, _ in found["batches"]} == {1, 2, 4}
    assert found["glue_seconds"] > 0
    assert {"device", "dtype", "threads", "model", "attention", "torch"} <= set(found["fingerprint"])
    assert found["drafter"]["drafter"] == "dspark/ngram"
    kept = sorted((tmp_path / "cache" / "cost").glob("*.json"))
    assert len(kept) == 2, "one with drafts and one without"
    page = (tmp_path / "p.html").read_text()
    assert page.count("<svg") == 4
    assert "src=" not in page
    times = [path.stat().st_mtime_ns for path in kept]
    answer = dspark("generate", "hello", "--target", tiny_folder, "--max-tokens", 8, "--set", "max_len=256", "--stats")
    assert answer.code == 0, answer.err
    assert "gamma" in answer.err
    assert [path.stat().st_mtime_ns for path in sorted((tmp_path / "cache" / "cost").glob("*.json"))] == times


def test_a_profile_is_checked_and_refused_elsewhere_with_what_differs(
    profile: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "p.json"
    assert profile("-o", path, "--json").json["format"] == "dspark-cost"
    assert "holds here" in profile("--check", path).out
    other = json.loads(path.read_text())
    other["fingerprint"] |= {"device": "cpu of another kind", "threads": "77"}
    path.write_text(json.dumps(other))
    refused = profile("--check", path)
    assert refused.code == 1
    assert "device: measured on 'cpu of another kind'" in refused.err
    assert "threads: measured on '77'" in refused.err


def test_another_drafters_times_are_refused(profile: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    profile("-o", path)
    refused = profile("--check", path, "--set", "drafter_config.max_n=6")
    assert refused.code == 1
    assert "drafter settings" in refused.err


def test_plain_decoding_has_no_drafts(profile: Callable[..., Any], tmp_path: Path) -> None:
    assert profile("--drafter", "none", "-o", tmp_path / "p.json").code == 0
    assert json.loads((tmp_path / "p.json").read_text())["draft"] == []
