"""Routes of plugins: they are served, behind the same keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dspark.errors import PluginError
from dspark.plugins import PluginManager, hookimpl
from dspark.server import ServerConfig, create_app
from tests.server.conftest import MODEL, start


class Hello:
    """Adds a route."""

    DSPARK_API = 1

    @hookimpl
    def dspark_register_routes(self, app: Any) -> None:
        @app.get("/hello")
        async def hello() -> dict[str, int]:
            return {"slots": app.state.service.engine.config.max_slots}


def test_routes_of_plugins(make_decoder: Callable[..., Any]) -> None:
    manager = PluginManager()
    manager.register(Hello(), "hello")
    manager.load()
    live = start(make_decoder(), ServerConfig(model_name=MODEL, api_keys=["k"]), plugins=manager)
    try:
        assert live.get("/hello").status_code == 401
        assert live.get("/hello", headers={"authorization": "Bearer k"}).json() == {"slots": 4}
        assert live.client("k").models.list().data[0].id == MODEL
    finally:
        live.stop()


def test_routes_of_the_decoders_own_plugins(make_decoder: Callable[..., Any], monkeypatch: Any) -> None:
    decoder = make_decoder(extra_plugins={"hello": Hello()})
    monkeypatch.setattr("dspark.server.app.load_plugins", None)  # they are loaded already, and not again
    live = start(decoder)
    try:
        assert live.get("/hello").json() == {"slots": 4}
    finally:
        live.stop()


def test_a_plugin_that_was_asked_for_and_breaks_is_an_error(make_decoder: Callable[..., Any]) -> None:
    manager, decoder = PluginManager(), make_decoder()
    manager.register(Broken(), "broken")
    manager.load()
    with pytest.raises(PluginError, match=r"broken.*dspark_register_routes"):
        create_app(decoder, plugins=manager)
    decoder.close()


class Broken:
    """Raises."""

    DSPARK_API = 1

    @hookimpl
    def dspark_register_routes(self, app: Any) -> None:
        raise RuntimeError("x")
