"""The verifier ``coupled`` (METHOD section 4): output a function of seed and target alone, under any schedule.

The target's token at absolute position n is y = argmax(log p_t + g(seed, n, .)); it is emitted in any case, and the
draft at n counts as accepted while both agree. The drafter proposed argmax(log q + g) under the same noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
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
class CoupledConfig:
    """``coupled`` has no settings."""


class CoupledVerifier:
    """Gumbel coupling. Rows are read lazily, while drafts agree: noise over a vocabulary is not free.

    Args:
        kernel: ``reject_sample``, where one was chosen; it reads all rows at once.
    """

    capabilities = CAPABILITIES

    def __init__(self, kernel: Callable[..., Any] | None = None) -> None:
        self._kernel = kernel
        if kernel is not None:
            self.capabilities = replace(CAPABILITIES, unwarped=True)

    def verify(self, batch: VerifyInput) -> VerifyResult:
        """Decide all R requests; ``batch.keys`` are seeds.

        Raises:
            RowFault: rows where no token has a finite score.
        """
        if self._kernel is not None and (decided := fused.verify(self._kernel, batch, Mode.COUPLED)) is not None:
            return decided
        batch = fused.warped(batch)
        count = len(batch.row_starts)
        accepted = np.zeros(count, dtype=np.int64)
        tokens = np.zeros(count, dtype=np.int64)
        drafts: IntArray = batch.draft_ids.cpu().numpy()
        alive = np.arange(count, dtype=np.int64)
        k = 0
        while len(alive):
            tokens[alive] = _target_tokens(batch, alive, k)
            alive = alive[batch.verify_lens[alive] > k]
            alive = alive[drafts[alive, k] == tokens[alive]] if len(alive) else alive
            k += 1
            accepted[alive] = k
        return VerifyResult(accepted, tokens)


def _target_tokens(batch: VerifyInput, rows: IntArray, k: int) -> IntArray:
    """argmax(scores + g) after k drafts of ``rows``, [n]; scores are log p_t up to a constant."""
    scores = take_rows(batch.scores, batch.row_starts[rows] + k)
    scores = scores.to(reference.working_dtype(scores))
    noise = batch.draws.gumbel(batch.keys[rows], batch.anchors[rows] + 1 + k, scores.shape[1])
    noisy = noise.to(scores.device) + scores
    tokens = reference.argmax_rows(noisy)
    bad = reference.rows_without_maximum(noisy, tokens)
    if len(bad):
        raise RowFault(f"rows {rows[bad].tolist()}: no token has a finite score after {k} drafts", rows[bad])
    chosen: IntArray = tokens.cpu().numpy()
    return chosen


def build(config: CoupledConfig, context: BuildContext) -> CoupledVerifier:
    """The factory of ``coupled``."""
    return CoupledVerifier(fused.kernel_of(context))
