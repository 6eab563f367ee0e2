"""Random decisions of one step, remembered so that a phase can be repeated for the rows that are left after a fault.

A repeated decision is the same decision: the recorded outcome is returned, the source is not asked again.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dspark.types import BoolArray, DrawKeys, DrawSource, FloatArray, IntArray, KeyArray


class RecordedDraws:
    """A DrawSource that forwards to another and can repeat what it answered. One a step."""

    def __init__(self, source: DrawSource) -> None:
        self._source = source
        self._calls: list[tuple[DrawKeys, Tensor | BoolArray]] = []
        self._known: dict[tuple[int, int, int, int], int] = {}
        self._hashed = False
        self.repeating = False

    @property
    def taken(self) -> bool:
        """True once a keyed decision was made in this step."""
        return bool(self._calls) or self._hashed

    def repeat(self) -> None:
        """From now on, keys that were answered before get the same answer."""
        for keys, answers in self._calls:
            values = answers.tolist()
            for row, value in zip(_tuples(keys), values, strict=True):
                self._known[row] = int(value)
        self._calls = []
        self.repeating = True

    def categorical(self, keys: DrawKeys, probs: Tensor) -> Tensor:
        if self.repeating:
            return self._repeated(keys, probs)
        ids = self._source.categorical(keys, probs)
        self._calls.append((keys, ids))
        return ids

    def accept(self, keys: DrawKeys, probs: Tensor) -> BoolArray:
        if self.repeating:
            return self._repeated(keys, probs).cpu().numpy().astype(np.bool_)
        accepted = self._source.accept(keys, probs)
        self._calls.append((keys, accepted))
        return accepted

    def uniforms(self, keys: DrawKeys) -> FloatArray:
        """Uniforms [n] of a source that hashes; a function of the keys, so asking again is repeating."""
        self._hashed = self._hashed or len(keys) > 0
        found: FloatArray = self._source.uniforms(keys)  # type: ignore[attr-defined]
        return found

    def row_keys(self, keys: DrawKeys) -> KeyArray | None:
        """Row keys [n] of a source that hashes, None of another; as ``uniforms``."""
        function = getattr(self._source, "row_keys", None)
        if function is None:
            return None
        self._hashed = self._hashed or len(keys) > 0
        found: KeyArray = function(keys)
        return found

    def gumbel(self, seeds: KeyArray, positions: IntArray, vocab_size: int, token_ids: Tensor | None = None) -> Tensor:
        # a function of its arguments: asking again is repeating
        return self._source.gumbel(seeds, positions, vocab_size, token_ids)

    def _repeated(self, keys: DrawKeys, probs: Tensor) -> Tensor:
        out: list[int] = []
        for i, key in enumerate(_tuples(keys)):
            if key not in self._known:
                one = DrawKeys(keys.request[i : i + 1], keys.anchor[i : i + 1], keys.offset[i : i + 1], keys.purpose)
                draw = self._source.accept if probs.dim() == 1 else self._source.categorical
                self._known[key] = int(draw(one, probs[i : i + 1])[0])
            out.append(self._known[key])
        return torch.tensor(out, dtype=torch.int64, device=probs.device)


def _tuples(keys: DrawKeys) -> list[tuple[int, int, int, int]]:
    purpose = int(keys.purpose)
    return [
        (int(r), int(a), int(o), purpose)
        for r, a, o in zip(keys.request.tolist(), keys.anchor.tolist(), keys.offset.tolist(), strict=True)
    ]
