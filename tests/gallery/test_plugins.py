"""Broken plugins as wholes, and broken observers: what the loader and the plugin suites say of them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from dspark.plugins import hookimpl
from dspark.testing import ContractViolation, CountingObserver, ObserverSuite, PluginSuite, run_checks
from tests.plugins.conftest import HEADER, SCHEDULER, Site, site

__all__ = ["site"]

REGISTER = """
@hookimpl
def dspark_register_schedulers(register):
    register({name!r}, build, config=Config, capabilities=SchedulerCapabilities())
"""
BUSY = "import time\nbegan = time.process_time()\nwhile time.process_time() - began < 0.8:\n    pass\n"

CASES = [
    ("sound", SCHEDULER + REGISTER.format(name="quick"), "", ()),
    ("import error", "import no_such_module\n", "test_it_loads", ("can't be imported", "no_such_module")),
    ("wrong API version", "DSPARK_API = 7\n", "test_it_loads", ("DSPARK_API = 7", "plugin API 1")),
    ("no API version", "del DSPARK_API\n", "test_it_loads", ("does not declare DSPARK_API",)),
    (
        "misspelt hook",
        "@hookimpl\ndef dspark_register_scheduler(register): ...\n",
        "test_it_loads",
        ("no hook 'dspark_register_scheduler'", "did you mean 'dspark_register_schedulers'"),
    ),
    (
        "forgotten hookimpl",
        "def dspark_register_schedulers(register): ...\n",
        "test_it_loads",
        ("not marked with @hookimpl",),
    ),
    (
        "raises while it registers",
        "@hookimpl\ndef dspark_register_schedulers(register):\n    1 / 0\n",
        "test_it_loads",
        ("failed in dspark_register_schedulers: ZeroDivisionError",),
    ),
    (
        "registers one name twice",
        SCHEDULER + REGISTER.format(name="a") + REGISTER.format(name="a").replace("schedulers(", "verifiers("),
        "test_it_loads",
        ("capabilities must be VerifierCapabilities",),
    ),
    ("takes a built-in name", SCHEDULER + REGISTER.format(name="causal"), "test_names", ("reserved built-in name",)),
    ("offers nothing", "", "test_it_offers_something", ("implements no hook",)),
    (
        "factory that leads nowhere",
        SCHEDULER + REGISTER.format(name="quick").replace("build, ", "'no_such_package.parts:build', "),
        "test_references",
        ("no_such_package", "component = "),
    ),
    ("slow start", BUSY + SCHEDULER + REGISTER.format(name="quick"), "test_it_is_light", ("processor time",)),
    ("imports torch", "import torch\n" + SCHEDULER, "test_it_is_light", ("importing its entry point imports torch",)),
]


def suite_of(dist: str) -> Any:
    return type("Suite", (PluginSuite,), {"component": dist, "load_seconds": 0.5})()


@pytest.mark.parametrize(("name", "source", "check", "words"), CASES, ids=[c[0] for c in CASES])
def test_a_whole_plugin(
    site: Site, monkeypatch: pytest.MonkeyPatch, name: str, source: str, check: str, words: tuple[str, ...]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(site.folder))  # for the suite's fresh interpreter
    site.add("acme-part", source, header=HEADER)
    made = suite_of("acme-part")
    if not check:
        assert [str(o.violation) for o in run_checks(made) if o.violation] == []
        return
    with pytest.raises(ContractViolation) as caught:
        getattr(made, check)()
    for word in words:
        assert word in str(caught.value)


def test_a_name_that_two_offer(site: Site) -> None:
    site.scheduler("acme-a", "quick")
    site.scheduler("acme-b", "quick")
    with pytest.raises(ContractViolation, match=r"is offered by acme-a 1\.0 and acme-b 1\.0"):
        suite_of("acme-b").test_names()


def test_a_plugin_that_is_not_there(site: Site) -> None:
    with pytest.raises(ContractViolation, match="no plugin of distribution 'acme-c' is installed"):
        suite_of("acme-c").test_it_loads()


# --- observers -------------------------------------------------------------------------------------------------------


class ExpectsDrafts(CountingObserver):
    def on_round(self, record: Any) -> None:
        self.drafted += len(record.draft.lens)


class Retimes(CountingObserver):
    def on_round(self, record: Any) -> None:
        record.seconds["observer"] = 1.0


class Edits(CountingObserver):
    def on_round(self, record: Any) -> None:
        if record.draft is not None:
            record.draft.lens[:] = 0


class Samples(CountingObserver):
    """Looks at one round in ten."""

    def on_round(self, record: Any) -> None:
        if random.random() < 0.1:
            super().on_round(record)


class Half:
    def on_round(self, record: Any) -> None: ...


class KnowsReasons(CountingObserver):
    def on_finish(self, request: Any, reason: str) -> None:
        self.finished[{"stop": "done", "length": "cut"}[reason]] += 1


ONE = CountingObserver()
OBSERVERS = [
    ("sound", CountingObserver, "", ""),
    ("expects a draft in every step", ExpectsDrafts, "test_every_record", "'NoneType' object has no attribute 'lens'"),
    (
        "raises in an engine",
        ExpectsDrafts,
        "test_engine_goes_on",
        "it raised within a round: observer under test failed",
    ),
    ("writes to the times", Retimes, "test_records_stay", "wrote to seconds"),
    ("writes to the draft", Edits, "test_records_stay", "wrote to the draft"),
    ("advances the global generator", Samples, "test_engine_goes_on", "global generator"),
    ("has half of the methods", Half, "test_it_builds", "it lacks on_finish"),
    ("knows two reasons", KnowsReasons, "test_every_record", "reason = 'abort'"),
    ("one for all engines", lambda: ONE, "test_every_build_is_new", "observer of the first"),
    ("makes none", None, "test_it_builds", "made no observer"),
]


@pytest.mark.filterwarnings("ignore::dspark.DSparkWarning")
@pytest.mark.parametrize(("name", "make", "check", "words"), OBSERVERS, ids=[c[0] for c in OBSERVERS])
def test_an_observer(name: str, make: Any, check: str, words: str) -> None:
    class Plugin:
        DSPARK_API = 1

        @hookimpl
        def dspark_make_observers(self, config: Any) -> Any:
            return [] if make is None else [make()]

    made: Any = type("Suite", (ObserverSuite,), {"component": "watch", "plugins": {"watch": Plugin()}})()
    if not check:
        assert [str(o.violation) for o in run_checks(made) if o.violation] == []
        return
    with pytest.raises(ContractViolation) as caught:
        getattr(made, check)()
    assert words in str(caught.value)


def test_the_gallery_is_real(tmp_path: Path) -> None:
    """At least thirty in all, counted over both files, and in every kind."""
    from tests.gallery.test_gallery import BROKEN

    kinds = {b.kind for b in BROKEN}
    assert len(BROKEN) + sum(bool(c[2]) for c in (*CASES, *OBSERVERS)) >= 100
    assert len(kinds) == 9
