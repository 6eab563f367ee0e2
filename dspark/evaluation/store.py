"""Results as they come: one JSON object a line, so that a run that was interrupted goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from dspark.errors import EvaluationError

FORMAT = "dspark-results"
VERSION = 1


class ResultStore:
    """A JSONL file whose first line holds the settings that its records were made under.

    Opening one that exists resumes it: its records are read, and a last line that was cut off is dropped. Settings that
    differ are refused, since such records can't be put together.

    Args:
        path: of the file; its folder is made.
        settings: what the records depend on, as JSON holds it.
        restart: start over, whatever is there.

    Attributes:
        records: key -> record, in the order of the file.

    Raises:
        EvaluationError: other settings (naming those that differ), or a file that can't be read or written.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], *, restart: bool = False) -> None:
        self.path = path
        self.settings = json.loads(json.dumps(settings))
        self.records: dict[str, dict[str, Any]] = {}
        self._out: IO[str] | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            begin = restart or not path.exists() or not self._resume()
            self._out = path.open("w" if begin else "a", encoding="utf-8", newline="\n")
        except OSError as err:
            raise EvaluationError(f"{path}: {err}") from err
        if begin:
            self._write({"format": FORMAT, "version": VERSION, "settings": self.settings})

    def _resume(self) -> bool:
        """Read what is there; False where nothing whole is."""
        with self.path.open("r+b") as file:
            content = file.read()
            whole = content.rfind(b"\n") + 1
            if whole < len(content):
                file.truncate(whole)
        if not whole:
            return False
        settings, self.records = parse(content[:whole], str(self.path))
        differ = [key for key in {**settings, **self.settings} if settings.get(key) != self.settings.get(key)]
        if differ:
            listed = "; ".join(
                f"{k}: {_brief(settings.get(k))} there, {_brief(self.settings.get(k))} here" for k in differ
            )
            raise EvaluationError(
                f"{self.path} holds results of other settings ({listed}): take another folder, or start over with "
                "--restart"
            )
        return True

    def add(self, key: str, record: Mapping[str, Any]) -> None:
        """Append a record and flush it."""
        self.records[key] = dict(record)
        self._write({"key": key, **record})

    def _write(self, record: Mapping[str, Any]) -> None:
        if self._out is None:
            raise EvaluationError(f"{self.path} is closed")
        try:
            self._out.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
            self._out.flush()
        except OSError as err:
            raise EvaluationError(f"{self.path}: {err}") from err

    def close(self) -> None:
        """Close the file; what was added stays readable in ``records``."""
        if self._out is not None:
            self._out.close()
            self._out = None

    def __enter__(self) -> ResultStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def parse(content: bytes, where: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Settings, and records by key, of a store's content.

    Raises:
        EvaluationError: naming the line that is none of ours.
    """
    records: dict[str, dict[str, Any]] = {}
    settings: dict[str, Any] | None = None
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            if settings is None:
                if entry["format"] != FORMAT or entry["version"] != VERSION:
                    raise ValueError(f"format {entry['format']!r}, version {entry['version']!r}")
                settings = dict(entry["settings"])
            else:
                records[entry.pop("key")] = entry
        except (ValueError, KeyError, TypeError, AttributeError) as err:
            what = f"not a line of {FORMAT!r}, version {VERSION}"
            raise EvaluationError(f"{where} line {number}: {what}: {type(err).__name__}: {err}") from err
    if settings is None:
        raise EvaluationError(f"{where}: empty")
    return settings, records


def read_results(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Settings and records of a finished or interrupted run.

    Raises:
        EvaluationError: it can't be read.
    """
    try:
        content = path.read_bytes()
    except OSError as err:
        raise EvaluationError(f"{path}: {err}") from err
    return parse(content[: content.rfind(b"\n") + 1], str(path))


def _brief(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
