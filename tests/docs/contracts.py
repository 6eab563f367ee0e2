"""The page of contracts, written from the suites: ``python -m tests.docs.contracts``."""

from __future__ import annotations

from pathlib import Path

import dspark.testing as kit
from dspark.testing.contracts import checks_of
from dspark.testing.suite import ComponentSuite

PAGE = Path(__file__).parents[2] / "docs" / "plugins" / "contracts.md"

SUITES = {
    "SequentialHeadSuite": ("Sequential heads", "SequentialHead"),
    "DrafterSuite": ("Drafters", "Drafter"),
    "EstimatorSuite": ("Confidence estimators", "ConfidenceEstimator"),
    "CalibratorSuite": ("Calibrators", "Calibrator"),
    "SchedulerSuite": ("Schedulers", "VerifyScheduler"),
    "GammaPolicySuite": ("Gamma policies", "GammaPolicy"),
    "VerifierSuite": ("Verifiers", "Verifier"),
    "KernelSuite": ("Kernels", ""),
    "TargetSuite": ("Targets", "Target"),
    "ObserverSuite": ("Round observers", "RoundObserver"),
    "PluginSuite": ("Whole plugins", ""),
}

HEAD = """# Contracts

What each kind of component promises, and the check of the [conformance kit](testing.md) that holds it to that. The
protocols themselves, with shapes and dtypes, are in `dspark/protocols.py`; the values that they pass in
`dspark/types.py`. In a check's name, the suite's method, `test_` is left out.

Some contracts are for those that declare something, or do not; the others are skipped with that reason.

This page is written from the suites (`python -m tests.docs.contracts`).

## Every component

It reads what it is given and mutates none of it. It keeps what it keeps of a request under (slot, generation) and
forgets it at `release`. It raises `RowFault` to attribute a fault to rows. All randomness comes from the sampler or the
draw source that it is handed.

"""


def page() -> str:
    """The whole page."""
    common = dict(checks_of(ComponentSuite))
    parts = [HEAD + table(common)]
    for name, (title, protocol) in SUITES.items():
        suite = getattr(kit, name)
        own = {check: text for check, text in checks_of(suite) if common.get(check) != text}
        lines = [
            f"`dspark.protocols.{protocol}`, held to it by `{name}`." if protocol else f"Held to them by `{name}`."
        ]
        parts.append(f"## {title}\n\n{lines[0]}\n\n{table(own)}")
    return "\n".join(parts)


def table(checks: dict[str, str]) -> str:
    """One row a check."""
    rows = [f"| `{name.removeprefix('test_')}` | {text} |" for name, text in checks.items()]
    return "\n".join(["| check | contract |", "|---|---|", *rows, ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
