"""The order in which parts of dspark may import one another, checked on the syntax tree of every module.

Imports inside functions count like those at the top; imports under ``TYPE_CHECKING`` do not.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "dspark"

LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "tokens", "views", "types", "capabilities", "deprecations"),
    ("config", "abilities", "protocols"),
    ("ops", "_sched"),
    ("sampling", "text"),
    ("checkpoints",),
    ("drafters", "heads", "confidence", "scheduling", "verifiers", "targets"),
    ("plugins",),
    ("engine",),
    ("prompts", "aio", "api", "drive"),
    ("training", "evaluation"),
    ("bench",),
    ("server", "integrations"),
    ("cli",),
)
"""A part may import its own layer and those before it."""

LEVEL = {part: level for level, layer in enumerate(LAYERS) for part in layer}
COMPONENTS = LAYERS[LEVEL["drafters"]]
ASSEMBLER = "plugins.builtin"
"""The one module that imports concrete components."""

SHARED = (
    "scheduling.cost",
    "scheduling.cache",
    "confidence.calibration",
    "confidence.drift",
    "confidence.metrics",
    "targets.load",
    "drafters.backbone",
    "drafters.block",
    "drafters.eagle3",
    "drafters.fit",
    "drafters.layers",
    "drafters.rope",
)
"""Modules beside components that are none: measured cost tables, which the engine hands to whichever scheduler runs;
calibration files, and what judges confidences; how a target is named; the drafters' networks, which training runs with
gradients."""

UNLAYERED = ("testing", "__init__", "__main__")
"""``testing`` may import all and is imported by none; the public names and ``-m`` stand above every layer."""

LIGHT = (
    *("", "__main__", "errors", "tokens", "views", "types", "capabilities"),
    *("config", "abilities", "protocols", "plugins", "cli"),
)
HEAVY = ("torch", "transformers", "triton", "safetensors", "tokenizers", "huggingface_hub", "accelerate", "gguf")
"""Parts that are imported before anything runs, and what they may not import at module level."""


@dataclass(frozen=True)
class Import:
    """One imported module, absolute, and where the import stands."""

    target: str
    line: int
    in_function: bool


def module_name(path: Path, root: Path) -> str:
    """``dspark/engine/round.py`` -> ``engine.round``; ``dspark/__init__.py`` -> an empty string."""
    parts = list(path.relative_to(root).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_type_checking(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else test.id if isinstance(test, ast.Name) else ""
    return name == "TYPE_CHECKING"


def imports_of(tree: ast.AST, module: str, *, is_package: bool, in_function: bool = False) -> Iterator[Import]:
    """Every import that can run, ``import_module("...")`` with a constant name included."""
    for node in ast.iter_child_nodes(tree):
        inside = in_function or isinstance(tree, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, inside)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node, module, is_package=is_package)
            for alias in node.names:
                yield Import(f"{base}.{alias.name}", node.lineno, inside)
        elif isinstance(node, ast.If) and is_type_checking(node.test):
            for other in node.orelse:
                wrapped = ast.Module(body=[other], type_ignores=[])
                yield from imports_of(wrapped, module, is_package=is_package, in_function=inside)
        else:
            if isinstance(node, ast.Call) and (name := dynamic_import(node)):
                yield Import(name, node.lineno, inside)
            yield from imports_of(node, module, is_package=is_package, in_function=inside)


def absolute(node: ast.ImportFrom, module: str, *, is_package: bool) -> str:
    """The module that ``from ... import`` names, relative ones resolved."""
    if not node.level:
        return node.module or ""
    parents = ["dspark", *module.split(".")] if module else ["dspark"]
    kept = parents[: len(parents) - node.level + (1 if is_package else 0)]
    return ".".join([*kept, node.module] if node.module else kept)


def dynamic_import(node: ast.Call) -> str:
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name in ("import_module", "__import__") and node.args:
        first = node.args[0]
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            return first.value
    return ""


def fault(module: str, target: str) -> str | None:
    """Why ``dspark.<module>`` may not import ``dspark.<target>``; None where it may."""
    source, wanted = module.split(".")[0], target.split(".")[0]
    if wanted == "testing":
        return None if source == "testing" else "nothing imports dspark.testing"
    if source in UNLAYERED or not source:
        return None
    if wanted == "__version__":
        return None
    if source not in LEVEL or wanted not in LEVEL:
        unknown = source if source not in LEVEL else wanted
        return f"{unknown!r} is in no layer: import from the module that defines it, or add the part to LAYERS"
    if LEVEL[wanted] > LEVEL[source]:
        return f"{source} comes before {wanted}"
    if any(target == name or target.startswith(f"{name}.") for name in SHARED) and source not in COMPONENTS:
        return None
    if wanted in COMPONENTS and source not in COMPONENTS and module != ASSEMBLER:
        return f"only {ASSEMBLER} imports concrete components"
    if wanted in COMPONENTS and source in COMPONENTS and wanted != source:
        return "components never import each other"
    return None


def faults_of(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """All faults of one module, as ``line: why``."""
    found = []
    for entry in imports_of(ast.parse(source), module, is_package=is_package):
        root, _, rest = entry.target.partition(".")
        reason = None
        if root == "dspark" and rest:
            reason = fault(module, rest)
        elif root in HEAVY and not entry.in_function and module.split(".")[0] in LIGHT:
            reason = f"{root} is imported at module level of a part that must stay light"
        if reason:
            found.append(f"{entry.line}: {entry.target}: {reason}")
    return found


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", modules(), ids=lambda path: module_name(path, PACKAGE) or "dspark")
def test_module_keeps_the_order(path: Path) -> None:
    module = module_name(path, PACKAGE)
    assert faults_of(path.read_text(encoding="utf-8"), module, is_package=path.name == "__init__.py") == []


def test_every_part_has_a_layer() -> None:
    parts = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in modules()}
    assert parts - set(LEVEL) - set(UNLAYERED) == set()


@pytest.mark.parametrize(
    ("module", "source", "reason"),
    [
        ("errors", "import dspark.types\nimport dspark.config", "errors comes before config"),
        ("protocols", "def f():\n    from dspark.engine import round", "protocols comes before engine"),
        ("ops.reference", "from dspark.sampling.noise import gumbel", "ops comes before sampling"),
        ("drafters.ngram", "from dspark.heads.markov import Markov", "components never import each other"),
        ("verifiers.greedy", "if True:\n    import dspark.engine.round", "verifiers comes before engine"),
        ("targets.hf", "from ..drafters import ngram", "components never import each other"),
        ("drafters", "from ..engine import engine", "drafters comes before engine"),
        ("engine.engine", "from dspark.schedulers import x", "'schedulers' is in no layer"),
        ("engine.engine", "from dspark import SpeculativeDecoder", "'SpeculativeDecoder' is in no layer"),
        ("engine.engine", "from dspark import scheduling", "only plugins.builtin imports concrete components"),
        ("engine.engine", "try:\n    pass\nfinally:\n    import dspark.api", "engine comes before api"),
        ("engine.build", "from dspark.scheduling.costly import X", "only plugins.builtin imports"),
        ("drafters.ngram", "from dspark.scheduling.cost import X", "components never import each other"),
        ("plugins.manager", "from dspark.targets.hf import HFTarget", "only plugins.builtin imports"),
        ("cli.doctor", "from dspark.targets.hf import HFTarget", "only plugins.builtin imports"),
        ("cli.demo", "async def f():\n    import dspark.testing.toys", "nothing imports dspark.testing"),
        ("api", "import_module('dspark.server.app')", "api comes before server"),
        ("server.app", "importlib.import_module('dspark.cli.main')", "server comes before cli"),
        ("plugins.manager", "import torch", "must stay light"),
        ("config", "try:\n    from torch import Tensor\nexcept ImportError:\n    Tensor = None", "must stay light"),
        ("", "import transformers", "must stay light"),
        ("config", "if TYPE_CHECKING:\n    import torch\nelse:\n    import torch", "must stay light"),
    ],
)
def test_checker_finds(module: str, source: str, reason: str) -> None:
    found = faults_of(source, module, is_package=module == "drafters")
    assert len(found) == 1
    assert reason in found[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("types", "from dspark.errors import ConfigError"),
        ("types", "if TYPE_CHECKING:\n    import torch\n    from dspark.config import SamplingParams"),
        ("protocols", "if typing.TYPE_CHECKING:\n    from dspark.engine.engine import Engine"),
        ("targets.hf", "import torch\nfrom dspark.targets.cache import SlotCache\nfrom .cache import SlotCache"),
        ("engine.build", "from dspark.scheduling.cost import CostProfile"),
        ("plugins.builtin", "def f():\n    from dspark.drafters.ngram import Ngram"),
        ("cli.generate", "def f():\n    import torch\n    from dspark.api import SpeculativeDecoder"),
        ("cli.main", "from dspark import __version__"),
        ("testing.toys", "import torch\nfrom dspark.drafters.ngram import Ngram"),
    ],
)
def test_checker_passes(module: str, source: str) -> None:
    assert faults_of(source, module) == []
