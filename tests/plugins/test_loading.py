"""One plugin's faults stay its own: import, API, misspelt hooks, exceptions, allow-lists."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dspark.capabilities import SchedulerCapabilities
from dspark.config import EngineConfig
from dspark.errors import ConfigError, PluginError
from dspark.plugins import PluginManager, PluginRecord, PluginWarning, hookimpl, load_plugins


def record(manager: PluginManager, dist: str) -> PluginRecord:
    (found,) = [r for r in manager.records if r.distribution == dist]
    return found


def broken(site: Any, dist: str, source: str, message: str, **add: Any) -> PluginRecord:
    """Install a faulty plugin beside a good one: one warning, one error record, and the good one works."""
    site.scheduler("acme-good")
    site.add(dist, source, version="3.2", **add)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        manager = load_plugins(EngineConfig())
    (warning,) = [w for w in caught if issubclass(w.category, PluginWarning)]
    assert f"of distribution {dist} 3.2" in str(warning.message)
    assert message in str(warning.message)
    found = record(manager, dist)
    assert (found.status, found.components) == ("error", ())
    assert message in found.error
    assert manager.catalog.build("scheduler", "quick").value == 1
    assert record(manager, "acme-good").status == "ok"
    with pytest.raises(PluginError, match=f"distribution {dist} 3.2") as raised:
        load_plugins(EngineConfig(plugins=(dist,)))
    assert message in str(raised.value)
    assert raised.value.__cause__ is not None
    return found


def test_import_error(site: Any) -> None:
    broken(site, "acme-bad", "import no_such_package\n", "can't be imported: ModuleNotFoundError: No module named")


def test_syntax_error(site: Any) -> None:
    broken(site, "acme-bad", "def broken(:\n", "can't be imported: SyntaxError")


def test_exit_on_import(site: Any) -> None:
    broken(site, "acme-bad", "raise SystemExit('bye')\n", "can't be imported: SystemExit: bye")


def test_missing_object(site: Any) -> None:
    points = "[dspark]\nacme-bad = json:no_such_object\n"
    broken(site, "acme-bad", "", "can't be imported: AttributeError", points=points)


def test_malformed_entry_points(site: Any) -> None:
    broken(site, "acme-bad", "", "entry_points.txt is malformed", points="[dspark]\nno equals sign\n")


def test_malformed_entry_points_of_others_are_none_of_our_business(site: Any) -> None:
    site.add("stranger", "", points="[other]\nno equals sign\n")
    site.scheduler("acme-good")
    assert load_plugins().catalog.resolve("scheduler", "quick").dist == "acme-good"


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ("", "does not declare DSPARK_API; write `DSPARK_API = 1`"),
        ("DSPARK_API = 2", "it declares DSPARK_API = 2, but this dspark has plugin API 1"),
        ("DSPARK_API = '1'", "it declares DSPARK_API = '1'"),
        ("DSPARK_API = True", "it declares DSPARK_API = True"),
    ],
)
def test_wrong_api_is_refused_before_registration(site: Any, declared: str, message: str) -> None:
    source = f"""
from dspark.plugins import hookimpl
{declared}
called = []

@hookimpl
def dspark_register_schedulers(register):
    called.append(register)
