"""The ``dspark`` command: what its help costs, and how it says what went wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from dspark import __version__
from dspark.cli import main as cli
from dspark.errors import (
    ComponentError,
    ConfigError,
    DSparkError,
    PluginError,
    RequestError,
    TargetError,
    UnknownComponentError,
)

HELP = """
import json, sys, time
from dspark.cli.main import main
try:
    main(["--help"])
except SystemExit as end:
    code = end.code
print(json.dumps({"code": code, "seconds": time.process_time(), "modules": sorted(sys.modules)}))
"""


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module in the place of ``dspark.cli.doctor``, for commands that a test defines."""
    module = ModuleType("dspark.cli.doctor")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of ``dspark ARGS``."""
    with pytest.raises(SystemExit) as end:
        cli.main(list(args))
    captured = capsys.readouterr()
    return int(end.value.code or 0), captured.out, captured.err


def report_help() -> tuple[str, dict[str, Any]]:
    """What ``dspark --help`` prints in a process of its own, and its exit code, processor time and modules."""
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, timeout=120, check=True)
    *shown, report = done.stdout.splitlines()
    return "\n".join(shown), json.loads(report)


def test_help_lists_all_commands_and_imports_nothing_heavy() -> None:
    shown, report = report_help()
    assert report["code"] == 0
    loaded = set(report["modules"])
    assert {"torch", "transformers", "triton", "dspark.api", "dspark.engine"} & loaded == set()
    assert {f"dspark.cli.{name}" for name in cli.COMMANDS} & loaded == set()
    for name in cli.COMMANDS:
        assert f" {name} " in shown


def test_help_takes_less_than_a_second() -> None:
    """Processor time, the interpreter's start included, so that busy neighbours do not count."""
    assert min(report_help()[1]["seconds"] for _ in range(3)) < 1.0


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_that_is_listed_loads(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, name, "--help")
    assert (code, err) == (0, "")
    assert f"dspark {name}" in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"dspark {__version__}\n", "")


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, err = run(capsys)
    assert cli.COMMANDS["generate"] in out + err


def test_arguments_reach_the_command(command: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    def doctor(target: str, gamma: int = 7) -> None:
        typer.echo(f"{target} {gamma + 1}")

    command.doctor = doctor  # type: ignore[attr-defined]
    assert run(capsys, "doctor", "some-model", "--gamma", "3") == (0, "some-model 4\n", "")


def test_an_explained_error_is_one_line(command: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    def doctor() -> None:
        raise ConfigError("gamma: expected an integer,\n  got 'x'")

    command.doctor = doctor  # type: ignore[attr-defined]
    assert run(capsys, "doctor") == (2, "", "dspark: gamma: expected an integer, got 'x'\n")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (UnknownComponentError("x"), 2),
        (PluginError("x"), 2),
        (DSparkError("x"), 1),
        (TargetError("x"), 1),
        (RequestError("x"), 1),
        (ComponentError("x"), 1),
    ],
    ids=lambda value: getattr(type(value), "__name__", ""),
)
def test_wrong_configuration_is_2_and_what_fails_later_is_1(
    command: ModuleType, capsys: pytest.CaptureFixture[str], error: DSparkError, code: int
) -> None:
    def doctor() -> None:
        raise error

    command.doctor = doctor  # type: ignore[attr-defined]
    assert run(capsys, "doctor") == (code, "", "dspark: x\n")


def test_debug_shows_the_traceback(command: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    def doctor() -> None:
        raise ConfigError("gamma")

    command.doctor = doctor  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="gamma"):
        cli.main(["--debug", "doctor"])


def test_an_unexplained_error_is_not_hidden(command: ModuleType) -> None:
    def doctor() -> None:
        raise ZeroDivisionError

    command.doctor = doctor  # type: ignore[attr-defined]
    with pytest.raises(ZeroDivisionError):
        cli.main(["doctor"])


def test_a_command_that_cannot_be_imported_breaks_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "dspark.cli.doctor", None)
    code, out, err = run(capsys, "doctor")
    assert (code, out) == (1, "")
    assert err.startswith("dspark: the command 'doctor' can't be loaded: ")
    assert err.count("\n") == 1
    assert run(capsys, "--help")[0] == 0


def test_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "genrate")
    assert code == 2
    assert "generate" in err


PLUGIN = '''
import typer
from dspark.plugins.hookspecs import hookimpl

DSPARK_API = 1

@hookimpl
def dspark_register_commands(cli: typer.Typer) -> None:
    @cli.command("{command}")
    def greet(name: str = "you") -> None:
        """Greet somebody."""
        typer.echo(f"hello {{name}}")
'''


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Install a distribution with a plugin: its name and its source."""
    monkeypatch.syspath_prepend(tmp_path)
    for variable in ("DSPARK_PLUGINS", "DSPARK_DISABLE_PLUGINS"):
        monkeypatch.setenv(variable, "")  # so that what the command sets is undone
        monkeypatch.delenv(variable)

    def install_one(name: str, source: str) -> None:
        module = f"{name}_plugin_{tmp_path.name}".replace("-", "_")
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[dspark]\n{name} = {module}\n")

    return install_one


def test_a_plugin_adds_a_command(install: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]) -> None:
    install("greeter", PLUGIN.format(command="greet"))
    assert run(capsys, "greet", "--name", "Ada") == (0, "hello Ada\n", "")
    code, out, err = run(capsys, "--help")
    assert (code, err) == (0, "")
    assert cli.PLUGIN_PANEL in out
    assert "Greet somebody." in out


def test_a_plugin_is_disabled_by_option(
    install: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    install("greeter", PLUGIN.format(command="greet"))
    for options in (["--disable-plugins", "greeter"], ["--plugins", ""]):
        code, out, err = run(capsys, *options, "greet")
        assert (code, out) == (2, "")
        assert "No such command 'greet'" in err


def test_a_plugin_that_is_not_installed_is_refused(
    install: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    install("greeter", PLUGIN.format(command="greet"))
    code, out, err = run(capsys, "--plugins", "greter", "plugins")
    assert (code, out) == (2, "")
    assert err.startswith("dspark: --plugins: no plugin 'greter' is installed; did you mean 'greeter'? (installed: ")
    assert run(capsys, "--plugins", "greeter", "greet", "--name", "Ada")[:2] == (0, "hello Ada\n")


def test_a_plugin_cannot_take_a_name(install: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]) -> None:
    install("taker", PLUGIN.format(command="doctor"))
    code, out, err = run(capsys, "--help")
    assert code == 0
    assert "Greet somebody." not in out
    assert err.startswith("dspark: warning: ")
    assert "taker" in err
    assert "doctor" in err


def test_a_broken_plugin_costs_one_line(
    install: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    install("broken", "raise RuntimeError('no such\\nthing')")
    install("greeter", PLUGIN.format(command="greet"))
    code, out, err = run(capsys, "greet")
    assert (code, out) == (0, "hello you\n")
    assert err.startswith("dspark: warning: ")
    assert "broken" in err
    assert "no such thing" in err
    assert err.count("\n") == 1
