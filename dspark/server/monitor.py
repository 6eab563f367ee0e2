"""What the scheduler is doing now: the last rounds, kept small, for the page."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dspark.engine.engine import Engine
from dspark.types import RequestView, RoundRecord

ROUNDS = 240
"""Rounds that are kept."""
REQUESTS = 64
"""Most requests that a status lists."""
CURVE_POINTS = 48


class Round(NamedTuple):
    """One step.

    Attributes:
        ended: when, by ``time.monotonic``.
        requests: that decoded; ``drafts`` has how many of each one's drafts were verified, and accepted.
        gamma: block size; 0 in a plain step. ``why`` is the gamma policy's reason.
        budget: drafts that were verified.
        executed: tokens that the target ran, in ``forward`` seconds.
        tokens: committed; ``expected`` by the plan.
        seconds: of all phases.
    """

    ended: float
    requests: int
    gamma: int
    why: str
    budget: int
    executed: int
    tokens: int
    expected: float
    forward: float
    seconds: float
    drafts: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class Row:
    """The last round of one request.

    Attributes:
        mode: how its tokens are decided.
        output: tokens committed so far.
        survival: a_1..a_gamma of its last draft.
        verified, accepted: of that draft.
        seen: when, by ``time.monotonic``.
    """

    mode: str
    prompt: int
    output: int
    max_tokens: int
    survival: list[float]
    verified: int
    accepted: int
    seen: float


class Monitor:
    """A round observer. The engine's thread writes, the server's reads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rounds: deque[Round] = deque(maxlen=ROUNDS)
        self._requests: dict[str, Row] = {}
        self._reason = ""
        self._guarded = False
        self.context = 0
        """Longest context of the last round, in tokens."""

    @property
    def guarded(self) -> bool:
        """True where the gamma policy's guard made the last round a plain one."""
        return self._guarded

    def on_round(self, record: RoundRecord) -> None:
        """Take in one round."""
        now = time.monotonic()
        rows = {}
        committed = {done.request.request_id: done for done in record.committed if done.new_ids}
        for name, done in committed.items():
            view = done.request
            survival: list[float] = []
            if record.confidence is not None and done.row >= 0:
                curve = record.confidence.survival[done.row]
                survival = [round(float(a), 4) for a in curve] if curve[:1] > 0 else []
            output = len(view.ids) - view.prompt_len + len(done.new_ids)
            rows[name] = Row(
                view.mode.value, view.prompt_len, output, view.params.max_tokens,
                survival, done.offered, done.accepted, now,
            )  # fmt: skip
        tokens = sum(len(done.new_ids) for done in committed.values())
        budget = sum(done.offered for done in committed.values())
        expected = float(record.plan.expected_accepts) if record.plan is not None else float(len(committed))
        latest = Round(
            now,
            len(committed),
            record.batch.gamma if record.batch is not None else 0,
            record.choice[1].reason if record.choice is not None else "",
            budget,
            record.executed_tokens,
            tokens,
            expected,
            record.seconds.get("target", 0.0),
            sum(record.seconds.values()),
            tuple((done.offered, done.accepted) for done in committed.values()),
        )
        with self._lock:
            self._rounds.append(latest)
            for name, row in rows.items():
                self._requests.pop(name, None)
                self._requests[name] = row
            if committed:  # else it read prompts alone
                self._reason = record.plan.stop_reason if record.plan is not None else ""
                self._guarded = latest.why == "guard"
                self.context = max(len(done.request.ids) for done in committed.values())
            while len(self._requests) > 4 * REQUESTS:
                self._requests.pop(next(iter(self._requests)))

    def on_finish(self, request: RequestView, reason: str) -> None:
        """Forget a request."""
        with self._lock:
            self._requests.pop(request.request_id, None)

    def recent(self) -> dict[str, Any]:
        """The last rounds and the live requests, as plain values; ages in seconds."""
        now = time.monotonic()
        with self._lock:
            rounds, rows, reason = list(self._rounds), list(self._requests.items()), self._reason
        fresh = [r for r in rounds if now - r.ended <= 10]
        span = max(now - fresh[0].ended + fresh[0].seconds, 1e-3) if fresh else 1.0  # since the first of them began
        return {
            "rounds": [
                {
                    "age": round(now - r.ended, 3), "requests": r.requests, "gamma": r.gamma, "why": r.why,
                    "budget": r.budget, "executed": r.executed, "tokens": r.tokens, "expected": round(r.expected, 3),
                    "forward": round(r.forward, 6), "seconds": round(r.seconds, 6),
                }
                for r in rounds
            ],
            "recent": averages(rounds),
            "tokens_per_second": sum(r.tokens for r in fresh) / span if fresh else 0.0,
            "stop_reason": reason,
            "requests": [
                {
                    "id": name, "mode": row.mode, "prompt_tokens": row.prompt, "output_tokens": row.output,
                    "max_tokens": row.max_tokens, "survival": row.survival, "verified": row.verified,
                    "accepted": row.accepted, "age": round(now - row.seen, 3),
                }
                for name, row in rows[-REQUESTS:]
            ],
        }  # fmt: skip


def averages(rounds: Sequence[Round]) -> dict[str, Any]:
    """Accepted length, verify budget and acceptance by position of some rounds, named as in ``EngineStats``."""
    requests = sum(r.requests for r in rounds)
    pairs = Counter(pair for r in rounds for pair in r.drafts)  # of these there are few
    places = range(max((offered for offered, _ in pairs), default=0))
    offered = [sum(n for (o, _), n in pairs.items() if k < o) for k in places]
    reached = [sum(n for (o, a), n in pairs.items() if k < o and k <= a) for k in places]
    accepted = [sum(n for (_, a), n in pairs.items() if k < a) for k in places]
    return {
        "accepted_length": sum(r.tokens for r in rounds) / requests if requests else 0.0,
        "verify_budget": sum(r.budget for r in rounds) / requests if requests else 0.0,
        "offered": offered,
        "acceptance": [a / n if n else 0.0 for a, n in zip(accepted, offered, strict=True)],
        "conditional_acceptance": [a / n if n else 0.0 for a, n in zip(accepted, reached, strict=True)],
    }


def cost_curve(engine: Engine, context: int = 0, points: int = CURVE_POINTS) -> dict[str, Any]:
    """Seconds of a forward by executed tokens, as the scheduler's cost table has it now; no points without one.

    Args:
        engine: whose table; it is exchanged between rounds where it is refined.
        context: tokens of the longest context, which chooses the curve of a table that has several.
        points: most points.
    """
    table = engine.parts.cost
    if table is None:
        return {"state": "no-cost-table", "points": []}
    most = max(2, engine.config.max_slots * (1 + engine.parts.gamma))
    steps = sorted({1 + round(i * (most - 1) / (points - 1)) for i in range(points)})
    return {
        "state": table.state,
        "mode": table.mode,
        "points": [[tokens, float(table.verify_seconds(tokens, context))] for tokens in steps],
    }
