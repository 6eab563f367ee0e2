"""Names, conflicts, overrides, validation and building."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest

from dspark.capabilities import EstimatorCapabilities, SchedulerCapabilities, VerifierCapabilities
from dspark.config import EngineConfig
from dspark.errors import ConfigError, PluginError, TargetError, UnknownComponentError
from dspark.plugins import Catalog, Kind, PluginManager, PluginWarning, hookimpl, load_plugins
from dspark.plugins.catalog import CatalogBuilder
from dspark.plugins.records import PluginRecord
from dspark.protocols import BuildContext


@dataclass(frozen=True)
class Config:
    value: int = 1

    def __post_init__(self) -> None:
        if self.value == 13:
            raise ValueError("13 is unlucky")


class Scheduler:
    capabilities = SchedulerCapabilities()

    def __init__(self, config: Any = None, context: Any = None) -> None:
        self.config, self.context = config, context

    def plan(self, batch: Any, cost: Any) -> None: ...

    def release(self, slot: int, generation: int) -> None: ...


class Offers:
    """A plugin that offers what it is given, as (hook, arguments)."""

    DSPARK_API = 1

    def __init__(self, *offers: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        self.offers = offers

    @hookimpl
    def dspark_register_schedulers(self, register: Any) -> None:
        self.register = register
        for args, kwargs in self.offers:
            register(*args, **({"config": Config, "capabilities": SchedulerCapabilities()} | kwargs))


def offer(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


def catalog_of(*offers: Any) -> Catalog:
    manager = PluginManager(discover=False, environ={})
    manager.register(Offers(*offers), "app", version="0.3")
    return manager.load()


def others(manager: PluginManager) -> list[PluginRecord]:
    """Records of what a test installed; the environment may hold packages of this repository too."""
    return [r for r in manager.records if r.distribution not in ("dspark", "dspark-smollm2")]


def statuses(manager: PluginManager) -> dict[str, str]:
    return {r.distribution: r.status for r in others(manager)}


# --- conflicts and overrides -----------------------------------------------------------------------------------------


@pytest.fixture
def duel(site: Any) -> Any:
    """Two distributions that offer the scheduler ``quick``."""
    site.scheduler("acme-a", version="1.1")
    site.scheduler("acme-b", version="2.2")
    return site


def test_conflict_names_both_and_harms_nobody_else(duel: Any) -> None:
    with pytest.warns(PluginWarning, match=r"'quick' is offered by acme-a 1\.1 and acme-b 2\.2") as caught:
        manager = load_plugins(EngineConfig())
    assert len(caught) == 1
    assert statuses(manager) == {"acme-a": "conflict", "acme-b": "conflict"}
    assert all("acme-a 1.1 and acme-b 2.2" in r.error for r in others(manager))
    assert manager.catalog.resolve("scheduler", "causal").dist == "dspark"
    with pytest.raises(PluginError, match=r"acme-a 1\.1 and acme-b 2\.2; name one by its distribution"):
        manager.catalog.build("scheduler", "quick")


@pytest.mark.filterwarnings("ignore::dspark.plugins.PluginWarning")
def test_full_name_always_works(duel: Any) -> None:
    catalog = load_plugins().catalog
    for dist, version in (("acme-a", "1.1"), ("acme-b", "2.2"), ("Acme_B", "2.2")):
        assert catalog.resolve("scheduler", f"{dist}/quick").version == version
    assert catalog.build("scheduler", "acme-a/quick").module.startswith("acme_a")
    assert catalog.build("scheduler", "acme-b/quick").module.startswith("acme_b")


def test_override_is_the_users(duel: Any, recwarn: pytest.WarningsRecorder) -> None:
    catalog = load_plugins(EngineConfig(overrides={"quick": "acme-b/quick"})).catalog
    assert catalog.resolve("scheduler", "quick").dist == "acme-b"
    assert [w for w in recwarn if issubclass(w.category, PluginWarning)] == []  # settled, so nothing to warn of


@pytest.mark.filterwarnings("ignore::dspark.plugins.PluginWarning")
def test_builtin_names_are_reserved(site: Any) -> None:
    site.scheduler("acme-c", "causal", aliases=("fixed", "own"))
    manager = load_plugins()
    assert statuses(manager) == {"acme-c": "conflict"}
    assert "'causal' is a reserved built-in name, offered by dspark" in others(manager)[-1].error
    assert "'fixed' is a reserved built-in name" in others(manager)[-1].error
    assert manager.records[0].status == "ok"
    for name in ("causal", "fixed", "dspark/causal"):
        assert manager.catalog.resolve("scheduler", name).dist == "dspark"
    for name in ("acme-c/causal", "acme-c/fixed", "own"):
        assert manager.catalog.resolve("scheduler", name).dist == "acme-c"
    overridden = load_plugins(EngineConfig(overrides={"causal": "acme-c/causal"})).catalog
    assert overridden.resolve("scheduler", "causal").dist == "acme-c"
    assert overridden.resolve("scheduler", "dspark/causal").dist == "dspark"


@pytest.mark.filterwarnings("ignore::dspark.plugins.PluginWarning")
def test_alias_against_name_is_a_conflict(site: Any) -> None:
    site.scheduler("acme-a", "quick")
    site.scheduler("acme-b", "swift", aliases=("quick",))
    manager = load_plugins()
    assert statuses(manager) == {"acme-a": "conflict", "acme-b": "conflict"}
    with pytest.raises(PluginError, match=r"acme-a 1\.0 and acme-b 1\.0"):
        manager.catalog.resolve("scheduler", "quick")
    assert manager.catalog.resolve("scheduler", "swift").dist == "acme-b"


def test_one_name_in_two_kinds_is_no_conflict(site: Any) -> None:
    site.scheduler("acme-a", "online")  # a built-in estimator has that name
    manager = load_plugins()
    assert statuses(manager) == {"acme-a": "ok"}
    assert manager.catalog.resolve("scheduler", "online").dist == "acme-a"
    overridden = load_plugins(EngineConfig(overrides={"online": "acme-a/online"})).catalog
    assert overridden.resolve("estimator", "online").dist == "dspark"  # the override has nothing of that kind


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"quick": "acme-a"}, "expected name -> 'dist/name'"),
        ({"acme-a/quick": "acme-a/quick"}, "expected name -> 'dist/name'"),
        ({"quick": "acme-a/quik"}, "nothing is registered as 'acme-a/quik'; did you mean 'acme-a/quick'"),
    ],
)
def test_bad_override(site: Any, overrides: dict[str, str], message: str) -> None:
    site.scheduler("acme-a")
    with pytest.raises(ConfigError, match=message):
        load_plugins(EngineConfig(overrides=overrides))


# --- names -----------------------------------------------------------------------------------------------------------


def test_aliases() -> None:
    catalog = catalog_of(offer("quick", Scheduler, aliases=("fast", "q")))
    entry = catalog.resolve("scheduler", "quick")
    for name in ("fast", "q", "app/fast", "app/quick"):
        assert catalog.resolve("scheduler", name) is entry
    assert entry.aliases == ("fast", "q")


def test_unknown_names_come_with_the_nearest() -> None:
    catalog = catalog_of(offer("quick", Scheduler))
    with pytest.raises(UnknownComponentError, match="no scheduler 'quikc'; did you mean 'quick'") as caught:
        catalog.resolve("scheduler", "quikc")
    assert "known: causal" in str(caught.value)
    with pytest.raises(UnknownComponentError, match="did you mean 'app/quick'"):
        catalog.resolve("scheduler", "app/quikc")
    with pytest.raises(UnknownComponentError, match="no kernel 'x': nothing of that kind is registered"):
        CatalogBuilder().freeze().resolve("kernel", "x")
    with pytest.raises(PluginError, match="unknown kind 'schedulers'; did you mean 'scheduler'"):
        catalog.resolve("schedulers", "quick")


# --- validation of register's arguments ------------------------------------------------------------------------------


class NoDataclass: ...


BAD = [
    (offer("Quick", Scheduler), "'Quick' is no name"),
    (offer("a/b", Scheduler), "'a/b' is no name"),
    (offer("", Scheduler), "'' is no name"),
    (offer(3, Scheduler), "3 is no name"),
    (offer("auto", Scheduler), "'auto' has a meaning of its own"),
    (offer("quick", Scheduler, aliases=("Fast",)), "'Fast' is no name"),
    (offer("quick", Scheduler, aliases="fast"), "aliases must be a sequence"),
    (offer("quick", 3), "factory must be callable"),
    (offer("quick", "no reference"), "factory must be callable or 'module:function'"),
    (offer("quick", Scheduler, config=NoDataclass), "config must be a dataclass"),
    (offer("quick", Scheduler, config=Config()), "config must be a dataclass"),
    (offer("quick", Scheduler, config="nowhere"), "config must be a dataclass"),
    (offer("quick", Scheduler, capabilities=EstimatorCapabilities()), "must be SchedulerCapabilities, got Estimator"),
    (offer("quick", Scheduler, capabilities=None), "must be SchedulerCapabilities, got NoneType"),
    (offer("quick", Scheduler, colour="red"), "unexpected keyword argument 'colour'"),
]


@pytest.mark.parametrize(("bad", "message"), BAD, ids=[m for _, m in BAD])
def test_bad_registration_is_refused_whole(bad: Any, message: str) -> None:
    with pytest.raises(PluginError, match="failed in dspark_register_schedulers") as caught:
        catalog_of(offer("good", Scheduler), bad)
    assert message in str(caught.value)


def test_same_name_twice_in_one_distribution() -> None:
    with pytest.raises(PluginError, match=r"scheduler 'fast': app 0\.3 registers it twice"):
        catalog_of(offer("quick", Scheduler, aliases=("fast",)), offer("fast", Scheduler))


# --- immutability ----------------------------------------------------------------------------------------------------


def test_catalog_is_immutable() -> None:
    manager = PluginManager(discover=False, environ={})
    plugin = Offers(offer("quick", Scheduler))
    manager.register(plugin, "app")
    catalog = manager.load()
    entry = catalog.resolve("scheduler", "quick")
    with pytest.raises(PluginError, match="the catalog is frozen"):
        plugin.register("late", Scheduler, config=None, capabilities=SchedulerCapabilities())
    with pytest.raises(dataclasses.FrozenInstanceError):
        catalog.registrations = ()  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        entry.name = "other"  # type: ignore[misc]
    for table in (catalog._by_key, catalog._by_name, catalog.overrides):
        with pytest.raises(TypeError, match="does not support item"):
            table["x"] = entry  # type: ignore[index]
    assert "late" not in catalog.names("scheduler")
    assert isinstance(catalog.registrations, tuple)


def test_override_mapping_is_copied() -> None:
    overrides = {"causal": "dspark/fixed"}
    manager = PluginManager(discover=False, environ={})
    catalog = manager.load(EngineConfig(overrides=overrides))
    overrides["causal"] = "dspark/off"
    assert catalog.resolve("scheduler", "causal").name == "fixed"


# --- building --------------------------------------------------------------------------------------------------------


def make_lazy() -> type[Config]:
    return Config


@pytest.mark.parametrize("config", [Config, make_lazy, f"{__name__}:Config"], ids=["class", "function", "reference"])
def test_config_class_eager_and_lazy(config: Any) -> None:
    catalog = catalog_of(offer("quick", f"{__name__}:Scheduler", config=config))
    assert catalog.build("scheduler", "quick", {"value": 4}).config.value == 4
    with pytest.raises(ConfigError, match="scheduler 'app/quick': unknown setting 'valeu'; did you mean 'value'"):
        catalog.build("scheduler", "quick", {"valeu": 4})


def test_settings_that_the_config_refuses() -> None:
    catalog = catalog_of(offer("quick", Scheduler), offer("bare", Scheduler, config=None))
    with pytest.raises(ConfigError, match="scheduler 'app/quick': 13 is unlucky"):
        catalog.build("scheduler", "quick", {"value": 13})
    with pytest.raises(ConfigError, match="scheduler 'app/bare': takes no settings, got 'value'"):
        catalog.build("scheduler", "bare", {"value": 1})
    assert catalog.build("scheduler", "bare").config is None


def test_references_to_nothing_are_plugin_errors() -> None:
    catalog = catalog_of(
        offer("a", "no_such_module:build"),
        offer("b", Scheduler, config="json:loads"),
        offer("c", "json:__name__"),
        offer("d", Scheduler, config=lambda: NoDataclass),
    )
    for name, message in (
        ("a", "can't be built: ModuleNotFoundError"),
        ("b", "config 'json:loads' is not a dataclass"),
        ("c", "factory 'json:__name__' is not callable"),
        ("d", "is not a dataclass"),
    ):
        with pytest.raises(PluginError, match=rf"scheduler 'app/{name}' \(app 0\.3\)") as caught:
            catalog.build("scheduler", name)
        assert message in str(caught.value)


def raises(error: Exception) -> Any:
    def factory(config: Any, context: Any) -> Any:
        raise error

    return factory


def test_factory_that_raises_is_wrapped_and_named() -> None:
    catalog = catalog_of(offer("bad", raises(KeyError("w1"))), offer("own", raises(TargetError("too small"))))
    with pytest.raises(
        PluginError, match=r"scheduler 'app/bad' \(app 0\.3\) can't be built: KeyError: 'w1'"
    ) as wrapped:
        catalog.build("scheduler", "bad")
    assert isinstance(wrapped.value.__cause__, KeyError)
    with pytest.raises(TargetError, match="too small") as passed:
        catalog.build("scheduler", "own")
    assert str(passed.value) == "too small"
    assert passed.value.__notes__ == ["while building scheduler 'app/own' (app 0.3)"]


def test_result_must_keep_the_protocol() -> None:
    class Half:
        capabilities = SchedulerCapabilities()
        release = 3

        def plan(self) -> None: ...

    class WrongCapabilities(Scheduler):
        capabilities = EstimatorCapabilities()  # type: ignore[assignment]

    catalog = catalog_of(
        offer("nothing", lambda config, context: None),
        offer("half", lambda config, context: Half()),
        offer("wrong", lambda config, context: WrongCapabilities()),
    )
    for name, message in (
        ("nothing", "None is not a VerifyScheduler: it lacks capabilities, plan, release"),
        ("half", "Half is not a VerifyScheduler: not callable: release"),
        ("wrong", "capabilities must be SchedulerCapabilities, got EstimatorCapabilities"),
    ):
        with pytest.raises(PluginError, match=message):
            catalog.build("scheduler", name)


def test_component_may_not_be_less_safe_than_it_was_registered() -> None:
    class Retrospective(Scheduler):
        capabilities = SchedulerCapabilities(anticipates=True)

    honest = {"capabilities": SchedulerCapabilities(anticipates=True)}
    catalog = catalog_of(
        offer("sly", Retrospective), offer("honest", Retrospective, **honest), offer("shy", Scheduler, **honest)
    )
    with pytest.raises(PluginError, match=r"app/sly.* it anticipates, but was registered as if it did not"):
        catalog.build("scheduler", "sly")
    assert catalog.build("scheduler", "honest").capabilities.anticipates
    assert not catalog.build("scheduler", "shy").capabilities.anticipates


def test_verifier_may_not_be_less_exact_than_it_was_registered() -> None:
    class Narrow:
        capabilities = VerifierCapabilities()

        def verify(self, batch: Any) -> None: ...

    class Plugin:
        DSPARK_API = 1

        @hookimpl
        def dspark_register_verifiers(self, register: Any) -> None:
            build = lambda config, context: Narrow()  # noqa: E731
            register("any", build, config=None, capabilities=VerifierCapabilities(exact_under="any"))
            register("some", build, config=None, capabilities=VerifierCapabilities())

    catalog = load_plugins(extra_plugins={"app": Plugin()}).catalog
    with pytest.raises(PluginError, match="exact under non-anticipating schedules alone"):
        catalog.build("verifier", "app/any")
    assert catalog.build("verifier", "app/some")


def test_context_resolves_other_components() -> None:
    def outer(config: Config, context: BuildContext) -> Scheduler:
        return Scheduler(context.resolve("scheduler", "app/inner", {"value": config.value + 1}), context)

    catalog = catalog_of(offer("outer", outer), offer("inner", Scheduler))
    built = catalog.build("scheduler", "outer", {"value": 2}, BuildContext(gamma=3))
    assert built.config.config.value == 3
    assert built.config.context.gamma == 3
    own = BuildContext(resolve=lambda *args: "given")
    assert catalog.build("scheduler", "outer", None, own).config == "given"


def test_of_lists_a_kind() -> None:
    catalog = catalog_of(offer("quick", Scheduler))
    assert [r.key for r in catalog.of("scheduler") if r.dist == "app"] == ["app/quick"]
    assert all(r.kind is Kind.SCHEDULER for r in catalog.of(Kind.SCHEDULER))
