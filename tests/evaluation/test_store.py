"""Results on file: resumed after an interruption, refused under other settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dspark.errors import EvaluationError
from dspark.evaluation.store import ResultStore, read_results

SETTINGS = {"gamma": 4, "sampling": {"seed": 1, "bucket": (0.0, 1.0)}}


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "results.jsonl"
    with ResultStore(path, SETTINGS) as store:
        assert store.records == {}
        store.add("a", {"x": 1})
        store.add("b", {"x": 2})
    with ResultStore(path, SETTINGS) as store:
        assert store.records == {"a": {"x": 1}, "b": {"x": 2}}
        store.add("c", {"x": 3})
    settings, records = read_results(path)
    assert settings == json.loads(json.dumps(SETTINGS))
    assert list(records) == ["a", "b", "c"]
    with pytest.raises(EvaluationError, match="is closed"):
        store.add("d", {})


def test_every_record_is_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    store = ResultStore(path, SETTINGS)
    store.add("a", {"x": 1})
    assert read_results(path)[1] == {"a": {"x": 1}}
    store.close()


def test_a_line_that_was_cut_off_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with ResultStore(path, SETTINGS) as store:
        store.add("a", {"x": 1})
        store.add("b", {"x": "é"})
    whole = path.read_bytes()
    for cut in (1, 4, 7):
        path.write_bytes(whole[:-cut])
        assert list(read_results(path)[1]) == ["a"]
        with ResultStore(path, SETTINGS) as store:
            assert list(store.records) == ["a"]
            store.add("b", {"x": "é"})
        assert path.read_bytes() == whole
    path.write_bytes(whole[:20])
    with ResultStore(path, SETTINGS) as store:
        assert store.records == {}
    assert read_results(path)[1] == {}, "a header that was cut off is written anew"


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with ResultStore(path, SETTINGS) as store:
        store.add("a", {})
    with pytest.raises(EvaluationError, match=r"other settings \(gamma: 4 there, 5 here\).*--restart"):
        ResultStore(path, {**SETTINGS, "gamma": 5})
    with pytest.raises(EvaluationError, match="more: null there, 1 here"):
        ResultStore(path, {**SETTINGS, "more": 1})
    with pytest.raises(EvaluationError, match=r"sampling: .* there, null here"):
        ResultStore(path, {"gamma": 4})
    assert list(read_results(path)[1]) == ["a"], "and nothing is lost"
    with ResultStore(path, {**SETTINGS, "gamma": 5}, restart=True) as store:
        assert store.records == {}
    assert read_results(path)[0]["gamma"] == 5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "empty"),
        ('{"format": "other", "version": 1}\n', "line 1: not a line of 'dspark-results'"),
        ('{"format": "dspark-results", "version": 9, "settings": {}}\n', "version 9"),
        ('{"format": "dspark-results", "version": 1, "settings": {}}\nnot json\n', "line 2"),
        ('{"format": "dspark-results", "version": 1, "settings": {}}\n{"x": 1}\n', "line 2: .*key"),
        ("[1]\n", "line 1"),
    ],
)
def test_other_files_are_refused_by_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(text)
    with pytest.raises(EvaluationError, match=words):
        read_results(path)
    if text:
        with pytest.raises(EvaluationError, match=words):
            ResultStore(path, SETTINGS)
        assert path.read_text() == text


def test_what_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="absent"):
        read_results(tmp_path / "absent")
    (tmp_path / "file").write_text("")
    with pytest.raises(EvaluationError, match="file"):
        ResultStore(tmp_path / "file" / "r.jsonl", SETTINGS)
