"""The verifier ``greedy``: the most likely token, the lowest id among equals; both exact rules' limit at T = 0."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dspark.capabilities import VerifierCapabilities
from dspark.errors import RowFault
from dspark.ops import reference
from dspark.ops.reference import take_rows
from dspark.protocols import BuildContext
from dspark.types import IntArray, Mode, VerifyInput, VerifyResult
from dspark.verifiers import fused

CAPABILITIES = VerifierCapabilities(exact_under="any", pathwise=True)


@dataclass(frozen=True, slots=True)
class GreedyConfig:
    """``greedy`` has no settings."""


class GreedyVerifier:
    """Accepts drafts while they are the argmax; takes no draws.

    Args:
        kernel: ``reject_sample``, where one was chosen.
    """

    capabilities = CAPABILITIES

    def __init__(self, kernel: Callable[..., Any] | None = None) -> None:
        self._kernel = kernel

    def verify(self, batch: VerifyInput) -> VerifyResult:
        """Decide all R requests, with one pass over their rows.

        Raises:
            RowFault: rows where a token that decides has no finite score.
        """
        if self._kernel is not None and (decided := fused.verify(self._kernel, batch, Mode.GREEDY)) is not None:
            return decided
        lens = batch.verify_lens
        if not lens.any():
            return self._plain(batch)
        widths = lens + 1
        starts = np.cumsum(widths) - widths
        total = int(widths.sum())
        owners = np.repeat(np.arange(len(lens), dtype=np.int64), widths)
        offsets = np.arange(total, dtype=np.int64) - starts[owners]
        scores = take_rows(batch.scores, batch.row_starts[owners] + offsets)
        scores = scores.to(reference.working_dtype(scores))
        best = reference.argmax_rows(scores)
        tokens: IntArray = best.cpu().numpy()
        accepted = np.zeros(len(lens), dtype=np.int64)
        drafts: IntArray = batch.draft_ids.cpu().numpy()
        for r in np.flatnonzero(lens).tolist():
            agree = tokens[starts[r] : starts[r] + lens[r]] == drafts[r, : lens[r]]
            accepted[r] = lens[r] if agree.all() else int(np.argmin(agree))
        broken = np.zeros(total, dtype=np.bool_)
        broken[reference.rows_without_maximum(scores, best)] = True
        bad = np.flatnonzero(np.logical_or.reduceat(broken & (offsets <= accepted[owners]), starts)) if total else ()
        if len(bad):
            raise RowFault(f"rows {[int(r) for r in bad]}: no token has a finite score", bad)
        return VerifyResult(accepted, tokens[starts + accepted])

    @staticmethod
    def _plain(batch: VerifyInput) -> VerifyResult:
        """Nothing was drafted: one row a request."""
        scores = take_rows(batch.scores, batch.row_starts)
        scores = scores.to(reference.working_dtype(scores))
        best = reference.argmax_rows(scores)
        bad = reference.rows_without_maximum(scores, best)
        if len(bad):
            raise RowFault(f"rows {bad.tolist()}: no token has a finite score", bad)
        return VerifyResult(np.zeros(len(best), dtype=np.int64), best.cpu().numpy())


def build(config: GreedyConfig, context: BuildContext) -> GreedyVerifier:
    """The factory of ``greedy``."""
    return GreedyVerifier(fused.kernel_of(context))
