"""Every hook is called through a real entry point, and has an effect. One test a hook, named after it."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from dspark.config import EngineConfig
from dspark.errors import CheckpointError, PluginError
from dspark.plugins import PluginManager, PluginWarning, hookspecs, load_plugins
from dspark.plugins.discovery import HOOKS, check_plugin
from dspark.plugins.kinds import KINDS, Kind
from dspark.protocols import BuildContext

DOCS = Path(__file__).parents[2] / "docs" / "hooks.md"


def offered(site: Any, hook: str, kind: str, capabilities: str, body: str) -> Any:
    """Install a plugin that registers ``Part`` under ``kind``; resolve and build it with value = 5."""
    site.add(
        "acme-parts",
        f"""
@dataclass(frozen=True)
class Config:
    value: int = 1

class Part:
    capabilities = {capabilities}
    def __init__(self, config, context):
        self.value, self.context = config.value, context
{body}

@hookimpl
def {hook}(register):
    register("part", Part, config=Config, capabilities={capabilities}, aliases=("piece",))
""",
        version="2.3",
    )
    catalog = load_plugins().catalog
    entry = catalog.resolve(kind, "part")
    assert (entry.kind, entry.key, entry.version) == (Kind(kind), "acme-parts/part", "2.3")
    assert catalog.resolve(kind, "piece") is entry
    others = [k for k in Kind if k != kind]
    assert not any("acme-parts/part" in catalog.names(k) for k in others)
    context = BuildContext(vocab_size=11)
    part = catalog.build(kind, "acme-parts/part", {"value": 5}, context)
    assert part.value == 5
    assert part.context.vocab_size == 11
    return part


def methods(*names: str) -> str:
    return "\n".join(f"    def {n}(self, *args): return {n!r}" for n in names)


def test_dspark_register_targets(site: Any) -> None:
    body = """
    name, vocab_size, max_len, eos_token_ids, num_layers, device, dtype = "t", 8, 64, (0,), 1, "cpu", "float32"
""" + methods("allocate", "forward", "executed_tokens", "fingerprint")
    assert offered(site, "dspark_register_targets", "target", "TargetCapabilities()", body).forward() == "forward"


def test_dspark_register_drafters(site: Any) -> None:
    body = "    max_gamma, default_gamma, tap_layers = None, 4, ()\n" + methods("propose", "commit", "release")
    assert offered(site, "dspark_register_drafters", "drafter", "DrafterCapabilities()", body).default_gamma == 4


def test_dspark_register_sequential_heads(site: Any) -> None:
    body = methods("start", "step", "block")
    head = offered(site, "dspark_register_sequential_heads", "sequential_head", "HeadCapabilities()", body)
    assert head.block() == "block"


def test_dspark_register_confidence_estimators(site: Any) -> None:
    body = methods("estimate", "observe", "release")
    part = offered(site, "dspark_register_confidence_estimators", "estimator", "EstimatorCapabilities()", body)
    assert part.estimate() == "estimate"


def test_dspark_register_calibrators(site: Any) -> None:
    body = methods("calibrate")
    part = offered(site, "dspark_register_calibrators", "calibrator", "CalibratorCapabilities()", body)
    assert part.calibrate() == "calibrate"


def test_dspark_register_schedulers(site: Any) -> None:
    body = methods("plan", "release")
    part = offered(site, "dspark_register_schedulers", "scheduler", "SchedulerCapabilities()", body)
    assert part.plan() == "plan"


def test_dspark_register_gamma_policies(site: Any) -> None:
    body = methods("choose", "observe", "release")
    part = offered(site, "dspark_register_gamma_policies", "gamma_policy", "GammaCapabilities()", body)
    assert part.choose() == "choose"


def test_dspark_register_verifiers(site: Any) -> None:
    part = offered(site, "dspark_register_verifiers", "verifier", "VerifierCapabilities()", methods("verify"))
    assert part.verify() == "verify"


def test_dspark_register_kernels(site: Any) -> None:
    body = "    def __call__(self, x): return x + self.value"
    assert offered(site, "dspark_register_kernels", "kernel", "KernelCapabilities()", body)(1) == 6


def test_dspark_register_presets(site: Any) -> None:
    site.add(
        "acme-presets",
        """
