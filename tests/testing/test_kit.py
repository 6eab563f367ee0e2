"""The kit itself: what a failed check says, seeds, the decorator, the pytest plugin, and what loading it costs."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dspark.testing as kit
from dspark.testing import (
    ContractViolation,
    NotApplicable,
    SchedulerSuite,
    Seen,
    contract,
    parametrize_checks,
    run_checks,
)
from dspark.testing.contracts import checks_of
from dspark.testing.suites.scheduler import shrunk
from tests.gallery.planners import SCHEDULERS

ROOT = Path(__file__).parents[2]


class Toy:
    """A suite of four checks."""

    subject = "part acme/toy"
    seed = 0

    @contract("it holds")
    def test_holds(self) -> None: ...

    @contract("it is small")
    def test_small(self) -> None:
        raise Seen("it is 7", size=7, table=np.eye(2))

    @contract("it does not raise")
    def test_raises(self) -> None:
        self.case = {"x": 1}
        raise ZeroDivisionError("boom")

    @contract("it is pure")
    def test_pure(self) -> None:
        raise NotApplicable("it says that it is not")


def test_a_failed_check_says_contract_observation_and_case() -> None:
    with pytest.raises(ContractViolation) as caught:
        Toy().test_small()
    assert str(caught.value).splitlines() == [
        "part acme/toy breaks a contract.",
        "contract: it is small",
        "seen:     it is 7",
        "smallest case:",
        "    size = 7",
        "    table = [[1.0, 0.0], [0.0, 1.0]]",
    ]
    assert (caught.value.contract, caught.value.seen, caught.value.subject) == ("it is small", "it is 7", Toy.subject)


def test_what_a_component_raises_is_a_violation_with_its_cause() -> None:
    with pytest.raises(ContractViolation, match="seen:     it raised ZeroDivisionError: boom") as caught:
        Toy().test_raises()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert caught.value.case == {"x": 1}


def test_checks_run_without_pytest() -> None:
    outcomes = {o.name: o for o in run_checks(Toy)}
    assert [n for n, o in outcomes.items() if o.violation] == ["test_small", "test_raises"]
    assert outcomes["test_pure"].skipped == "it says that it is not"
    assert outcomes["test_holds"].contract == "it holds"


def test_every_check_of_every_suite_states_a_contract() -> None:
    suites = [getattr(kit, n) for n in kit.__all__ if n.endswith("Suite") and n not in ("Suite", "ComponentSuite")]
    assert len(suites) == 11
    for suite in suites:
        names = {n for n in dir(suite) if n.startswith("test_") and callable(getattr(suite, n))}
        found = dict(checks_of(suite))
        assert names == set(found), suite
        assert all(len(text) > 20 and not text.endswith(".") for text in found.values())


def test_the_smallest_case_is_small() -> None:
    """A retrospective schedule is shown on few rows and positions, and with round numbers."""
    retrospective = next(s for s in SCHEDULERS if s.name == "retrospective")
    with pytest.raises(ContractViolation) as caught:
        retrospective.make_suite().test_non_anticipation()
    c = np.array(caught.value.case["c"])
    assert c.shape[0] == 1
    assert c.size <= 4


def test_shrinking_keeps_what_fails() -> None:
    def fails(c: Any) -> Any:
        return 1 - c if c[0, 0] > 0.5 and c.shape[1] > 1 else None

    best, changed = shrunk(np.random.default_rng(0).random((3, 4)) / 2 + 0.5, fails)
    assert best.shape == (1, 2)
    assert np.array_equal(changed, 1 - best)


@parametrize_checks(SchedulerSuite, ["dspark/off", "dspark/fixed"], trials=3)
def test_by_decorator(check: Any) -> None:
    check()


def test_the_decorator_names_components_and_seeds() -> None:
    mark = parametrize_checks(SchedulerSuite, "dspark/off", seeds=2).mark
    ids = [case.id for case in mark.args[1]]
    assert "dspark/off-1-test_non_anticipation" in ids
    assert {case.values[0].__self__.seed for case in mark.args[1]} == {0, 1}


def test_random_inputs_are_a_function_of_the_seed() -> None:
    def drawn(seed: int, purpose: str) -> int:
        suite = type("S", (SchedulerSuite,), {"component": "dspark/off", "seed": seed})()
        return int(suite.random(purpose).integers(10**9))

    assert drawn(1, "a") == drawn(1, "a")
    assert len({drawn(1, "a"), drawn(2, "a"), drawn(1, "b")}) == 3


# The pytest plugin

USER_FILE = """
from dspark.testing import ContractViolation, Seen, Suite, contract

class TestMine(Suite):
    component = "acme/mine"

    @contract("seeds are small")
    def test_seed(self):
        if self.seed > 1:
            raise Seen("it is large", seed=self.seed)

    @contract("nothing raises")
    def test_raising(self):
        {}["missing"]

def test_toys(toy_target, toy_drafter):
    assert toy_target.vocab_size == 5 and toy_drafter.default_gamma == 2
"""


def run_pytest(folder: Path, *options: str) -> str:
    installed = any(p.name == "dspark" for p in importlib.metadata.entry_points(group="pytest11"))
    by_hand = [] if installed else ["-p", "dspark.testing.pytest_plugin"]  # an installation older than the plugin
    command = [sys.executable, "-m", "pytest", *by_hand, "-p", "no:cacheprovider", *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    return done.stdout + done.stderr


def test_the_plugin_gives_seeds_fixtures_and_short_reports(tmp_path: Path) -> None:
    (tmp_path / "test_user.py").write_text(USER_FILE, encoding="utf-8")
    shown = run_pytest(tmp_path, "-q", "--dspark-seeds", "3")
    assert "TestMine::test_seed[seed 2]" in shown
    assert "4 failed, 3 passed" in shown
    assert "acme/mine breaks a contract.\ncontract: seeds are small\nseen:     it is large" in shown
    assert "KeyError: 'missing'" in shown
    assert "def run(self" not in shown  # the kit's own frames are left out
    assert "2 failed" not in run_pytest(tmp_path, "-q")


def test_pytest_starts_without_torch() -> None:
    code = (
        "import sys, dspark.testing.pytest_plugin\nprint(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_lazy_names_are_complete() -> None:
    assert sorted(kit._HOMES) == sorted(kit.__all__)
    for name in kit.__all__:
        assert getattr(kit, name) is not None
    with pytest.raises(AttributeError, match="HedSuite"):
        kit.HedSuite  # noqa: B018


def test_the_entry_point_is_declared() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["pytest11"] == {"dspark": "dspark.testing.pytest_plugin"}
