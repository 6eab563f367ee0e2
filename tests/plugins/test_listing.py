"""``dspark plugins``, as a table and as JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from dspark.cli.plugins import plugins


@pytest.fixture
def run(site: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install one plugin of each status; returns a function that runs the command."""
    site.scheduler("acme-a", "same", version="1.5", aliases=("alias",))
    site.scheduler("acme-b", "same")
    site.scheduler("acme-c", "fine")
    site.scheduler("acme-d", "unwanted")
    site.broken("acme-e", version="0.1")
    monkeypatch.setenv("DSPARK_DISABLE_PLUGINS", "acme-d")
    monkeypatch.setenv("COLUMNS", "200")
    app = typer.Typer()
    app.command()(plugins)
    return lambda *args: CliRunner().invoke(app, list(args), catch_exceptions=False)


def test_json(run: Any) -> None:
    result = run("--json")
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert data["api"] == 1
    fields = {"name", "version", "distribution", "hooks", "components", "status", "error"}
    assert all(set(p) == fields for p in data["plugins"])
    found = {p["distribution"]: p for p in data["plugins"]}
    assert {d: p["status"] for d, p in found.items() if d.startswith("acme")} == {
        "acme-a": "conflict",
        "acme-b": "conflict",
        "acme-c": "ok",
        "acme-d": "disabled",
        "acme-e": "error",
    }
    assert found["acme-a"]["version"] == "1.5"
    assert found["acme-a"]["hooks"] == ["dspark_register_schedulers"]
    assert found["acme-a"]["components"] == [{"kind": "scheduler", "name": "acme-a/same", "aliases": ["alias"]}]
    assert "acme-a 1.5 and acme-b 1.0" in found["acme-b"]["error"]
    assert (found["acme-c"]["error"], found["acme-e"]["components"]) == ("", [])
    assert "failed in dspark_register_verifiers: ZeroDivisionError: boom" in found["acme-e"]["error"]
    assert {"kind": "drafter", "name": "dspark/ngram", "aliases": []} in found["dspark"]["components"]


@pytest.mark.filterwarnings("error")
def test_table(run: Any) -> None:
    result = run()
    assert result.exit_code == 0
    rows = {line.split("│")[1].strip(): line for line in result.stdout.splitlines() if line.startswith("│")}
    assert "0.1" in rows["acme-e"]
    for name, status in (("acme-a", "conflict"), ("acme-c", "ok"), ("acme-d", "disabled"), ("acme-e", "error")):
        assert status in rows[name]
    assert "scheduler: fine" in rows["acme-c"]
    assert "acme-d: disabled by DSPARK_DISABLE_PLUGINS" in result.stdout
    assert "ZeroDivisionError: boom" in result.stdout
