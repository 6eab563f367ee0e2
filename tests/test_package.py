"""The package around the code: what importing it costs, what it exports, and that its files agree with one another."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from pathlib import Path

import pytest
import yaml

import dspark
from dspark import errors

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dspark"
SHIPPED = sorted(path for path in PACKAGE.rglob("*.py"))
RUNTIME = [path for path in SHIPPED if "testing" not in path.relative_to(PACKAGE).parts]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def run_python(code: str, *options: str) -> str:
    done = subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


# What an import costs


def test_import_loads_nothing_heavy() -> None:
    loaded = run_python("import dspark, sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))").split()
    assert "dspark" in loaded
    heavy = {"numpy", "torch", "transformers", "triton", "safetensors", "pluggy", "rich", "typer", "click"}
    heavy |= {"fastapi", "starlette", "uvicorn", "pydantic", "prometheus_client", "llguidance"}
    assert heavy & set(loaded) == set()


def test_import_is_fast() -> None:
    code = "import time; start = time.process_time(); import dspark; print(time.process_time() - start)"
    assert min(float(run_python(code)) for _ in range(3)) < 0.3


def test_public_names_cost_little_beyond_numpy_and_torch() -> None:
    code = (
        "import numpy, torch, time; start = time.process_time(); import dspark\n"
        "dspark.EngineConfig, dspark.SamplingParams, dspark.hookimpl, dspark.DSparkError\n"
        "print(time.process_time() - start)"
    )
    assert float(run_python(code)) < 0.3


# What it exports


@pytest.mark.parametrize("name", dspark.__all__)
def test_public_name_resolves(name: str) -> None:
    assert getattr(dspark, name) is not None
    assert name in dir(dspark)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"'dspark' has no attribute 'SpeculativeDecodr'"):
        dspark.SpeculativeDecodr  # noqa: B018


def test_lazy_names_agree_with_the_static_imports() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    static = {
        alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert static == dspark._HOMES
    assert sorted(dspark.__all__) == sorted([*static, "__version__"])


def test_every_error_is_public() -> None:
    own = {
        name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__
    }
    assert own <= set(dspark.__all__)
    assert all(issubclass(getattr(errors, name), (errors.DSparkError, Warning)) for name in own)


def test_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()
    assert (PACKAGE / "_sched.pyi").is_file()


# That its files agree


def test_one_version_everywhere() -> None:
    assert PYPROJECT["project"]["version"] == dspark.__version__
    manifests = [path for path in (ROOT / "rust_sched").rglob("Cargo.toml") if "target" not in path.parts]
    found = {}
    for path in manifests:
        manifest = tomllib.loads(path.read_text(encoding="utf-8"))
        version = manifest.get("package", manifest.get("workspace", {}).get("package", {})).get("version")
        if isinstance(version, str):
            found[path] = version
    assert found
    assert set(found.values()) == {dspark.__version__}
    assert f"## {dspark.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_core_dependencies_are_few() -> None:
    names = {re.split(r"[<>=~\[ ]", line)[0] for line in PYPROJECT["project"]["dependencies"]}
    assert names == {"numpy", "pluggy", "rich", "safetensors", "torch", "transformers", "typer"}


def test_readme_names_the_two_commands_and_make_has_them() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```(?:sh|bash|console)\n(.*?)```", readme, flags=re.DOTALL)
    named = set(re.findall(r"^make ([a-z-]+)", "\n".join(blocks), flags=re.MULTILINE))
    assert {"demo", "test"} <= named
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert named <= targets
    ci = set(re.findall(r"^step make ([a-z-]+)", (ROOT / ".ci/run").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert {"lint", "test-rust", "test", "test-slow", "mutants", "verify-ci"} <= ci <= targets


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_python_in_documents_parses_and_names_what_exists(page: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module == "dspark":
                assert {alias.name for alias in node.names} <= set(dspark.__all__)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "dspark":
                assert node.attr in dspark.__all__


def test_relative_links_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if "://" not in link and not (page.parent / link).exists():
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert broken == []


def test_navigation_lists_every_page() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = {page for entry in config["nav"] for page in entry.values()}
    assert listed == {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}


# The house's rules for shipped code


@pytest.mark.parametrize("path", SHIPPED, ids=name_of)
def test_module_is_short(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= 350


def unfinished(source: str) -> list[str]:
    """Statements and words that shipped code may not hold, as ``line: what``."""
    found = [f"{node.lineno}: assert" for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assert)]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        words = re.findall(r"\b(TODO|FIXME|XXX|NotImplementedError)\b", token.string)
        found += [f"{token.start[0]}: {word}" for word in words]
    return found


@pytest.mark.parametrize("path", RUNTIME, ids=name_of)
def test_module_is_finished_and_validates_without_assert(path: Path) -> None:
    assert unfinished(path.read_text(encoding="utf-8")) == []


def test_checker_finds_what_is_unfinished() -> None:
    bad = 'def f(x):\n    """FIXME"""\n    assert x\n    raise NotImplementedError  # TODO\n'
    assert unfinished(bad) == ["3: assert", "2: FIXME", "4: NotImplementedError", "4: TODO"]
    assert unfinished("class A:\n    def __eq__(self, other):\n        return NotImplemented\n") == []


def test_documents_and_sources_name_no_machine() -> None:
    """Paths of one machine have no place in a tracked file."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    pattern = re.compile(rb"(?<![A-Za-z0-9_.])/(?:work|root|home)/")
    hits = []
    for name in listed.stdout.decode().split("\0"):
        path = ROOT / name
        if name and path.is_file() and path.suffix not in (".safetensors", ".bin", ".idx", ".npz"):
            hits += [name] if pattern.search(path.read_bytes()) and path != Path(__file__) else []
    assert hits == []
