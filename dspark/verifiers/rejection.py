"""The verifier ``rejection``: the paper's rule (METHOD section 1, step 5). Most acceptance, exact in law.

Draft x_k is accepted with probability min(1, p_t(x_k) / q(x_k)), left to right; the first rejected one is replaced by a
draw from (p_t - q)+ normalised; where all are accepted, a bonus token is drawn from p_t after the last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.capabilities import VerifierCapabilities
from dspark.errors import RowFault
from dspark.ops import reference
from dspark.ops.reference import index_tensor, take_rows
from dspark.protocols import BuildContext
from dspark.types import BoolArray, DrawKeys, IntArray, Mode, Purpose, VerifyInput, VerifyResult
from dspark.verifiers import fused

CAPABILITIES = VerifierCapabilities(exact_under="non-anticipating", pathwise=False)


@dataclass(frozen=True, slots=True)
class RejectionConfig:
    """``rejection`` has no settings."""


class RejectionVerifier:
    """Speculative rejection sampling. Rows are read lazily: a softmax is taken only where a decision needs it.

    Args:
        kernel: ``reject_sample``, where one was chosen.
    """

    capabilities = CAPABILITIES

    def __init__(self, kernel: Callable[..., Any] | None = None) -> None:
        self._kernel = kernel
        if kernel is not None:
            self.capabilities = replace(CAPABILITIES, unwarped=True)

    def verify(self, batch: VerifyInput) -> VerifyResult:
        """Decide all R requests.

        Draws: ACCEPT at offset k for the draft x_{k+1}, RESIDUAL at offset ``num_accepted`` for the token after.

        Raises:
            RowFault: rows where no token has a finite score, or a drafted token has q = 0.
        """
        if self._kernel is not None and (decided := fused.verify(self._kernel, batch, Mode.REJECTION)) is not None:
            return decided
        batch = fused.warped(batch)
        count = len(batch.row_starts)
        accepted = np.zeros(count, dtype=np.int64)
        finals: list[Tensor] = []
        owners: list[IntArray] = []
        alive = np.arange(count, dtype=np.int64)
        k = 0
        while len(alive):
            p = _target_probs(batch, alive, k)
            last = batch.verify_lens[alive] == k
            stays = np.zeros(len(alive), dtype=np.bool_)
            if not last.all():
                stays[~last] = _accept(batch, alive[~last], k, take_rows(p, np.flatnonzero(~last)))
            for which, rejected in ((last, False), (~last & ~stays, True)):
                if which.any():
                    law = take_rows(p, np.flatnonzero(which))
                    finals.append(_residual(batch, alive[which], k, law) if rejected else law)
                    owners.append(alive[which])
            alive = alive[stays]
            k += 1
            accepted[alive] = k
        return VerifyResult(accepted, _draw(batch, accepted, finals, owners))


def _target_probs(batch: VerifyInput, rows: IntArray, k: int) -> Tensor:
    """p_t after k drafts of ``rows``, [n, V]."""
    p = reference.softmax_rows(take_rows(batch.scores, batch.row_starts[rows] + k))
    bad = rows[torch.isnan(p[:, 0]).cpu().numpy()]  # without a finite maximum all of a row is NaN
    if len(bad):
        raise RowFault(f"rows {bad.tolist()}: no token has a finite score after {k} drafts", bad)
    return p


def _accept(batch: VerifyInput, rows: IntArray, k: int, p: Tensor) -> BoolArray:
    """Which of ``rows`` accept their draft x_{k+1}; p [n, V]."""
    drafts = batch.draft_ids[index_tensor(rows, p.device), k]
    p_x = p.gather(1, drafts.unsqueeze(1)).squeeze(1)
    q_x = batch.q.token_probs()[index_tensor(batch.draft_rows[rows], p.device), k]
    bad = rows[(~(q_x > 0)).cpu().numpy()]
    if len(bad):
        raise RowFault(f"rows {bad.tolist()}: q is not positive at the token drafted at offset {k}", bad)
    keys = DrawKeys(batch.keys[rows], batch.anchors[rows], np.full(len(rows), k, dtype=np.int64), Purpose.ACCEPT)
    return batch.draws.accept(keys, reference.accept_probs(p_x, q_x))


def _residual(batch: VerifyInput, rows: IntArray, k: int, p: Tensor) -> Tensor:
    q = batch.q.probs(batch.draft_rows[rows], np.full(len(rows), k, dtype=np.int64))
    return reference.residual(p, q)


def _draw(batch: VerifyInput, accepted: IntArray, finals: list[Tensor], owners: list[IntArray]) -> IntArray:
    """The corrected or bonus token of every request, one call for all."""
    if not finals:
        return np.zeros(0, dtype=np.int64)
    order = np.argsort(np.concatenate(owners))
    laws = finals[0] if len(finals) == 1 else torch.cat(finals)
    if (order != np.arange(len(order))).any():
        laws = laws[index_tensor(order, laws.device)]
    keys = DrawKeys(batch.keys, batch.anchors, accepted, Purpose.RESIDUAL)
    tokens: IntArray = batch.draws.categorical(keys, laws).cpu().numpy()
    return tokens


def build(config: RejectionConfig, context: BuildContext) -> RejectionVerifier:
    """The factory of ``rejection``."""
    return RejectionVerifier(fused.kernel_of(context))
