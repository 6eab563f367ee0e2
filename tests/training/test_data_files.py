"""JSON lines that survive whatever ends their writer, and the header beside them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dspark.errors import DataError
from dspark.training.data_header import check_header, read_header, write_header
from dspark.training.line_file import LineFile, as_line, file_size, read_records

RECORDS = [{"a": 1}, {"b": "ü\u2028\n"}, {"c": [1, 2, 3]}]
DATA = b"".join(as_line(record) for record in RECORDS)


def records(path: Path) -> list[dict[str, object]]:
    return [record for _, record in read_records(path)]


@pytest.mark.parametrize("length", range(len(DATA) + 1))
def test_a_file_cut_anywhere_keeps_its_whole_lines_and_goes_on(tmp_path: Path, length: int) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(DATA[:length])
    whole = [RECORDS[i] for i in range(3) if len(b"".join(map(as_line, RECORDS[: i + 1]))) - 1 <= length]
    assert records(path) == whole
    with LineFile(path, length) as file:
        assert file.size == file_size(path)
        file.append(as_line({"next": 1}))
        assert file.size == file_size(path)
    assert records(path) == [*whole, {"next": 1}]
    assert [json.loads(line) for line in path.read_bytes().splitlines()] == records(path)


def test_a_half_line_longer_than_a_block(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(as_line({"a": 1}) + b'{"b": "' + b"x" * 300_000)
    with LineFile(path):
        pass
    assert path.read_bytes() == as_line({"a": 1})


def test_zeros_of_a_lost_power_supply_are_a_half_line(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(as_line({"a": 1}) + bytes(5000))
    assert records(path) == [{"a": 1}]
    with LineFile(path) as file:
        assert file.size == len(as_line({"a": 1}))


def test_a_bad_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(as_line({"a": 1}) + b"[1]\n" + as_line({"b": 1}))
    with pytest.raises(DataError, match="line 2"):
        records(path)


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    path = tmp_path / "data.jsonl"
    with LineFile(path), pytest.raises(DataError, match="another process"):
        LineFile(path)
    LineFile(path).close()


def test_what_changed_since_it_was_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(DATA)
    with pytest.raises(DataError, match="changed"):
        LineFile(path, len(DATA) - 1)
    assert path.read_bytes() == DATA


def test_a_disk_that_is_full_leaves_whole_lines(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    path = tmp_path / "data.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with LineFile(path) as file:
        file.append(as_line({"a": 1}))
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file.size + 5, hard))
            with pytest.raises(DataError, match=r"data\.jsonl"):
                file.append(as_line({"b": "longer than five bytes"}))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        file.append(as_line({"c": 1}))
    assert records(path) == [{"a": 1}, {"c": 1}]
    with pytest.raises(DataError, match="can't be written"):
        LineFile(tmp_path / "no" / "folder.jsonl")


HEADER = {
    "version": 1,
    "sampling": {"max_tokens": 8, "temperatures": [1.0, 0.0]},
    "system": None,
    "input": {"bytes": 3},
    "about": {"torch": "2"},
}


def test_a_header_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "data.meta.json"
    assert read_header(path) is None
    write_header(path, HEADER)
    assert read_header(path) == HEADER
    assert [p.name for p in tmp_path.iterdir()] == ["data.meta.json"]
    path.write_text("[]")
    with pytest.raises(DataError, match="object"):
        read_header(path)
    path.write_text("{")
    with pytest.raises(DataError, match="can't be read"):
        read_header(path)


def test_settings_that_differ_are_all_named(tmp_path: Path) -> None:
    path = tmp_path / "data.meta.json"
    other = {**HEADER, "input": None, "about": {"torch": "3"}}
    check_header(path, HEADER, other)
    check_header(path, HEADER, {**HEADER, "new": None})
    changed = {**other, "system": "be quick", "sampling": {"max_tokens": 9, "temperatures": [1], "top_k": 4}}
    with pytest.raises(DataError) as error:
        check_header(path, HEADER, changed)
    text = str(error.value)
    for part in (
        "sampling.max_tokens was 8, is 9",
        "sampling.temperatures was [1.0, 0.0], is [1]",
        "sampling.top_k was not there, is 4",
        'system was null, is "be quick"',
    ):
        assert part in text
    assert "torch" not in text
    assert "version" not in text