def build(config, context):
    return {"drafter": "ngram", "gamma": 3}

@hookimpl
def dspark_register_presets(register):
    register("small", build, config=None, capabilities=PresetCapabilities(target="a small model"))
""",
    )
    catalog = load_plugins().catalog
    assert catalog.resolve("preset", "small").capabilities.target == "a small model"
    assert EngineConfig(**catalog.build("preset", "small")).gamma == 3


def test_dspark_register_commands(site: Any) -> None:
    site.add(
        "acme-commands",
        """
import typer

@hookimpl
def dspark_register_commands(cli):
    @cli.command()
    def say_hello(name: str):
        typer.echo(f"hello {name}")

    group = typer.Typer()
    group.command("inner")(lambda: typer.echo("in a group"))
    group.command("other")(lambda: typer.echo("other"))
    cli.add_typer(group, name="acme")
""",
    )
    cli = typer.Typer()
    cli.command("generate")(lambda: typer.echo("ours"))
    load_plugins().register_commands(cli)
    run = CliRunner().invoke
    assert run(cli, ["say-hello", "you"]).output == "hello you\n"
    assert run(cli, ["acme", "inner"]).output == "in a group\n"
    assert run(cli, ["generate"]).output == "ours\n"


@pytest.mark.parametrize(
    "body",
    [
        "cli.command('extra')(lambda: None); cli.command('generate')(lambda: print('theirs'))",
        "cli.command('extra')(lambda: None); cli.add_typer(typer.Typer(), name='generate')",
        "cli.command('extra')(lambda: None); 1 / 0",
        "cli.command('extra')(lambda: None); cli.callback()(lambda: print('hijacked'))",
        "cli.command('extra')(lambda: None); cli.registered_commands.pop(0)",
    ],
    ids=["taken", "taken by a group", "raises", "replaces the callback", "removes"],
)
def test_commands_never_replace_what_is_there(site: Any, body: str) -> None:
    site.add("acme-thief", f"import typer\n@hookimpl\ndef dspark_register_commands(cli):\n    {body}\n")
    cli = typer.Typer()
    cli.command("generate")(lambda: typer.echo("ours"))
    cli.command("plugins")(lambda: typer.echo("list"))
    manager = load_plugins()
    with pytest.warns(PluginWarning, match=r"acme-thief 1\.0 failed in dspark_register_commands"):
        manager.register_commands(cli)
    assert CliRunner().invoke(cli, ["generate"]).output == "ours\n"
    assert [c.name for c in cli.registered_commands] == ["generate", "plugins"]
    assert cli.registered_groups == []
    assert status(manager, "acme-thief") == "error"


def status(manager: PluginManager, dist: str) -> str:
    return next(r.status for r in manager.records if r.distribution == dist)


def test_dspark_register_routes(site: Any) -> None:
    source = "@hookimpl\ndef dspark_register_routes(app):\n    app.routes['/acme'] = lambda: 'pong'\n"
    site.add("acme-routes", source)
    site.add("zz-broken-routes", source + "    app.no_such_thing()\n")
    app = SimpleNamespace(routes={})
    manager = load_plugins()
    with pytest.warns(PluginWarning, match=r"zz-broken-routes 1\.0 failed in dspark_register_routes: AttributeError"):
        manager.register_routes(app)
    assert app.routes["/acme"]() == "pong"
    assert (status(manager, "acme-routes"), status(manager, "zz-broken-routes")) == ("ok", "error")


def checkpoint_plugin(suffix: str, answer: str) -> str:
    return f"""
calls = []

@hookimpl
def dspark_load_checkpoint(source, config):
    calls.append(source)
    if source.endswith({suffix!r}):
        {answer}
