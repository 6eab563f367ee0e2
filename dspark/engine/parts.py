"""The components of an engine, and what the build checks of them together."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dspark.config import EngineConfig
from dspark.errors import ConfigError, DSparkWarning
from dspark.protocols import Calibrator, ConfidenceEstimator, Drafter, GammaPolicy, Target, Verifier, VerifyScheduler
from dspark.types import DrawSource, Mode, RequestView


@dataclass(slots=True)
class Parts:
    """Everything that a round calls.

    Attributes:
        verifiers: one a mode.
        cost: ``dspark._sched.CostTable`` or None; exchanged between rounds where it is refined.
        gamma_policy: decides before each round how much is drafted; None for all of gamma.
        names: component kind -> ``dist/name``, for messages.
        versions: component kind -> version of its distribution.
        nested: (component, ``dist/name``, version) of what components were built with, such as a drafter's head.
        kernels: operation -> ``dspark.ops.dispatch.Choice``, made once.
        groups: (mode, temperature to a tenth) -> number of the running averages that such rows share.
        drafting: False once a batch-wide fault has switched the drafter off; ``planning`` likewise for estimator and
            scheduler: later rounds verify a fixed length.
    """

    target: Target
    drafter: Drafter
    estimator: ConfidenceEstimator
    calibrator: Calibrator
    scheduler: VerifyScheduler
    verifiers: Mapping[Mode, Verifier]
    draws: DrawSource
    gamma: int
    cost: Any = None
    fixed_gamma: int | None = None
    gamma_policy: GammaPolicy | None = None
    names: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    nested: tuple[tuple[Any, str, str], ...] = ()
    groups: dict[tuple[Mode, float], int] = field(default_factory=dict)
    kernels: Mapping[str, Any] = field(default_factory=dict)
    count_margins: bool = False
    drafting: bool = True
    planning: bool = True

    def name(self, kind: str) -> str:
        return self.names.get(kind, kind)

    def title(self, kind: str) -> str:
        """The name with its version, for what went wrong."""
        return f"{self.name(kind)} {self.versions.get(kind, '')}".rstrip()

    def in_use(self) -> list[str]:
        """Kinds whose components keep state of requests, and have not been switched off."""
        on = {"drafter": self.drafting, "estimator": self.planning, "scheduler": self.planning}
        return [kind for kind, used in {**on, "gamma_policy": self.gamma_policy is not None}.items() if used]

    def at_fault(self, kind: str, fault: BaseException) -> tuple[str, str]:
        """(``dist/name``, version) of who raised: a nested component where its method was running, else the kind's."""
        found = self.name(kind), self.versions.get(kind, "")
        trace = fault.__traceback__
        while trace is not None:  # outermost call first: the innermost component that was running stays
            owner = trace.tb_frame.f_locals.get("self")
            found = next(((name, version) for part, name, version in self.nested if part is owner), found)
            trace = trace.tb_next
        return found

    def kernel(self, op: str) -> Any:
        """What runs an operation; None for the engine's own torch code."""
        choice = self.kernels.get(op)
        return None if choice is None else choice.call

    def group(self, request: RequestView) -> int:
        """The running averages that a row shares: those of its verifier and temperature (METHOD section 4)."""
        warmth = 0.0 if request.mode is Mode.GREEDY else min(round(request.params.temperature, 1), 10.0)
        return self.groups.setdefault((request.mode, warmth), len(self.groups))


def anticipation(parts: Parts) -> str | None:
    """What in the parts may let a drafted token decide its own admission, in words; None where nothing may."""
    if parts.scheduler.capabilities.anticipates:
        return f"scheduler {parts.name('scheduler')} is retrospective"
    if parts.estimator.capabilities.anticipates:
        return f"estimator {parts.name('estimator')} reads drafted tokens that it scores"
    return None


def admitted_modes(parts: Parts, config: EngineConfig) -> frozenset[Mode]:
    """The modes that requests of this engine may have; ``rejection`` only where every schedule is non-anticipating.

    Raises:
        ConfigError: where the config asks for a verifier that the parts would bias (METHOD section 4).
    """
    reason = anticipation(parts)
    wanted = {Mode.GREEDY, Mode.REJECTION, Mode.COUPLED}
    if config.verifier != "auto":
        pathwise = parts.verifiers[Mode.REJECTION].capabilities.pathwise
        wanted = {Mode.GREEDY, Mode.COUPLED if pathwise else Mode.REJECTION}
        if config.verifier.rpartition("/")[2] == "greedy":
            wanted = {Mode.GREEDY}
    exact = parts.verifiers[Mode.REJECTION].capabilities.exact_under == "any"
    if reason is None or exact or Mode.REJECTION not in wanted:
        return frozenset(wanted)
    if config.lossless == "off":
        warnings.warn(f"lossless='off': output is biased, since {reason}", DSparkWarning, stacklevel=3)
        return frozenset(wanted)
    if config.verifier != "auto":
        raise ConfigError(
            f"{reason}, which biases the output under verifier {config.verifier!r}: "
            "use verifier='coupled' (exact under any schedule) or a causal scheduler"
        )
    return frozenset(wanted - {Mode.REJECTION})


def check_gamma(parts: Parts) -> None:
    """Refuse a block that the drafter was not made for.

    Raises:
        ConfigError: with both numbers.
    """
    most = parts.drafter.max_gamma
    if most is not None and parts.gamma > most:
        raise ConfigError(
            f"gamma = {parts.gamma} exceeds what drafter {parts.name('drafter')} drafts (at most {most}): "
            f"set gamma to {most} or less"
        )
    if parts.drafter.tap_layers and not parts.target.capabilities.taps:
        raise ConfigError(
            f"drafter {parts.name('drafter')} reads hidden states of layers {parts.drafter.tap_layers}, "
            f"which target {parts.target.name} can't return"
        )
