"""What a component declares of itself when it is registered. The build reads it; the property tests are what counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TargetCapabilities:
    """Attributes:
    ragged: takes sequences of different query lengths in one forward. Without it, the longest scheduled length is
        verified for all.
    taps: can return hidden states of chosen layers.
    """

    ragged: bool = True
    taps: bool = True


@dataclass(frozen=True, slots=True)
class DrafterCapabilities:
    """Attributes:
    needs_taps: reads the target's hidden states, so it can draft only for requests whose prompt is in the cache.
    max_gamma: the most tokens that it can draft a round; None for any.
    point_mass: q is a point mass (its tokens are a function of history).
    deterministic: proposals are a function of the request's own tokens (and the draws), not of neighbours or time.
    """

    needs_taps: bool = False
    max_gamma: int | None = None
    point_mass: bool = False
    deterministic: bool = True


@dataclass(frozen=True, slots=True)
class HeadCapabilities:
    """Attributes:
    stateful: ``step`` needs the state of the steps before it. Without it, a position is a function of its previous
        token and hidden state alone.
    """

    stateful: bool = False


@dataclass(frozen=True, slots=True)
class EstimatorCapabilities:
    """Attributes:
    anticipates: c_k reads x_k or later draft tokens. Biases ``rejection``; refused under ``lossless="strict"``.
    shared_state: c depends on other requests' history, so lengths (not laws) depend on neighbours.
    needs_hidden: reads ``DraftBlock.hidden``.
    """

    anticipates: bool = False
    shared_state: bool = False
    needs_hidden: bool = False


@dataclass(frozen=True, slots=True)
class CalibratorCapabilities:
    """Attributes:
    monotone: keeps the order of each factor's values.
    """

    monotone: bool = True


@dataclass(frozen=True, slots=True)
class SchedulerCapabilities:
    """Attributes:
    anticipates: may decide l_r >= k from a value that x_k or a later token influenced (retrospective). Exact only with
        ``coupled`` and greedy; refused with ``rejection`` under ``lossless="strict"``.
    needs_cost: plans against a cost table; without one the engine verifies a fixed length and says so.
    """

    anticipates: bool = False
    needs_cost: bool = False


@dataclass(frozen=True, slots=True)
class GammaCapabilities:
    """Attributes:
    needs_cost: weighs drafting against a cost table; without one it can't choose.
    needs_entropy: reads ``Committed.entropy``, which the engine computes for it alone.
    """

    needs_cost: bool = False
    needs_entropy: bool = False


@dataclass(frozen=True, slots=True)
class VerifierCapabilities:
    """Attributes:
    exact_under: ``non-anticipating`` or ``any`` schedule.
    pathwise: the output is a function of seed and target alone.
    unwarped: it applies temperature, top-k, top-p and min-p itself. It is then given scores that have not passed them,
        and each request's settings in ``VerifyInput.unwarped``.
    """

    exact_under: str = "non-anticipating"
    pathwise: bool = False
    unwarped: bool = False


@dataclass(frozen=True, slots=True)
class KernelCapabilities:
    """Attributes:
    devices: device types it runs on.
    dtypes: names of the dtypes it takes; empty for any floating dtype.
    """

    devices: tuple[str, ...] = ("cpu",)
    dtypes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PresetCapabilities:
    """Attributes:
    target: what the preset fits, in words.
    models: target ids that it fits; ``*`` and ``?`` match as in file names, case does not count.
    config_hashes: ``fingerprint()["config"]`` of targets that it fits, whatever they are called.
    """

    target: str = ""
    models: tuple[str, ...] = ()
    config_hashes: tuple[str, ...] = ()


Capabilities = (
    TargetCapabilities
    | DrafterCapabilities
    | HeadCapabilities
    | EstimatorCapabilities
    | CalibratorCapabilities
    | SchedulerCapabilities
    | GammaCapabilities
    | VerifierCapabilities
    | KernelCapabilities
    | PresetCapabilities
)
