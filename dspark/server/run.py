"""Runs the application until a signal ends it."""

from __future__ import annotations

import asyncio
import warnings
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from dspark.api import SpeculativeDecoder
from dspark.errors import DSparkError, DSparkWarning
from dspark.server.app import create_app
from dspark.server.config import ServerConfig, is_loopback
from dspark.server.protocol import guarded
from dspark.server.service import Service

GRACE = 10.0
"""Seconds beyond ``drain_timeout`` that connections have to take their last event."""


class GracefulServer(uvicorn.Server):
    """Drains at the first signal, so that no stream ends without its last event; a second one ends at once."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: Any = None) -> None:
        """Serve until told to stop."""
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains. uvicorn would raise it again at the end, and nothing behind ``run`` would run."""
        if self._service.draining:
            self.force_exit = True
        self.stop()

    def stop(self) -> None:
        """As a signal would; from any thread."""
        if self._loop is not None and not self._service.draining:
            self._loop.call_soon_threadsafe(self._service.drain)
        self.should_exit = True


def make_server(
    app: FastAPI, host: str, port: int, *, log_level: str = "info", access_log: bool = False
) -> GracefulServer:
    """A server of an application that :func:`create_app` made, ready to ``run``."""
    config: ServerConfig = app.state.config
    return GracefulServer(
        uvicorn.Config(
            app,
            host=host,
            port=port,
            http=guarded(config.body_timeout, config.write_timeout),
            log_level=log_level,
            access_log=access_log,
            server_header=False,
            timeout_graceful_shutdown=int(config.drain_timeout + GRACE),
            lifespan="on",
        ),
        app.state.service,
    )


def serve(
    decoder: SpeculativeDecoder,
    config: ServerConfig | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    log_level: str = "info",
    access_log: bool = False,
) -> None:
    """Serve ``decoder`` until SIGINT or SIGTERM, then close it.

    Raises:
        DSparkError: the address can't be bound.
    """
    config = config if config is not None else ServerConfig()
    if not is_loopback(host) and not config.api_keys:
        warnings.warn(
            f"{host} can be reached from other machines, and there is no API key: anybody there may use the model",
            DSparkWarning,
            stacklevel=2,
        )
    server = make_server(create_app(decoder, config), host, port, log_level=log_level, access_log=access_log)
    try:
        server.run()
    except SystemExit as end:
        raise DSparkError(f"the server can't listen at {host}:{port}: is the port taken?") from end
    finally:
        decoder.close()
    if not server.started:
        raise DSparkError(f"the server can't listen at {host}:{port}: is the port taken?")
