"""``dspark new-plugin``: what it writes installs, loads and passes its own tests."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from dspark.cli.new_plugin import PluginKind, plugin_names, write_plugin
from dspark.errors import PluginError
from tests.cli.test_main import run


def test_it_writes_a_package(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "made"
    code, out, err = run(capsys, "new-plugin", "dspark-head-conv", "--kind", "head", "--folder", str(folder))
    assert (code, err) == (0, "")
    assert "pip install -e '.[test]' && pytest" in out
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["dspark"] == {"conv": "dspark_head_conv.plugin"}
    written = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert written == {
        "README.md",
        "pyproject.toml",
        "dspark_head_conv/__init__.py",
        "dspark_head_conv/head.py",
        "dspark_head_conv/plugin.py",
        "tests/test_head.py",
    }
    assert not any("${" in (folder / p).read_text(encoding="utf-8") for p in written)
    assert run(capsys, "new-plugin", "dspark-head-conv", "-k", "head", "-o", str(folder))[::2] == (
        2,
        f"dspark: {folder}: the folder is not empty\n",
    )


@pytest.mark.parametrize(
    ("name", "kind", "part", "cls"),
    [
        ("dspark-head-conv", "head", "conv", "Conv"),
        ("my-quick-scheduler", "scheduler", "my-quick-scheduler", "MyQuickScheduler"),
        ("acme_parts", "drafter", "acme-parts", "AcmeParts"),
        ("dspark-drafter-3gram", "drafter", "3gram", "Part3gram"),
    ],
)
def test_names(name: str, kind: str, part: str, cls: str) -> None:
    names = plugin_names(name, kind)
    assert (names["part"], names["cls"], names["package"]) == (part, cls, name.replace("-", "_"))


@pytest.mark.parametrize("name", ["dspark", "Upper", "a--b", "-x", "a b", "class"])
def test_bad_names_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=name):
        write_plugin(name, "head", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_an_unknown_kind_is_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "new-plugin", "mine", "--kind", "heads", "-o", str(tmp_path / "x"))
    assert code == 2
    assert "heads" in err


@pytest.mark.slow
@pytest.mark.parametrize("kind", PluginKind)
def test_it_passes_its_own_tests(kind: PluginKind, tmp_path: Path) -> None:
    name = f"dspark-{kind.value}-mine"
    folder, site = tmp_path / "package", tmp_path / "site"
    write_plugin(name, kind.value, folder)
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*install, "--target", str(site), str(folder)], capture_output=True, text=True, timeout=300)
    if done.returncode and "setuptools" in done.stderr:
        pytest.skip("no setuptools here to build a package with")
    assert done.returncode == 0, done.stderr
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
