"""The JSON that the page shows, once or as a stream of events."""

from __future__ import annotations

import asyncio
import json
import math
import time
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

import dspark
from dspark.server.monitor import Monitor, cost_curve
from dspark.server.response import EVENT_HEADERS, ClientGoneError, while_connected
from dspark.server.service import Service

PERIOD = 1.0
"""Seconds between two events."""


class Status:
    """Puts together what the server is doing.

    Args:
        service, monitor: where it is read from.
        model: the served name.
        notes: warnings that hold as long as the server runs.
    """

    def __init__(self, service: Service, monitor: Monitor, model: str, notes: list[str]) -> None:
        self._service, self._monitor, self._model, self._notes = service, monitor, model, notes
        self._began = time.monotonic()
        self.watchers = 0

    def read(self) -> dict[str, Any]:
        """Plain values; ``stats`` are since the engine was built, ``recent`` those of the rounds that are listed."""
        engine, service = self._service.engine, self._service
        stats = engine.stats.as_dict()
        parts, (running, waiting) = engine.parts, service.queue()
        return {
            "version": dspark.__version__,
            "model": self._model,
            "target": parts.target.name,
            "drafter": parts.name("drafter"),
            "estimator": parts.name("estimator"),
            "scheduler": parts.name("scheduler"),
            "gamma": parts.gamma,
            "uptime": round(time.monotonic() - self._began, 1),
            "queue": {
                "running": running,
                "waiting": waiting,
                "slots": engine.config.max_slots,
                "max_waiting": service.config.max_queue,
            },
            "guard": dict(service.guard()),
            "notes": self._notes,
            "cost": cost_curve(engine, self._monitor.context),
            "stats": stats,
            **self._monitor.recent(),
        }


class StatusStream(Response):
    """Sends the status as events until the client leaves or the server stops."""

    def __init__(self, status: Status, service: Service) -> None:
        super().__init__()
        self._status, self._service = status, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream."""
        self._status.watchers += 1
        try:
            await while_connected(receive, self._events(send))
        except ClientGoneError:
            pass
        finally:
            self._status.watchers -= 1

    async def _events(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})
        while not self._service.stopped.is_set():
            data = b"data: " + json.dumps(finite(self._status.read())).encode() + b"\n\n"
            await send({"type": "http.response.body", "body": data, "more_body": True})
            try:
                await asyncio.wait_for(self._service.stopped.wait(), PERIOD)
            except TimeoutError:
                continue
        await send({"type": "http.response.body", "body": b"event: end\ndata: {}\n\n"})


def finite(value: Any) -> Any:
    """The value with NaN and infinities, which JSON can't write, as None."""
    if isinstance(value, dict):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
