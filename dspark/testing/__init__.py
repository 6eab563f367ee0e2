"""The conformance kit: suites that components are held to, toy components, exact enumeration, and an oracle.

A suite is used by subclassing, or through :func:`parametrize_checks`::

    class TestMyHead(SequentialHeadSuite):
        component = "my-dist/my-head"

Names are imported on first use, so that pytest, which loads the kit's plugin at its start, loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspark.testing.contracts import ContractViolation, NotApplicable, Outcome, Seen, contract, run_checks
    from dspark.testing.enumerate import EnumerationError, ScriptedDraws, TableNoise, law, total_variation
    from dspark.testing.oracle import TokenRule, next_scores, target_law
    from dspark.testing.suite import ComponentSuite, Suite, parametrize_checks
    from dspark.testing.suites.calibrator import CalibratorSuite
    from dspark.testing.suites.drafter import DrafterSuite
    from dspark.testing.suites.estimator import EstimatorSuite
    from dspark.testing.suites.gamma import GammaPolicySuite
    from dspark.testing.suites.head import SequentialHeadSuite
    from dspark.testing.suites.kernel import KernelSuite
    from dspark.testing.suites.observer import ObserverSuite
    from dspark.testing.suites.plugin import PluginSuite
    from dspark.testing.suites.scheduler import SchedulerSuite
    from dspark.testing.suites.target import TargetSuite
    from dspark.testing.suites.verifier import VerifierSuite
    from dspark.testing.toy_heads import CountingObserver, HeadDrafter
    from dspark.testing.toys import TableDrafter, TableEstimator, TableTarget

_HOMES = {
    "CalibratorSuite": "suites.calibrator",
    "ComponentSuite": "suite",
    "ContractViolation": "contracts",
    "CountingObserver": "toy_heads",
    "DrafterSuite": "suites.drafter",
    "EnumerationError": "enumerate",
    "EstimatorSuite": "suites.estimator",
    "GammaPolicySuite": "suites.gamma",
    "HeadDrafter": "toy_heads",
    "KernelSuite": "suites.kernel",
    "NotApplicable": "contracts",
    "ObserverSuite": "suites.observer",
    "Outcome": "contracts",
    "PluginSuite": "suites.plugin",
    "SchedulerSuite": "suites.scheduler",
    "ScriptedDraws": "enumerate",
    "Seen": "contracts",
    "SequentialHeadSuite": "suites.head",
    "Suite": "suite",
    "TableDrafter": "toys",
    "TableEstimator": "toys",
    "TableNoise": "enumerate",
    "TableTarget": "toys",
    "TargetSuite": "suites.target",
    "TokenRule": "oracle",
    "VerifierSuite": "suites.verifier",
    "contract": "contracts",
    "law": "enumerate",
    "next_scores": "oracle",
    "parametrize_checks": "suite",
    "run_checks": "contracts",
    "target_law": "oracle",
    "total_variation": "enumerate",
}

__all__ = [
    "CalibratorSuite",
    "ComponentSuite",
    "ContractViolation",
    "CountingObserver",
    "DrafterSuite",
    "EnumerationError",
    "EstimatorSuite",
    "GammaPolicySuite",
    "HeadDrafter",
    "KernelSuite",
    "NotApplicable",
    "ObserverSuite",
    "Outcome",
    "PluginSuite",
    "SchedulerSuite",
    "ScriptedDraws",
    "Seen",
    "SequentialHeadSuite",
    "Suite",
    "TableDrafter",
    "TableEstimator",
    "TableNoise",
    "TableTarget",
    "TargetSuite",
    "TokenRule",
    "VerifierSuite",
    "contract",
    "law",
    "next_scores",
    "parametrize_checks",
    "run_checks",
    "target_law",
    "total_variation",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
