"""An OpenAI-compatible HTTP server around a decoder. Needs the extra ``server``.

``create_app`` makes the ASGI application, to mount or to run; ``serve`` runs it until a signal ends it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspark.server.app import create_app
    from dspark.server.config import ServerConfig
    from dspark.server.run import serve

__all__ = ["ServerConfig", "create_app", "serve"]

_HOMES = {"ServerConfig": "config", "create_app": "app", "serve": "run"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    from dspark.errors import DSparkError

    try:
        module = import_module(f"dspark.server.{_HOMES[name]}")
    except ModuleNotFoundError as err:
        if (err.name or "").partition(".")[0] == "dspark":
            raise
        raise DSparkError(f"the server needs {err.name}: install dspark[server]") from err
    return getattr(module, name)
