"""What happens when a component raises (METHOD section 4, rule 6).

A fault after drafting may depend on every draft, so no fallback length is exact, 0 least of all: a request that a
fault is attributed to ends with an error. A batch-wide fault finishes ``coupled`` and greedy rows normally;
``rejection`` rows verify all that was drawn, which is counted as an unproven round, and later rounds plan a fixed
length. A fault that meets one row alone, a ``rejection`` row, is that row's; one before the first draw of the step is
nobody's.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from dspark.engine.parts import Parts
from dspark.engine.replay import RecordedDraws
from dspark.engine.state import RequestState
from dspark.errors import ComponentError, DSparkWarning, RowFault
from dspark.types import Mode

T = TypeVar("T")


class RoundFaults:
    """Attributes what components raise in one step.

    Attributes:
        failed: requests that end with an error.
        forced: a fault took the plan away: every draft is verified.
        unproven: a batch-wide fault hit ``rejection`` rows.
    """

    def __init__(self, parts: Parts, draws: RecordedDraws) -> None:
        self.parts = parts
        self._draws = draws
        self.failed: dict[RequestState, ComponentError] = {}
        self.counts: Counter[str] = Counter()
        self.forced = False
        self.unproven = False

    def fail(self, request: RequestState, phase: str, kind: str, cause: Exception) -> None:
        """End one request with an error."""
        name, version = self.parts.at_fault(kind, cause)
        who = f"{name} {version}".rstrip()
        error = ComponentError(
            f"request {request.request_id!r}: {who} failed in phase {phase!r}: {type(cause).__name__}: {cause}",
            component=name,
            version=version,
            phase=phase,
            request_ids=(request.request_id,),
        )
        error.__cause__ = cause
        self.failed.setdefault(request, error)

    def plan_phase(self, phase: str, kind: str, rows: Sequence[RequestState], call: Callable[[], T]) -> T | None:
        """Run a phase between the first draw and packing; None where it raised, and then ``forced`` is set."""
        try:
            return call()
        except Exception as fault:
            faulty = attributed(fault, rows)
            if faulty:
                self._count(kind, phase, fault)
                for request in faulty:
                    self.fail(request, phase, kind, fault)
            else:
                self._batch_wide(phase, kind, rows, fault)
        self.forced = True
        return None

    def policy_phase(self, call: Callable[[], T]) -> T | None:
        """Ask the gamma policy; None where it raised: it is no longer asked, and all of gamma is drafted.

        Nothing of the step has been drawn yet, so what raised is a function of history and no request is affected.
        """
        try:
            return call()
        except Exception as fault:
            self._count("gamma_policy", "choose", fault)
            self.parts.gamma_policy = None
            self._warn("gamma_policy", "choose", fault, "later rounds draft a fixed gamma")
            return None

    def final_phase(
        self,
        phase: str,
        kind: str,
        rows: Sequence[RequestState],
        call: Callable[[Sequence[RequestState]], T],
    ) -> tuple[T | None, list[RequestState]]:
        """Run a phase that nothing can stand in for (target, processors, verifier), for ``rows``.

        Rows that a fault is attributed to end with an error and the call is repeated for the rest; what raises without
        attribution ends all of them. ``call`` must take its random decisions from a source that repeats them.

        Returns:
            the result and the rows that it is for; None and no rows where the phase failed.
        """
        left = list(rows)
        while left:
            try:
                return call(left), left
            except Exception as fault:
                self._count(kind, phase, fault)
                for request in attributed(fault, left) or left:
                    self.fail(request, phase, kind, fault)
                left = [request for request in left if request not in self.failed]
        return None, []

    def _batch_wide(self, phase: str, kind: str, rows: Sequence[RequestState], fault: Exception) -> None:
        self._count(kind, phase, fault)
        # before the step's first draw everything is a function of history, and so is the fault
        exposed = [r for r in rows if r.mode is Mode.REJECTION] if self._draws.taken else []
        if len(rows) == 1 and exposed:
            self.fail(rows[0], phase, kind, fault)
        elif exposed:
            self.unproven = True
        if phase == "draft":
            self.parts.drafting = False
            later = "later rounds decode plainly"
        else:
            self.parts.planning = False
            later = "later rounds verify a fixed length"
        self._warn(kind, phase, fault, later)

    def _warn(self, kind: str, phase: str, fault: Exception, later: str) -> None:
        who = " ".join(self.parts.at_fault(kind, fault)).rstrip()
        warnings.warn(
            f"{who} failed in phase {phase!r} ({type(fault).__name__}: {fault}); {later}",
            DSparkWarning,
            stacklevel=5,
        )

    def _count(self, kind: str, phase: str, fault: Exception) -> None:
        self.counts[f"{self.parts.at_fault(kind, fault)[0]}:{phase}"] += 1


def attributed(fault: Exception, rows: Sequence[RequestState]) -> list[RequestState]:
    """The requests that a fault names; none where it names no row of the batch: then it is the whole batch's."""
    return [rows[row] for row in fault.rows if 0 <= row < len(rows)] if isinstance(fault, RowFault) else []