"""


def test_dspark_load_checkpoint(site: Any) -> None:
    a = site.add("acme-a", checkpoint_plugin(".a", "return ('a', source, config)"))
    b = site.add("acme-b", checkpoint_plugin((".a", ".b"), "return ('b', source, config)"))
    manager, config = load_plugins(), EngineConfig()
    assert manager.load_checkpoint("x.b", config) == ("b", "x.b", config)
    calls = {m: __import__(m).calls for m in (a, b)}
    assert calls == {a: [], b: ["x.b"]}  # the first answer ends the search: acme-b loads last and is asked first
    assert manager.load_checkpoint("x.a", config)[0] == "b"
    assert manager.load_checkpoint("x.none", None) is None
    assert calls[a] == ["x.none"]


def test_checkpoint_that_a_plugin_refuses_ends_the_search(site: Any) -> None:
    site.add("acme-a", checkpoint_plugin(".a", "return 'never'"))
    refusal = "from dspark.errors import CheckpointError; raise CheckpointError('no tensor w1')"
    site.add("acme-b", checkpoint_plugin(".a", refusal))
    with pytest.raises(CheckpointError, match="no tensor w1") as caught:
        load_plugins().load_checkpoint("x.a")
    assert "acme-b 1.0" in caught.value.__notes__[0]


def test_checkpoint_fault_of_one_plugin_leaves_the_next_its_turn(site: Any) -> None:
    site.add("acme-a", checkpoint_plugin(".a", "return 'a'"))
    site.add("acme-b", checkpoint_plugin(".a", "raise KeyError('w1')"))
    manager = load_plugins()
    with pytest.warns(PluginWarning, match=r"acme-b 1\.0 failed in dspark_load_checkpoint: KeyError"):
        assert manager.load_checkpoint("x.a") == "a"


OBSERVER = """
class Observer:
    def __init__(self, gamma): self.seen = [gamma]
    def on_round(self, record): self.seen.append(record)
    def on_finish(self, request, reason): ...
