"""Checks: a contract in words, and what was seen where it does not hold."""

from __future__ import annotations

import functools
import unittest
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from dspark.errors import DSparkError

S = TypeVar("S")
Check = Callable[[S], None]

CONTRACT = "__dspark_contract__"
"""Attribute of a check: its contract."""


class ContractViolation(DSparkError, AssertionError):
    """A component breaks a contract.

    Attributes:
        contract: what it should do.
        seen: what it did.
        case: the smallest input that shows it, name -> value.
        subject: which component.
    """

    def __init__(self, contract: str, seen: str, case: Mapping[str, Any] | None = None, subject: str = "") -> None:
        self.contract, self.seen, self.case, self.subject = contract, seen, dict(case or {}), subject
        lines = [f"contract: {contract}", f"seen:     {seen}"]
        if self.case:
            lines.append("smallest case:")
            lines += [f"    {name} = {_shown(value)}" for name, value in self.case.items()]
        super().__init__("\n".join([f"{subject} breaks a contract." if subject else "A contract is broken.", *lines]))


class NotApplicable(unittest.SkipTest):
    """A contract that this component has declared, or can't have; pytest shows the check as skipped."""


class Seen(Exception):
    """Raised within a check: what the component did against the contract.

    Args:
        what: in words.
        case: the input, name -> value.
    """

    def __init__(self, what: str, **case: Any) -> None:
        super().__init__(what)
        self.what, self.case = what, case


def contract(text: str) -> Callable[[Check[S]], Check[S]]:
    """Make a method of a suite a check of ``text``.

    A :class:`Seen` becomes a :class:`ContractViolation`, and so does whatever the component raises: it was given what
    it has to take. The original exception stays chained.
    """

    def wrap(function: Check[S]) -> Check[S]:
        @functools.wraps(function)
        def run(self: S) -> None:
            __tracebackhide__ = True
            subject = str(getattr(self, "subject", ""))
            self.case = {}  # type: ignore[attr-defined]
            try:
                function(self)
            except Seen as seen:
                raise ContractViolation(text, seen.what, seen.case, subject) from seen.__cause__
            except (ContractViolation, NotApplicable):
                raise
            except Exception as err:
                raise ContractViolation(text, _said(err), getattr(self, "case", None), subject) from err

        setattr(run, CONTRACT, text)
        return run

    return wrap


def _said(err: Exception) -> str:
    notes = "".join(f" ({note})" for note in getattr(err, "__notes__", ()))
    return f"it raised {type(err).__name__}: {err}{notes}"


def _shown(value: Any) -> str:
    """Arrays and tensors as nested lists, on one line where that is short."""
    listed = value.tolist() if hasattr(value, "tolist") else value
    text = repr(listed)
    return text if len(text) <= 400 else f"{text[:380]} ... ({len(text)} characters)"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one check: ``violation`` and ``skipped`` are empty where it holds."""

    name: str
    contract: str
    violation: ContractViolation | None = None
    skipped: str = ""


def checks_of(suite: type[Any]) -> Iterator[tuple[str, str]]:
    """(name, contract) of a suite's checks, in the order of definition, those of base classes first."""
    names = dict.fromkeys(n for cls in reversed(suite.__mro__) for n in vars(cls))
    for name in names:
        text = getattr(getattr(suite, name, None), CONTRACT, None)
        if text is not None:
            yield name, text


def run_checks(suite: Any) -> list[Outcome]:
    """Run every check of a suite (a class or an instance) without pytest."""
    made = suite() if isinstance(suite, type) else suite
    outcomes = []
    for name, text in checks_of(type(made)):
        try:
            getattr(made, name)()
        except ContractViolation as violation:
            outcomes.append(Outcome(name, text, violation))
        except NotApplicable as reason:
            outcomes.append(Outcome(name, text, skipped=str(reason)))
        else:
            outcomes.append(Outcome(name, text))
    return outcomes
