"""The kit's pytest plugin: seeds for suites, short reports of broken contracts, toy fixtures. Imports nothing heavy."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import Any

import pytest

SEED_FIXTURE = "dspark_seed"


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--dspark-seeds N``."""
    group = parser.getgroup("dspark", "dspark's conformance kit")
    group.addoption(
        "--dspark-seeds",
        type=int,
        default=1,
        metavar="N",
        help="Run every check of a subclassed suite with N seeds (default 1).",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Seeds for methods of suites."""
    seeds = metafunc.config.getoption("--dspark-seeds")
    if seeds > 1 and hasattr(metafunc.function, "__dspark_contract__") and metafunc.cls is not None:
        metafunc.fixturenames.append(SEED_FIXTURE)
        metafunc.parametrize(SEED_FIXTURE, range(seeds), indirect=True, ids=[f"seed {n}" for n in range(seeds)])


@pytest.fixture
def dspark_seed(request: pytest.FixtureRequest) -> int:
    """Seed of a suite's random inputs."""
    return int(getattr(request, "param", 0))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    """Give a suite its seed."""
    seeds = getattr(pyfuncitem, "callspec", None)
    if seeds is not None and SEED_FIXTURE in seeds.params:
        pyfuncitem.obj.__self__.seed = seeds.params[SEED_FIXTURE]


@pytest.fixture
def toy_target() -> Any:
    """A target whose law is a random table of five tokens: ``dspark.testing.TableTarget``."""
    from dspark.testing.toys import TableTarget, random_table

    return TableTarget(random_table(6, 5, 5), mix=0.4)


@pytest.fixture
def toy_drafter() -> Any:
    """A drafter of the same five tokens: ``dspark.testing.TableDrafter``."""
    from dspark.testing.toys import TableDrafter, random_table

    return TableDrafter(random_table(5, 5, seed=1))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """A broken contract is reported by its message; with the traceback of what the component raised, if it did."""
    outcome: Any = yield
    error = None if call.excinfo is None else call.excinfo.value
    if not hasattr(error, "contract") or item.config.option.tbstyle != "auto":
        return
    report = outcome.get_result()
    if report.failed:
        report.longrepr = str(error) + _cause(error)


def _cause(error: Any) -> str:
    cause = error.__cause__
    if cause is None:
        return ""
    return "\n\n" + "".join(traceback.format_exception(type(cause), cause, cause.__traceback__)).rstrip()
