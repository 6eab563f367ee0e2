"""The kinds of components, and what each kind must be."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dspark import capabilities as caps
from dspark import protocols as proto
from dspark.errors import PluginError, nearest

BUILTIN_DIST = "dspark"

Factory = Callable[[Any, proto.BuildContext], Any]
LazyConfig = type[Any] | str | Callable[[], type[Any]] | None


class Register(Protocol):
    """What a registration hook is given."""

    def __call__(
        self,
        name: str,
        factory: Factory | str,
        *,
        config: LazyConfig,
        capabilities: caps.Capabilities,
        aliases: Sequence[str] = (),
    ) -> None:
        """Offer one component; see ``dspark.plugins.hookspecs``."""
        ...


class Kind(enum.StrEnum):
    """What a component is."""

    TARGET = "target"
    DRAFTER = "drafter"
    SEQUENTIAL_HEAD = "sequential_head"
    ESTIMATOR = "estimator"
    CALIBRATOR = "calibrator"
    SCHEDULER = "scheduler"
    GAMMA = "gamma_policy"
    VERIFIER = "verifier"
    KERNEL = "kernel"
    PRESET = "preset"

    @property
    def label(self) -> str:
        """For messages: ``sequential head``."""
        return self.value.replace("_", " ")


@dataclass(frozen=True, slots=True)
class KindSpec:
    """Registration hook, capabilities class and protocol (None: checked by hand) of a kind."""

    hook: str
    capabilities: type[Any]
    protocol: type[Any] | None


KINDS: Mapping[Kind, KindSpec] = {
    Kind.TARGET: KindSpec("dspark_register_targets", caps.TargetCapabilities, proto.Target),
    Kind.DRAFTER: KindSpec("dspark_register_drafters", caps.DrafterCapabilities, proto.Drafter),
    Kind.SEQUENTIAL_HEAD: KindSpec("dspark_register_sequential_heads", caps.HeadCapabilities, proto.SequentialHead),
    Kind.ESTIMATOR: KindSpec(
        "dspark_register_confidence_estimators", caps.EstimatorCapabilities, proto.ConfidenceEstimator
    ),
    Kind.CALIBRATOR: KindSpec("dspark_register_calibrators", caps.CalibratorCapabilities, proto.Calibrator),
    Kind.SCHEDULER: KindSpec("dspark_register_schedulers", caps.SchedulerCapabilities, proto.VerifyScheduler),
    Kind.GAMMA: KindSpec("dspark_register_gamma_policies", caps.GammaCapabilities, proto.GammaPolicy),
    Kind.VERIFIER: KindSpec("dspark_register_verifiers", caps.VerifierCapabilities, proto.Verifier),
    Kind.KERNEL: KindSpec("dspark_register_kernels", caps.KernelCapabilities, None),
    Kind.PRESET: KindSpec("dspark_register_presets", caps.PresetCapabilities, None),
}


def as_kind(kind: Kind | str) -> Kind:
    """``Kind`` of a name.

    Raises:
        PluginError: with the nearest kind.
    """
    try:
        return Kind(kind)
    except ValueError:
        known = [k.value for k in Kind]
        raise PluginError(f"unknown kind {kind!r}{nearest(str(kind), known)} (known: {', '.join(known)})") from None


def canonical(name: str) -> str:
    """A distribution's name as packaging compares it: ``My_Plugin`` and ``my-plugin`` are the same."""
    return re.sub(r"[-_.]+", "-", name).lower()


def protocol_members(protocol: type[Any]) -> tuple[str, ...]:
    """Public attributes and methods that a protocol asks for."""
    names = (*getattr(protocol, "__annotations__", {}), *vars(protocol))
    return tuple(dict.fromkeys(n for n in names if not n.startswith("_")))


def component_faults(kind: Kind, component: object, declared: caps.Capabilities) -> str:
    """Why ``component`` is not what ``kind`` asks for, or an empty string.

    ``declared`` are the capabilities that it was registered with: the build reads those, so a component may not be
    less safe than they say.
    """
    spec = KINDS[kind]
    if kind is Kind.KERNEL:
        return "" if callable(component) else f"a kernel must be callable, got {type(component).__name__}"
    if kind is Kind.PRESET:
        return "" if isinstance(component, Mapping) else f"a preset must be a mapping, got {type(component).__name__}"
    if spec.protocol is None:
        return ""
    names = protocol_members(spec.protocol)
    missing = [n for n in names if not hasattr(component, n)]
    if missing:
        what = "None" if component is None else type(component).__name__
        return f"{what} is not a {spec.protocol.__name__}: it lacks {', '.join(missing)}"
    methods = [n for n in names if callable(vars(spec.protocol).get(n)) and not callable(getattr(component, n))]
    if methods:
        return f"{type(component).__name__} is not a {spec.protocol.__name__}: not callable: {', '.join(methods)}"
    own = getattr(component, "capabilities", declared)
    if not isinstance(own, spec.capabilities):
        return f"capabilities must be {spec.capabilities.__name__}, got {type(own).__name__}"
    return _undeclared(own, declared)


def _undeclared(own: object, declared: object) -> str:
    if getattr(own, "anticipates", False) and not getattr(declared, "anticipates", False):
        return "it anticipates, but was registered as if it did not"
    if getattr(own, "exact_under", "") != getattr(declared, "exact_under", "") == "any":
        return "it is exact under non-anticipating schedules alone, but was registered as exact under any"
    return ""
