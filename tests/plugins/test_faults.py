"""Faults of plugins while an engine decodes: told by distribution, version, component, phase and request."""

from __future__ import annotations

from typing import Any

import pytest

from dspark import EngineConfig, SamplingParams
from dspark.engine.build import build_engine
from dspark.engine.engine import Engine
from dspark.errors import ComponentError, DSparkWarning
from dspark.testing import TableTarget
from dspark.testing.toys import random_table

SOURCE = """
from dspark.errors import RowFault

class Scheduler:
    capabilities = SchedulerCapabilities()
    def plan(self, batch, cost):
        raise {fault}
    def release(self, slot, generation): ...

@hookimpl
def dspark_register_schedulers(register):
    register("quick", lambda config, context: Scheduler(), config=None, capabilities=SchedulerCapabilities())

class Observer:
    def on_round(self, record):
        1 / 0
    def on_finish(self, request, reason): ...

@hookimpl
def dspark_make_observers(config):
    return [Observer()]
"""


def decoding(site: Any, fault: str) -> tuple[Engine, str]:
    """An engine with a scheduler that raises, and a request whose second round drafts."""
    site.add("acme-slow", SOURCE.format(fault=fault), version="3.2")
    config = EngineConfig(scheduler="acme-slow/quick", drafter="ngram", drafter_config={"min_n": 1}, max_len=32)
    made = build_engine(config, target=TableTarget(random_table(4, 3, 3)), cost=None)
    return made, made.submit([0, 1, 2, 0, 1], SamplingParams(temperature=1.0, max_tokens=8), request_id="mine")


def test_an_error_names_distribution_version_component_phase_and_request(site: Any) -> None:
    made, name = decoding(site, "RowFault('no plan', [0])")
    with pytest.warns(DSparkWarning, match=r"observer acme-slow 3\.2 failed"):
        chunks = list(made.run())
    error = chunks[-1].error
    assert isinstance(error, ComponentError)
    assert (error.distribution, error.version, error.component) == ("acme-slow", "3.2", "acme-slow/quick")
    assert (error.phase, error.request_ids) == ("schedule", (name,))
    assert str(error) == "request 'mine': acme-slow/quick 3.2 failed in phase 'schedule': RowFault: no plan"
    assert made.stats.faults == {"acme-slow/quick:schedule": 1, "acme-slow 3.2:observe": 1}


def test_a_warning_of_what_is_switched_off_names_the_version(site: Any) -> None:
    made, _ = decoding(site, "ZeroDivisionError('boom')")
    with pytest.warns(DSparkWarning) as warned:
        chunks = list(made.run())
    assert chunks[-1].finish_reason == "length"
    said = [str(w.message) for w in warned]
    assert any(m.startswith("acme-slow/quick 3.2 failed in phase 'schedule' (ZeroDivisionError: boom)") for m in said)


def test_what_no_plugin_registered_has_no_distribution() -> None:
    error = ComponentError("x", component="sampling", phase="process")
    assert (error.distribution, error.version) == ("", "")
