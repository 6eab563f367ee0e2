"""Requests that schemathesis makes from the OpenAPI description: none of them may be answered by a failure."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis import GenerationMode
from schemathesis.config import GenerationConfig, SchemathesisConfig
from schemathesis.core.control import SkipTest

from dspark.server import ServerConfig
from tests.server.conftest import MODEL

LIMITS = ServerConfig(model_name=MODEL, max_output_tokens=4, max_choices=2, max_queue=64)


def test_the_description_is_one(live: Any) -> None:
    description = live.get("/openapi.json").json()
    paths = set(description["paths"])
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics", "/status"} <= paths
    assert "ErrorAnswer" in description["components"]["schemas"]
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert {"400", "401", "404", "413", "429", "503"} <= set(description["paths"][path]["post"]["responses"])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_no_request_makes_it_fail(serving: Callable[..., Any], mode: str) -> None:
    config = SchemathesisConfig()
    config.projects.default.generation = GenerationConfig(modes=[GenerationMode(mode)])
    with serving(LIMITS) as live:
        schema = schemathesis.openapi.from_url(f"{live.url}/openapi.json", config=config)
        answered: dict[int, int] = {}
        asked: set[str] = set()
        for result in schema.get_all_operations():
            operation = result.ok()

            @hypothesis.given(case=operation.as_strategy(generation_mode=GenerationMode(mode)))
            @hypothesis.settings(
                max_examples=60,
                deadline=None,
                database=None,
                derandomize=True,
                suppress_health_check=list(hypothesis.HealthCheck),
            )
            def ask(case: Any) -> None:
                if isinstance(case.body, dict) and "model" in case.body and mode == "positive":
                    case.body["model"] = MODEL  # else nearly all of them end at an unknown model
                answer = case.call(timeout=60)
                answered[answer.status_code] = answered.get(answer.status_code, 0) + 1
                assert answer.status_code < 500, answer.text

            with contextlib.suppress(SkipTest):  # nothing about it can be wrong
                ask()
                asked.add(operation.path)
        assert {"/v1/chat/completions", "/v1/completions"} <= asked
        live.settled()
        assert live.get("/health").status_code == 200
        assert any(400 <= status < 500 for status in answered)
        if mode == "positive":
            assert answered.get(200, 0) > 0
