"""What the scheduler is doing now: the last rounds, kept small, for the page."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from dspark.engine.engine import Engine
from dspark.types import RequestView, RoundRecord

ROUNDS = 240
"""Rounds that are kept."""
REQUESTS = 64
"""Most requests that a status lists."""
CURVE_POINTS = 48


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
        self._rounds: deque[tuple[float, int, int, int, int, int, float, float]] = deque(maxlen=ROUNDS)
        self._requests: dict[str, Row] = {}
        self._reason = ""

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
        seconds = sum(record.seconds.values())
        gamma = record.batch.gamma if record.batch is not None else 0
        with self._lock:
            self._rounds.append((now, len(committed), gamma, budget, record.executed_tokens, tokens, expected, seconds))
            for name, row in rows.items():
                self._requests.pop(name, None)
                self._requests[name] = row
            if record.plan is not None:
                self._reason = record.plan.stop_reason
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
        fresh = [r for r in rounds if now - r[0] <= 10]
        span = max(now - fresh[0][0], 1e-3) if fresh else 1.0
        return {
            "rounds": [
                {
                    "age": round(now - t, 3), "requests": n, "gamma": gamma, "budget": budget, "executed": executed,
                    "tokens": tokens, "expected": round(expected, 3), "seconds": round(seconds, 6),
                }
                for t, n, gamma, budget, executed, tokens, expected, seconds in rounds
            ],
            "tokens_per_second": sum(r[5] for r in fresh) / span if fresh else 0.0,
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


def cost_curve(engine: Engine, points: int = CURVE_POINTS) -> dict[str, Any]:
    """Seconds of a forward by executed tokens, as the scheduler's cost table has it; no points without one."""
    table = engine.parts.cost
    if table is None:
        return {"state": "no-cost-table", "points": []}
    most = max(2, engine.config.max_slots * (1 + engine.parts.gamma))
    steps = sorted({1 + round(i * (most - 1) / (points - 1)) for i in range(points)})
    return {
        "state": table.state,
        "mode": table.mode,
        "points": [[tokens, float(table.verify_seconds(tokens))] for tokens in steps],
    }
