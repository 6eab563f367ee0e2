"""JSON lines that grow at their end, whatever ends their writer: what makes a data run resumable."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from dspark.errors import DataError

try:
    import fcntl
except ImportError:  # Windows has no advisory locks of this kind
    fcntl = None  # type: ignore[assignment]

_BLOCK = 1 << 16


def read_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number from 1, object) of every whole line; nothing where there is no file.

    What a killed process left half written at the end is passed over.

    Raises:
        DataError: the file can't be read, or a line before the last is no JSON object.
    """
    if not path.exists():
        return
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                record = _parsed(line)
                if record is not None:
                    yield number, record
                elif line.endswith(b"\n"):
                    raise DataError(f"{str(path)!r} line {number} is no JSON object: repair or remove it")
    except OSError as err:
        raise DataError(f"{str(path)!r} can't be read: {err.strerror or err}") from err


def file_size(path: Path) -> int:
    """Bytes of a file; 0 where there is none."""
    return path.stat().st_size if path.exists() else 0


class LineFile:
    """A file of JSON lines, opened to append to it, by one process at a time.

    Each line is one write, so a process that is killed leaves at most one half line, the last. Opening cuts it off.

    Args:
        path: made where it does not exist.
        size: how long the file was when it was read; None does not check.

    Raises:
        DataError: it can't be written, another process writes it, or it changed since it was read.
    """

    def __init__(self, path: Path, size: int | None = None) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o644)
        except OSError as err:
            raise DataError(f"{str(path)!r} can't be written: {err.strerror or err}") from err
        try:
            self._lock()
            self.size = os.fstat(self._fd).st_size
            if size is not None and size != self.size:
                raise DataError(f"{str(path)!r} has changed since it was read: is another run writing it?")
            self._cut_half_line()
        except BaseException:
            os.close(self._fd)
            raise

    def append(self, line: bytes) -> None:
        """Write one line of :func:`as_line`.

        Raises:
            DataError: it can't be written (no space, say); the file ends with the line before it.
        """
        left = memoryview(line)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError as err:
            os.ftruncate(self._fd, self.size)
            raise DataError(f"{str(self.path)!r} can't be written: {err.strerror or err}") from err
        self.size += len(line)

    def close(self) -> None:
        """Hand everything to the disk, and let others write."""
        os.fsync(self._fd)
        os.close(self._fd)

    def __enter__(self) -> LineFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _lock(self) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as err:
            raise DataError(f"{str(self.path)!r} is being written by another process") from err
        except OSError:  # a file system without locks
            return

    def _cut_half_line(self) -> None:
        with self.path.open("rb") as file:
            start = _last_line(file, self.size)
            file.seek(start)
            last = file.read()
        if _parsed(last) is not None:  # whole, but for the line break
            self.append(b"\n")
        elif last:
            os.ftruncate(self._fd, start)
            self.size = start


def _last_line(file: BinaryIO, end: int) -> int:
    """Where the line begins that no line break ends; ``end`` where there is none."""
    while end > 0:
        start = max(0, end - _BLOCK)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def as_line(record: Mapping[str, Any]) -> bytes:
    """One line of JSON, compact."""
    return (json.dumps(record, ensure_ascii=False, separators=(",", ":"), allow_nan=False) + "\n").encode()


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
