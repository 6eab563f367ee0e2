"""Committed tokens as components see them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload


class TokenView(Sequence[int]):
    """Read-only view of the first ``length`` tokens of a request. The engine alone appends to what is behind it."""

    __slots__ = ("_ids", "_length")

    def __init__(self, ids: list[int], length: int | None = None) -> None:
        self._ids = ids
        self._length = len(ids) if length is None else length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            return self._ids[start:stop:step] if step > 0 else list(self)[index]
        if index < 0:
            index += self._length
        if not 0 <= index < self._length:
            raise IndexError(index)
        return self._ids[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids[: self._length])