"""
    broken(site, "acme-old", source, message, header="")
    module = next(m for n, m in sys.modules.items() if n.startswith("acme_old"))
    assert module.called == []


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("@hookimpl\ndef dspark_register_drafter(register): ...\n", "did you mean 'dspark_register_drafters'?"),
        ("@hookimpl\ndef register_drafters(register): ...\n", "there is no hook 'register_drafters'"),
        ("def dspark_engine_start(engine): ...\n", "did you mean 'dspark_engine_started'?"),
        ("def dspark_engine_started(engine): ...\n", "is not marked with @hookimpl, so it would never be called"),
        ("@hookimpl(specname='dspark_nothing')\ndef f(engine): ...\n", "there is no hook 'dspark_nothing'"),
        ("@hookimpl\ndef dspark_engine_started(motor): ...\n", "Argument(s) {'motor'}"),
        ("@hookimpl(wrapper=True)\ndef dspark_engine_started(engine): yield\n", "is a hook wrapper"),
    ],
)
def test_misspelt_hook(site: Any, source: str, message: str) -> None:
    broken(site, "acme-typo", source, message)


def test_a_later_hook_can_be_optional(site: Any, scheduler_source: str) -> None:
    site.add("acme-new", "@hookimpl(optionalhook=True)\ndef dspark_of_the_future(engine): ...\n")
    assert record(load_plugins(), "acme-new").status == "ok"


def test_exception_in_register_drops_all_registrations(site: Any) -> None:
    site.broken("acme-broken", version="7.0")
    with pytest.warns(PluginWarning, match=r"acme-broken 7\.0 failed in dspark_register_verifiers: ZeroDivisionError"):
        manager = load_plugins()
    assert not any(r.dist == "acme-broken" for r in manager.catalog.registrations)
    found = record(manager, "acme-broken")
    assert found.hooks == ("dspark_register_schedulers", "dspark_register_verifiers")
    assert (found.status, found.components) == ("error", ())


@pytest.mark.parametrize(
    "config",
    [
        EngineConfig(scheduler="acme-broken/broken-one"),
        EngineConfig(scheduler="Acme_Broken/broken-one"),
        EngineConfig(overrides={"causal": "acme-broken/broken-one"}),
        EngineConfig(plugins=("acme-broken",)),
    ],
    ids=["component", "other spelling", "override", "allow-list"],
)
def test_broken_plugin_that_the_config_names_fails_the_build(site: Any, config: EngineConfig) -> None:
    site.broken("acme-broken", version="7.0")
    with pytest.raises(PluginError) as caught:
        load_plugins(config)
    for part in ("acme-broken", "7.0", "dspark_register_verifiers", "ZeroDivisionError: boom"):
        assert part in str(caught.value)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_entry_points_name_is_not_its_distribution(site: Any) -> None:
    site.add("acme-broken", "1 / 0\n", entry="acme-good")
    site.scheduler("acme-good")
    with pytest.warns(PluginWarning, match="'acme-good' of distribution acme-broken"):
        catalog = load_plugins(EngineConfig(scheduler="acme-good/quick")).catalog
    assert catalog.resolve("scheduler", "acme-good/quick").dist == "acme-good"


@pytest.mark.parametrize("name", ["broken-one", "acme-broken/broken-one", "acme-broken/other"])
def test_component_of_a_broken_plugin_says_why_it_is_not_there(site: Any, name: str) -> None:
    site.broken("acme-broken", version="7.0")
    with pytest.warns(PluginWarning):
        catalog = load_plugins().catalog
    with pytest.raises(PluginError, match=r"acme-broken 7\.0 failed in dspark_register_verifiers") as caught:
        catalog.build("scheduler", name)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_two_entry_points_of_one_distribution_are_apart(site: Any, scheduler_source: str) -> None:
    module = site.add(
        "acme-two",
        scheduler_source
        + """
class One:
    DSPARK_API = 1
    @hookimpl
    def dspark_register_schedulers(self, register):
        register("one", build, config=Config, capabilities=SchedulerCapabilities())

class Again(One): ...

