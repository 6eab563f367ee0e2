"""Packing: pending tokens and scheduled drafts of every request, one after the other, into one forward."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dspark.engine.batcher import Work
from dspark.engine.state import RequestState
from dspark.types import DraftBlock, IntArray, VerifyLayout, VerifyPlan


@dataclass(frozen=True, slots=True)
class Packed:
    """A layout and where each request's rows are.

    Attributes:
        layout: what the target runs.
        decode: requests with logits, in the order of the layout.
        prefill: prompt chunks, after them.
        verify_lens: l_r of ``decode``, [D].
        draft_rows: their rows in the draft block, 0 where they have none, [D].
        drafted: their scheduled draft tokens.
        token_starts: first row of each sequence in [B], [D + P].
        row_starts: row of each anchor in the logits [N], [D].
    """

    layout: VerifyLayout
    decode: tuple[RequestState, ...]
    prefill: tuple[tuple[RequestState, int], ...]
    verify_lens: IntArray
    draft_rows: IntArray
    drafted: tuple[tuple[int, ...], ...]
    row_starts: IntArray


def pack(
    work: Work,
    skip: set[RequestState],
    drafting_rows: tuple[RequestState, ...],
    block: DraftBlock | None,
    plan: VerifyPlan | None,
    device: torch.device,
) -> Packed | None:
    """Lay out one step; None where nothing is left to run."""
    decode = tuple(r for r in work.decode if r not in skip)
    prefill = tuple((r, n) for r, n in work.prefill if r not in skip)
    if not decode and not prefill:
        return None
    row_of: dict[RequestState, int] = {}
    draft_ids: list[list[int]] = []
    if block is not None and plan is not None:
        row_of = {request: row for row, request in enumerate(drafting_rows)}
        draft_ids = block.token_ids.tolist()
    tokens: list[int] = []
    starts: list[int] = []
    cu = [0]
    logit_rows: list[int] = []
    verify: list[int] = []
    drafted: list[tuple[int, ...]] = []
    for request in decode:
        row = row_of.get(request)
        length = 0 if row is None or plan is None else int(plan.verify_lens[row])
        ids = tuple(draft_ids[row][:length]) if row is not None else ()
        tokens += request.ids[request.num_cached :]
        anchor = len(tokens) - 1
        tokens += ids
        logit_rows += range(anchor, anchor + length + 1)
        starts.append(request.num_cached)
        cu.append(len(tokens))
        verify.append(length)
        drafted.append(ids)
    for request, take in prefill:
        tokens += request.ids[request.num_cached : request.num_cached + take]
        starts.append(request.num_cached)
        cu.append(len(tokens))
    layout = _layout(tokens, starts, cu, logit_rows, [r.slot for r in decode] + [r.slot for r, _ in prefill], device)
    lens = np.array(verify, dtype=np.int64)
    row_starts = np.zeros(len(decode), dtype=np.int64)
    np.cumsum(1 + lens[:-1], out=row_starts[1:])
    rows = np.array([row_of.get(r, 0) for r in decode], dtype=np.int64)
    return Packed(layout, decode, prefill, lens, rows, tuple(drafted), row_starts)


def _layout(
    tokens: list[int],
    starts: list[int],
    cu: list[int],
    logit_rows: list[int],
    slots: list[int],
    device: torch.device,
) -> VerifyLayout:
    offsets = np.array(cu, dtype=np.int64)
    first = np.array(starts, dtype=np.int64)
    lens = np.diff(offsets)
    positions = np.arange(offsets[-1], dtype=np.int64) + np.repeat(first - offsets[:-1], lens)
    return VerifyLayout(
        token_ids=torch.tensor(tokens, dtype=torch.int64).to(device),
        positions=torch.from_numpy(positions).to(device),
        slots=np.array(slots, dtype=np.int64),
        starts=first,
        cu_query_lens=offsets,
        logit_rows=np.array(logit_rows, dtype=np.int64),
    )
