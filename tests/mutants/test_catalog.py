"""The catalog of seeded faults does not rot: each still applies exactly once and names tests that exist."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants.catalog import MUTANTS
from tests.mutants.run import ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_a_mutant_applies_once_and_still_parses(mutant: Mutant) -> None:
    source = (ROOT / mutant.file).read_text(encoding="utf-8")
    assert source.count(mutant.old) == 1, f"{mutant.file}: its text occurs {source.count(mutant.old)} times"
    assert mutant.old != mutant.new
    ast.parse(source.replace(mutant.old, mutant.new))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_a_mutant_names_tests_that_exist(mutant: Mutant) -> None:
    assert mutant.tests
    for node in mutant.tests:
        file, _, name = node.partition("::")
        assert name.split("[")[0] in _functions(ROOT / file), node


def _functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_there_are_enough() -> None:
    assert len(MUTANTS) >= 25
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)