one, again = One(), Again()
""",
        points="[dspark]\n",
    )
    points = f"[dspark]\none = {module}:one\nsame = {module}:one\ntwice = {module}:again\nclass = {module}:One\n"
    next(site.folder.glob("acme_two-*/entry_points.txt")).write_text(points, encoding="utf-8")
    with pytest.warns(PluginWarning):
        manager = load_plugins()
    found = {r.name: r for r in manager.records if r.distribution == "acme-two"}
    assert {n: r.status for n, r in found.items()} == {"class": "error", "one": "ok", "same": "error", "twice": "error"}
    assert "is the class One; give an instance" in found["class"].error
    assert "already registered" in found["same"].error
    assert "scheduler 'one': acme-two 1.0 registers it twice" in found["twice"].error
    assert manager.catalog.resolve("scheduler", "one").key == "acme-two/one"


# --- which plugins load ----------------------------------------------------------------------------------------------


def imported(site: Any) -> set[str]:
    return {n for n, m in sys.modules.items() if str(getattr(m, "__file__", "")).startswith(str(site.folder))}


CHOICES = [
    ({}, None, (), {"a", "b"}),
    ({"DSPARK_PLUGINS": "acme-a"}, None, (), {"a"}),
    ({"DSPARK_PLUGINS": " Acme_A , acme.b"}, None, (), {"a", "b"}),
    ({"DSPARK_PLUGINS": ""}, None, (), set()),
    ({"DSPARK_DISABLE_PLUGINS": "acme-a"}, None, (), {"b"}),
    ({"DSPARK_DISABLE_PLUGINS": ""}, None, (), {"a", "b"}),
    ({}, ("acme-b",), (), {"b"}),
    ({}, (), (), set()),
    ({}, "acme-b, acme-a", (), {"a", "b"}),
    ({}, None, ("acme-b",), {"a"}),
    ({"DSPARK_PLUGINS": "acme-a,acme-b"}, ("acme-b",), (), {"b"}),
    ({"DSPARK_PLUGINS": "acme-a"}, ("acme-a",), ("acme-a",), set()),
]


@pytest.mark.parametrize(("environ", "allow", "disable", "expected"), CHOICES)
def test_allow_and_disable(
    site: Any, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], allow: Any, disable: Any, expected: set[str]
) -> None:
    modules = {"a": site.scheduler("acme-a", "quick-a"), "b": site.scheduler("acme-b", "quick-b")}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    manager = load_plugins(EngineConfig(plugins=allow, disable_plugins=disable))
    assert imported(site) == {modules[n] for n in expected}  # what may not load is not even imported
    for name in modules:
        found = record(manager, f"acme-{name}")
        assert found.status == ("ok" if name in expected else "disabled")
        assert bool(found.error) == (name not in expected)
        assert (f"quick-{name}" in manager.catalog.names("scheduler")) == (name in expected)
    assert manager.catalog.resolve("scheduler", "causal").dist == "dspark"


def test_entry_point_name_can_be_used_as_well(site: Any) -> None:
    site.add("acme-long-distribution-name", "", entry="short")
    assert record(load_plugins(EngineConfig(plugins=("short",))), "acme-long-distribution-name").status == "ok"
    disabled = load_plugins(EngineConfig(disable_plugins=("short",)))
    assert record(disabled, "acme-long-distribution-name").error == "disabled by disable_plugins"


def test_disabled_plugin_that_is_asked_for_says_so(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    site.scheduler("acme-a")
    monkeypatch.setenv("DSPARK_DISABLE_PLUGINS", "acme-a")
    catalog = load_plugins(EngineConfig(scheduler="acme-a/quick")).catalog
    with pytest.raises(PluginError, match=r"acme-a 1\.0: disabled by DSPARK_DISABLE_PLUGINS"):
        catalog.resolve("scheduler", "acme-a/quick")


def test_allowed_plugin_that_is_not_installed(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    site.scheduler("acme-fast")
    with pytest.raises(PluginError, match="'acme-fats' is not installed; did you mean 'acme-fast'"):
        load_plugins(EngineConfig(plugins=("acme-fats",)))
    monkeypatch.setenv("DSPARK_PLUGINS", "acme-fats")
    with pytest.warns(PluginWarning, match="DSPARK_PLUGINS: 'acme-fats' is not installed"):
        load_plugins()


def test_builtin_plugin_can_not_be_disabled(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="can't be disabled"):
        load_plugins(EngineConfig(disable_plugins=("dspark",)))
    monkeypatch.setenv("DSPARK_DISABLE_PLUGINS", "dspark")
    with pytest.raises(ConfigError, match="can't be disabled"):
        load_plugins()


def test_distribution_name_of_the_builtin_plugin_is_reserved(site: Any) -> None:
    module = site.scheduler("DSpark", version="9.9")
    with pytest.warns(PluginWarning, match="the distribution name 'dspark' is reserved"):
        manager = load_plugins()
    assert module not in sys.modules
    assert "quick" not in manager.catalog.names("scheduler")
    assert manager.catalog.resolve("scheduler", "dspark/causal").version != "9.9"


def test_shadowed_distribution_does_not_load(site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site.scheduler("acme-a", version="1.0")
    front = tmp_path / "front"
    front.mkdir()
    monkeypatch.syspath_prepend(str(front))
    type(site)(front).scheduler("acme-a", version="2.0")
    assert record(load_plugins(), "acme-a").version == "2.0"
    next(front.glob("*/entry_points.txt")).write_text("[other]\na = b\n", encoding="utf-8")
    assert not any(r.distribution == "acme-a" for r in load_plugins().records)


# --- plugins without an entry point ----------------------------------------------------------------------------------


class Embedded:
    """A plugin of an embedding program."""

    DSPARK_API = 1

    @hookimpl
    def dspark_register_schedulers(self, register: Any) -> None:
        register("mine", lambda config, context: Plain(), config=None, capabilities=SchedulerCapabilities())


class Plain:
    capabilities = SchedulerCapabilities()

    def plan(self, batch: Any, cost: Any) -> None: ...

    def release(self, slot: int, generation: int) -> None: ...


def test_programmatic_registration(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_PLUGINS", "")  # an allow-list is about what is installed
    manager = load_plugins(extra_plugins={"My_App": Embedded()})
    assert isinstance(manager.catalog.build("scheduler", "my-app/mine"), Plain)
    assert record(manager, "my-app").name == "My_App"
    disabled = load_plugins(EngineConfig(disable_plugins=("my-app",)), extra_plugins={"my-app": Embedded()})
    assert record(disabled, "my-app").status == "disabled"


def test_programmatic_registration_is_explicit_so_its_faults_are_errors() -> None:
    with pytest.raises(PluginError, match=r"'app' of distribution app 0 is refused: .*does not declare DSPARK_API"):
        load_plugins(extra_plugins={"app": SimpleNamespace()})


def test_manager_loads_once_and_refuses_late_plugins() -> None:
    manager = PluginManager(discover=False, environ={})
    with pytest.raises(PluginError, match="not loaded"):
        _ = manager.catalog
    manager.register(Embedded(), "app")
    for taken in ("app", "dspark"):
        with pytest.raises(PluginError, match="taken"):
            manager.register(Embedded(), taken)
    manager.load()
    with pytest.raises(PluginError, match="loads plugins once"):
        manager.load()
    with pytest.raises(PluginError, match="frozen"):
        manager.register(Embedded(), "late")


def test_programmatic_name_that_is_installed_as_well(site: Any) -> None:
    site.scheduler("acme-a")
    with pytest.raises(PluginError, match="installed as well"):
        load_plugins(extra_plugins={"acme-a": Embedded()})


def test_modules_may_be_plugins_without_any_hook() -> None:
    module = ModuleType("empty")
    module.DSPARK_API = 1  # type: ignore[attr-defined]
    assert record(load_plugins(extra_plugins={"empty": module}), "empty").hooks == ()
