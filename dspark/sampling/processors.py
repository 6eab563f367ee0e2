"""Processed scores of all rows of a step, in transformers' order and meaning.

Order: logit bias; repetition penalty (prompt and output); presence and frequency penalties (output alone; transformers
lacks them); ``min_tokens``; custom processors; then, unless greedy, temperature, top-k, top-p, min-p. The k-th row of a
request is the law of the token after its first k drafts, so its history holds them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dspark.errors import RowFault
from dspark.ops.reference import working_dtype
from dspark.protocols import LogitsProcessor
from dspark.sampling.history import RequestSampling
from dspark.sampling.warpers import Warpers, needs_warpers, warp
from dspark.types import FloatArray, IntArray, Mode


@dataclass(frozen=True, slots=True)
class ProcessEntry:
    """One request's rows: ``row_start`` for the token after its anchor, then one for each of the drafts to verify."""

    state: RequestSampling
    row_start: int
    draft_ids: Sequence[int] = ()

    @property
    def rows(self) -> int:
        return 1 + len(self.draft_ids)


def process(logits: Tensor, entries: Sequence[ProcessEntry], unwarped: frozenset[Mode] = frozenset()) -> Tensor:
    """Processed scores [N, V] of logits [N, V].

    Rows after a draft that a custom processor masked are not processed: nothing reads them, whatever is drawn.

    Args:
        unwarped: modes whose rows are left without temperature, top-k, top-p and min-p, since their verifier applies
            these.

    Returns:
        ``logits`` itself where no request needs anything, else a new tensor in float32 (float64 for float64 logits).

    Raises:
        RowFault: naming the entries whose custom processors raised or left no token.
    """
    editing = [e for e in entries if e.state.edits]
    warpers = _warpers([e for e in entries if e.state.mode not in unwarped], logits.shape[0])
    if not editing:
        return logits if warpers is None else warp(logits, warpers)
    scores = logits.to(working_dtype(logits), copy=True)
    _add_bias(scores, editing)
    _penalise_repetition(scores, editing)
    _penalise_counts(scores, editing)
    _mask_ends(scores, editing)
    _run_custom(scores, entries)
    return scores if warpers is None else warp(scores, warpers, inplace=True)


def _warpers(entries: Sequence[ProcessEntry], rows: int) -> Warpers | None:
    sampled = [e for e in entries if e.state.mode is not Mode.GREEDY and needs_warpers(e.state.params)]
    if not sampled:
        return None
    params = [None] * rows
    for entry in sampled:
        params[entry.row_start : entry.row_start + entry.rows] = [entry.state.params] * entry.rows  # type: ignore[list-item]
    return Warpers.of(params)


class _Cells:
    """Cells (row, column) of the scores, collected over requests and edited in one go."""

    def __init__(self) -> None:
        self.rows: list[IntArray] = []
        self.columns: list[IntArray] = []
        self.values: list[FloatArray] = []

    def add(self, row: int, columns: IntArray, values: FloatArray | None = None) -> None:
        self.rows.append(np.full(len(columns), row, dtype=np.int64))
        self.columns.append(columns)
        if values is not None:
            self.values.append(values)

    def edit(self, scores: Tensor, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        """scores[cells] = change(scores[cells], values), values in the dtype of the scores."""
        if not self.rows:
            return
        device = scores.device
        where = (
            torch.from_numpy(np.concatenate(self.rows)).to(device),
            torch.from_numpy(np.concatenate(self.columns)).to(device),
        )
        values = torch.from_numpy(np.concatenate(self.values)) if self.values else torch.empty(0)
        scores[where] = change(scores[where], values.to(device, scores.dtype))


def _add_bias(scores: Tensor, entries: Sequence[ProcessEntry]) -> None:
    cells = _Cells()
    for entry in entries:
        if len(entry.state.bias_ids):
            for row in range(entry.row_start, entry.row_start + entry.rows):
                cells.add(row, entry.state.bias_ids, entry.state.bias)
    cells.edit(scores, lambda old, bias: old + bias)


def _penalise_repetition(scores: Tensor, entries: Sequence[ProcessEntry]) -> None:
    cells = _Cells()
    for entry in entries:
        if entry.state.repeats:
            for k, ids in enumerate(entry.state.seen_rows(entry.draft_ids)):
                cells.add(entry.row_start + k, ids, np.full(len(ids), entry.state.params.repetition_penalty))
    cells.edit(scores, lambda old, penalty: torch.where(old < 0, old * penalty, old / penalty))


def _penalise_counts(scores: Tensor, entries: Sequence[ProcessEntry]) -> None:
    cells = _Cells()
    for entry in entries:
        if entry.state.counts_output:
            for k, (ids, amounts) in enumerate(entry.state.count_rows(entry.draft_ids)):
                cells.add(entry.row_start + k, ids, amounts)
    cells.edit(scores, lambda old, amount: old - amount)


def _mask_ends(scores: Tensor, entries: Sequence[ProcessEntry]) -> None:
    cells = _Cells()
    for entry in entries:
        short = min(entry.rows, entry.state.params.min_tokens - entry.state.num_output)
        for k in range(short):
            cells.add(entry.row_start + k, entry.state.end_ids)
    cells.edit(scores, lambda old, _: torch.full_like(old, -math.inf))


def _run_custom(scores: Tensor, entries: Sequence[ProcessEntry]) -> None:
    faults: dict[int, str] = {}
    for index, entry in enumerate(entries):
        if entry.state.processors:
            try:
                _run_entry(scores, entry)
            except Exception as fault:
                faults[index] = f"{type(fault).__name__}: {fault}"
    if faults:
        detail = "; ".join(f"entry {index}: {text}" for index, text in faults.items())
        raise RowFault(f"custom logits processors failed: {detail}", faults)


def _run_entry(scores: Tensor, entry: ProcessEntry) -> None:
    forks: list[LogitsProcessor] = [p.fork() for p in entry.state.processors]
    for k in range(entry.rows):
        row = scores[entry.row_start + k]
        for fork in forks:
            new = fork.process(row)
            if not isinstance(new, Tensor) or new.shape != row.shape:
                got = tuple(new.shape) if isinstance(new, Tensor) else type(new).__name__
                raise ValueError(f"{type(fork).__name__}.process returned {got}, expected logits of {tuple(row.shape)}")
            row = new.to(row.dtype)
        top = row.max()
        if k > 0 and not bool(torch.isfinite(top)):
            scores[entry.row_start + k] = row  # a dead end behind a draft: the verifier minds, if it gets there
            return
        if not bool(torch.isfinite(top)):
            raise ValueError(f"the custom processors left no token with a finite score (largest: {float(top)})")
        scores[entry.row_start + k] = row
        if k < len(entry.draft_ids):
            draft = entry.draft_ids[k]
            if row[draft] == -math.inf:
                return
            for fork in forks:
                fork.advance(draft)
