"""Components that raise exactly when x_1 is a given token: the fault depends on the draft, so no fallback is free.

An engine that answers with l = 0 lets x_1 decide its own verification, and outputs (.85, .15) on Appendix A's numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dspark.errors import RowFault
from dspark.testing.cheats import Forgetful
from dspark.testing.toys import TableDrafter, TableEstimator, TableTarget

if TYPE_CHECKING:
    from torch import Tensor

    from dspark.capabilities import VerifierCapabilities
    from dspark.protocols import DraftSampler, Verifier, VerifyScheduler
    from dspark.types import (
        BatchView,
        Committed,
        DraftBlock,
        FloatArray,
        RoundRecord,
        ScheduleInput,
        TargetOutput,
        VerifyInput,
        VerifyLayout,
        VerifyPlan,
        VerifyResult,
    )


class Trip:
    """Raises where a first token is ``token``.

    Args:
        token: the token.
        attributed: raise ``RowFault`` with the rows; otherwise a plain error, which says nothing of rows.
        only: slot of the one request that trips (for a verifier, which sees none: its request key); None for all.
    """

    def __init__(self, token: int = 1, *, attributed: bool = True, only: int | None = None) -> None:
        self.token, self.attributed, self.only = token, attributed, only

    def check(self, first_tokens: Sequence[int], names: Sequence[int]) -> None:
        """Raise if any of ``first_tokens`` [R], of the rows called ``names`` [R], is the token."""
        rows = [
            row
            for row, (token, name) in enumerate(zip(first_tokens, names, strict=True))
            if token == self.token and self.only in (None, name)
        ]
        if rows and self.attributed:
            raise RowFault(f"x_1 is {self.token}", rows)
        if rows:
            raise RuntimeError(f"x_1 is {self.token}")


class FaultyDrafter(TableDrafter):
    """Raises after everything is drawn (or in ``commit``, when such a token was committed first)."""

    def __init__(self, table: Tensor, trip: Trip, *, gamma: int = 2, in_commit: bool = False) -> None:
        super().__init__(table, gamma=gamma)
        self.trip, self.in_commit = trip, in_commit

    def propose(self, batch: BatchView, sampler: DraftSampler) -> DraftBlock:
        """Draft, then trip."""
        block = super().propose(batch, sampler)
        if not self.in_commit:
            self.trip.check(block.token_ids[:, 0].tolist(), _slots(batch))
        return block

    def commit(self, committed: Sequence[Committed]) -> None:
        """Trip, or remember."""
        if self.in_commit:
            firsts = [c.new_ids[0] if c.new_ids else -1 for c in committed]
            self.trip.check(firsts, [c.request.slot for c in committed])
        super().commit(committed)


class FaultyEstimator(TableEstimator):
    """Raises in ``estimate``, or in ``observe``."""

    def __init__(self, table: FloatArray | Sequence[Sequence[float]], trip: Trip, *, in_observe: bool = False) -> None:
        super().__init__(table)
        self.trip, self.in_observe = trip, in_observe

    def estimate(self, batch: BatchView, draft: DraftBlock) -> FloatArray:
        """Trip, or estimate."""
        if not self.in_observe:
            self.trip.check(draft.token_ids[:, 0].tolist(), _slots(batch))
        return super().estimate(batch, draft)

    def observe(self, record: RoundRecord) -> None:
        """Trip, or keep the record."""
        if self.in_observe and record.draft is not None and record.batch is not None:
            self.trip.check(record.draft.token_ids[:, 0].tolist(), _slots(record.batch))
        super().observe(record)


class FaultyScheduler(Forgetful):
    """Raises in ``plan``, of what ``drafts()`` says was drawn, [R, gamma]."""

    def __init__(self, inner: VerifyScheduler, drafts: Callable[[], Any], trip: Trip) -> None:
        self.inner, self.drafts, self.trip = inner, drafts, trip

    def plan(self, batch: ScheduleInput, cost: Any | None = None) -> VerifyPlan:
        """Trip, or plan."""
        self.trip.check(np.asarray(self.drafts())[:, 0].tolist(), batch.slots.tolist())
        return self.inner.plan(batch, cost)


class FaultyTarget(TableTarget):
    """Raises in ``forward`` where a sequence's second query token is the one; rows are sequences."""

    def __init__(self, table: Tensor, trip: Trip, **settings: Any) -> None:
        super().__init__(table, **settings)
        self.trip = trip

    def forward(self, layout: VerifyLayout, taps: Sequence[int] = ()) -> TargetOutput:
        """Trip, or run."""
        starts, lens = layout.cu_query_lens[:-1], layout.query_lens
        ids = layout.token_ids.tolist()
        seconds = [ids[s + 1] if n > 1 else -1 for s, n in zip(starts, lens, strict=True)]
        self.trip.check(seconds, layout.slots.tolist())
        return super().forward(layout, taps)


class FaultyVerifier:
    """Raises in ``verify``, of the rows that have a draft to verify; with ``late``, once everything is decided."""

    def __init__(self, inner: Verifier, trip: Trip, *, late: bool = False) -> None:
        self.inner, self.trip, self.late = inner, trip, late

    @property
    def capabilities(self) -> VerifierCapabilities:
        """The inner verifier's."""
        return self.inner.capabilities

    def verify(self, batch: VerifyInput) -> VerifyResult:
        """Trip, or verify."""
        result = self.inner.verify(batch) if self.late else None
        first = batch.draft_ids[:, 0].tolist() if batch.draft_ids.shape[1] else []
        tokens = [t if n else -1 for t, n in zip(first, batch.verify_lens, strict=False)]
        self.trip.check(tokens, [int(key) for key in batch.keys[: len(tokens)]])
        return result if result is not None else self.inner.verify(batch)


class FaultyProcessor:
    """A custom logits processor that raises once it was fed the token as the first of a draft."""

    def __init__(self, token: int = 1, fed: tuple[int, ...] = (), *, forked: bool = False) -> None:
        self.token, self.fed, self.forked = token, fed, forked

    def fork(self) -> FaultyProcessor:
        """A copy that knows it is fed drafts."""
        return FaultyProcessor(self.token, (), forked=True)

    def advance(self, token_id: int) -> None:
        """Remember."""
        self.fed = (*self.fed, token_id)

    def process(self, logits: Tensor) -> Tensor:
        """Trip on a fork, or change nothing."""
        if self.forked and self.fed[:1] == (self.token,):
            raise RuntimeError(f"x_1 is {self.token}")
        return logits


def _slots(batch: BatchView) -> list[int]:
    return [request.slot for request in batch.requests]