"""


def test_dspark_make_observers(site: Any) -> None:
    good = "@hookimpl\ndef dspark_make_observers(config):\n    return [Observer(config.gamma), Observer(0)]\n"
    site.add("acme-watch", OBSERVER + good, version="4.1")
    site.add("acme-nobody", "@hookimpl\ndef dspark_make_observers(config):\n    return None\n")
    manager = load_plugins()
    made = manager.make_observers(EngineConfig(gamma=3))
    assert [source for source, _ in made] == ["acme-watch 4.1", "acme-watch 4.1"]
    made[0][1].on_round("record")  # type: ignore[arg-type]
    assert [o.seen for _, o in made] == [[3, "record"], [0]]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("answer", "message"),
    [("object()", "expected a list"), ("[object()]", "it lacks on_round, on_finish"), ("1 / 0", "ZeroDivisionError")],
)
def test_observers_that_are_none_are_left_out(site: Any, answer: str, message: str) -> None:
    site.add("acme-bad", f"@hookimpl\ndef dspark_make_observers(config):\n    return {answer}\n")
    site.add("acme-good", OBSERVER + "@hookimpl\ndef dspark_make_observers(config):\n    return [Observer(1)]\n")
    manager = load_plugins()
    with pytest.warns(PluginWarning, match=message):
        assert len(manager.make_observers(EngineConfig())) == 1
    named = load_plugins(EngineConfig(plugins=("acme-bad",)))
    with pytest.raises(PluginError, match=r"acme-bad 1\.0 failed in dspark_make_observers"):
        named.make_observers(EngineConfig())


LIFECYCLE = "@hookimpl\ndef {hook}(engine):\n    {body}\n"


def test_dspark_engine_started(site: Any) -> None:
    hook = "dspark_engine_started"
    site.add("acme-good", LIFECYCLE.format(hook=hook, body="engine.told.append('good')"))
    site.add("acme-late", LIFECYCLE.format(hook=hook, body="engine.told.append('late'); 1 / 0"))
    engine = SimpleNamespace(told=[])
    with pytest.warns(PluginWarning, match=r"acme-late 1\.0 failed in dspark_engine_started: ZeroDivisionError"):
        load_plugins().engine_started(engine)
    assert engine.told == ["late", "good"]
    with pytest.raises(PluginError, match=r"acme-late 1\.0 failed in dspark_engine_started") as caught:
        load_plugins(EngineConfig(plugins=("acme-late",))).engine_started(engine)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_dspark_engine_stopped(site: Any) -> None:
    hook = "dspark_engine_stopped"
    site.add("acme-good", LIFECYCLE.format(hook=hook, body="engine.told.append('good')"))
    site.add("acme-late", LIFECYCLE.format(hook=hook, body="raise SystemExit(3)"))
    engine = SimpleNamespace(told=[])
    manager = load_plugins(EngineConfig(plugins=("acme-late", "acme-good")))
    with pytest.warns(PluginWarning, match=r"acme-late 1\.0 failed in dspark_engine_stopped: SystemExit"):
        manager.engine_stopped(engine)  # even a plugin that is named can't keep an engine from stopping
    assert engine.told == ["good"]


# --- the contract itself ---------------------------------------------------------------------------------------------


def spec(hook: str) -> Any:
    return getattr(hookspecs, hook)


def test_every_hook_has_a_test() -> None:
    assert len(HOOKS) == 16
    folder = Path(__file__).parent
    text = "\n".join(p.read_text(encoding="utf-8") for p in folder.glob("test_*.py"))
    assert [h for h in HOOKS if not re.search(rf"^def test_{h}\(", text, re.MULTILINE)] == []


def test_every_hook_has_a_docstring_that_states_its_contract() -> None:
    for hook in HOOKS:
        text = inspect.getdoc(spec(hook)) or ""
        assert "Called " in text, hook
        assert "Returns:" in text, hook
        arguments = text.partition("Args:")[2]
        assert all(f"    {name}: " in arguments for name in inspect.signature(spec(hook)).parameters), hook


def test_every_kind_has_its_hook() -> None:
    assert set(KINDS) == set(Kind)
    assert {s.hook for s in KINDS.values()} == {
        h for h in HOOKS if list(inspect.signature(spec(h)).parameters) == ["register"]
    }


def test_every_hook_is_documented() -> None:
    sections = dict(re.findall(r"^### `(dspark_\w+)\(.*?\n(.*?)(?=^##|\Z)", DOCS.read_text("utf-8"), re.M | re.S))
    headings = re.findall(r"^### `(dspark_\w+)\((.*)\)`$", DOCS.read_text("utf-8"), re.MULTILINE)
    expected = [(h, ", ".join(inspect.signature(spec(h)).parameters)) for h in HOOKS]
    assert headings == expected  # the same hooks and arguments, in the order of hookspecs.py
    for hook, text in sections.items():
        for word in ("**Called**", "**Returns**", "```python"):
            assert word in text, f"{hook}: {word} is missing"
        for name in inspect.signature(spec(hook)).parameters:
            assert f"- `{name}`" in text, f"{hook}: argument {name} is not described"


def test_examples_of_the_documentation_run() -> None:
    module = ModuleType("documented")
    for block in re.findall(r"^```python\n(.*?)^```", DOCS.read_text("utf-8"), re.M | re.S):
        exec(compile(block, str(DOCS), "exec", dont_inherit=True), module.__dict__)
    assert check_plugin(module) == HOOKS
    manager = PluginManager(discover=False, environ={})
    manager.register(module, "documented")
    catalog = manager.load()
    for kind in Kind:
        assert any(r.dist == "documented" for r in catalog.of(kind)), kind
    cli, app = typer.Typer(), SimpleNamespace(get=lambda path: lambda function: function)
    manager.register_commands(cli)
    manager.register_routes(app)
    assert len(cli.registered_commands) == 1
    assert manager.load_checkpoint("/no/such/folder") is None
    engine = SimpleNamespace(stats="all of it")
    ((_, observer),) = manager.make_observers(EngineConfig())
    observer.on_round(SimpleNamespace(committed=(), executed_tokens=3))  # type: ignore[arg-type]
    manager.engine_started(engine)
    manager.engine_stopped(engine)
    assert [r.error for r in manager.records] == ["", ""]
    assert catalog.build("calibrator", "documented/damped", {"factor": 0.5}).calibrate(0.8, None) == 0.4
