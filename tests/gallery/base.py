"""Broken plugins: what each breaks, who has to notice it, and the words that tell its author."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dspark import capabilities as caps
from dspark.plugins import Kind, hookimpl
from dspark.plugins.kinds import KINDS
from dspark.testing import (
    CalibratorSuite,
    DrafterSuite,
    EstimatorSuite,
    GammaPolicySuite,
    KernelSuite,
    SchedulerSuite,
    SequentialHeadSuite,
    Suite,
    TargetSuite,
    VerifierSuite,
)

DIST = "gallery"

SUITES: dict[Kind, tuple[type[Suite], Any]] = {
    Kind.SEQUENTIAL_HEAD: (SequentialHeadSuite, caps.HeadCapabilities()),
    Kind.DRAFTER: (DrafterSuite, caps.DrafterCapabilities()),
    Kind.ESTIMATOR: (EstimatorSuite, caps.EstimatorCapabilities()),
    Kind.CALIBRATOR: (CalibratorSuite, caps.CalibratorCapabilities()),
    Kind.SCHEDULER: (SchedulerSuite, caps.SchedulerCapabilities()),
    Kind.GAMMA: (GammaPolicySuite, caps.GammaCapabilities()),
    Kind.VERIFIER: (VerifierSuite, caps.VerifierCapabilities()),
    Kind.KERNEL: (KernelSuite, caps.KernelCapabilities()),
    Kind.TARGET: (TargetSuite, caps.TargetCapabilities()),
}


def plugin(kind: Kind, factory: Callable[[Any, Any], Any], config: Any, capabilities: Any) -> object:
    """A plugin that registers one component ``part`` of a kind."""

    def register_part(self: Any, register: Any) -> None:
        register("part", factory, config=config, capabilities=capabilities)

    hook = KINDS[kind].hook
    register_part.__name__ = hook
    return type("Plugin", (), {"DSPARK_API": 1, hook: hookimpl(register_part)})()


@dataclass(frozen=True)
class Broken:
    """A component that breaks one promise in a plausible way.

    Attributes:
        name: what it does.
        kind: of the component.
        factory: builds it.
        check: the check of its suite that has to fail; empty for a sound one, which has to pass all.
        words: what the message has to hold.
        config: its settings class.
        capabilities: what it declares; the kind's safest where None.
        suite: attributes of the suite.
    """

    name: str
    kind: Kind
    factory: Callable[[Any, Any], Any]
    check: str = ""
    words: tuple[str, ...] = ()
    config: Any = None
    capabilities: Any = None
    suite: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.name}"

    def make_suite(self, seed: int = 0) -> Any:
        """Its suite, ready to run."""
        base, safest = SUITES[self.kind]
        made = plugin(self.kind, self.factory, self.config, self.capabilities or safest)
        own = {"component": f"{DIST}/part", "plugins": {DIST: made}, "seed": seed, **self.suite}
        return type(base.__name__, (base,), own)()
