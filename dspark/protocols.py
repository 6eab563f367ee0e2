"""What each kind of component must do. Plain objects: the plugin system builds them, the loop calls them.

Contracts that every component keeps: it reads what it is given and mutates none of it; it keeps per-request state
under (slot, generation) and forgets it at ``release``; it raises ``RowFault`` to attribute a fault to rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from dspark.abilities import PrefixDrafter as PrefixDrafter
from dspark.abilities import PrefixTarget as PrefixTarget
from dspark.abilities import TeacherForced as TeacherForced
from dspark.capabilities import (
    DrafterCapabilities,
    EstimatorCapabilities,
    GammaCapabilities,
    SchedulerCapabilities,
    TargetCapabilities,
    VerifierCapabilities,
)

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

    from dspark.types import (
        BatchView,
        Committed,
        DraftBlock,
        FloatArray,
        GammaChoice,
        GammaInput,
        IntArray,
        RequestView,
        RoundRecord,
        ScheduleInput,
        TargetOutput,
        VerifyInput,
        VerifyLayout,
        VerifyPlan,
        VerifyResult,
    )


@runtime_checkable
class Target(Protocol):
    """The model whose law is decoded. Owns the key-value memory, not its lengths: ``VerifyLayout`` says those.

    Attributes:
        name: what it is, for messages and fingerprints.
        vocab_size: V, width of its logits.
        max_len: most tokens of a slot (after ``allocate``).
        eos_token_ids: ids that end its output.
        num_layers: decoder layers, for taps.
    """

    name: str
    vocab_size: int
    max_len: int
    eos_token_ids: tuple[int, ...]
    num_layers: int
    device: torch.device
    dtype: torch.dtype
    capabilities: TargetCapabilities

    def allocate(self, slots: int, max_len: int | None, budget_bytes: int | None = None) -> int:
        """Make room for ``slots`` requests of ``max_len`` tokens; returns the max_len taken.

        Raises:
            CapacityError: naming the bytes asked and the bytes allowed.
        """
        ...

    def forward(self, layout: VerifyLayout, taps: Sequence[int] = ()) -> TargetOutput:
        """One packed forward. ``taps``: decoder layer ids whose raw output is wanted for every row (-1: embeddings)."""
        ...

    def executed_tokens(self, layout: VerifyLayout) -> int:
        """Tokens that ``forward`` really runs for this layout, padding included; cost tables are keyed by it."""
        ...

    def fingerprint(self) -> Mapping[str, str]:
        """What a measured cost depends on: model, device, dtype, threads, attention, versions."""
        ...


class DraftSampler(Protocol):
    """Turns draft logits into tokens and remembers q: the law sampled from *is* the law accepted with.

    The engine makes one a round; each row is sampled as its mode asks (argmax, one keyed uniform, shared noise).
    """

    def sample(self, logits: Tensor, offset: int, token_map: Tensor | None = None, *, reuse: bool = False) -> Tensor:
        """Sample x_{offset+1} of every row.

        Args:
            logits: corrected draft logits, [R, Vd], before temperature. Rows of -inf alone are an error.
            offset: 0 for x_1.
            token_map: draft id -> target id, [Vd], for a pruned vocabulary; or [R, K], the target ids of the K
                candidates that each row's logits are of.
            reuse: hands ``logits`` over: q may be kept in their memory, and the caller reads them no more.

        Returns:
            Target ids, [R] int64.
        """
        ...

    def finish(self, lens: IntArray | None = None, **block: Any) -> DraftBlock:
        """The block of what was sampled; ``block`` sets DraftBlock's ``hidden`` and ``features``."""
        ...

    def point_mass(self, token_ids: Tensor, lens: IntArray, **block: Any) -> DraftBlock:
        """A block whose tokens are a function of history: q = 1 at them."""
        ...


@runtime_checkable
class Drafter(Protocol):
    """Proposes gamma tokens a request.

    Attributes:
        max_gamma: most tokens a round; None for any.
        default_gamma: gamma where the config names none.
        tap_layers: target layers whose outputs it reads (empty: none).
    """

    max_gamma: int | None
    default_gamma: int
    tap_layers: tuple[int, ...]
    capabilities: DrafterCapabilities

    def propose(self, batch: BatchView, sampler: DraftSampler) -> DraftBlock:
        """Draft ``batch.gamma`` tokens a row, fewer where it has none; lengths are decided before sampling."""
        ...

    def commit(self, committed: Sequence[Committed]) -> None:
        """Learn what a step added (with taps), prefill included. Rejected tokens never appear here."""
        ...

    def release(self, slot: int, generation: int) -> None:
        """Forget a request."""
        ...


@runtime_checkable
class SequentialHead(Protocol):
    """B_k(x_0, x_{<k}, .): the bias added to base logits, left to right (METHOD eqs. 4-6).

    A head may also have ``project``; its ``step`` then takes ``candidates`` [R, K], draft ids, as a fourth argument,
    and gives the bias [R, K] of those alone.
    """

    def start(self, anchors: Tensor, hidden: Tensor) -> Any:
        """State before x_1, from anchors [R] and hidden [R, gamma, d]: anything, for it is only handed to ``step``."""
        ...

    def step(self, state: Any, prev: Tensor, hidden: Tensor) -> tuple[Tensor, Any]:
        """Bias [R, Vd] of the next position from the previous token [R] and its hidden state [R, d]."""
        ...

    def block(self, prev: Tensor, hidden: Tensor) -> Tensor:
        """The same for a teacher-forced block: prev [R, gamma], hidden [R, gamma, d] -> [R, gamma, Vd]."""
        ...


@runtime_checkable
class ConfidenceEstimator(Protocol):
    """c_k: estimate of P(x_k accepted | x_1..x_{k-1} accepted). It may see x_{<k} and history, never x_k."""

    capabilities: EstimatorCapabilities

    def estimate(self, batch: BatchView, draft: DraftBlock) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Probabilities c in [0, 1], [R, gamma]. State is frozen within a round."""
        ...

    def observe(self, record: RoundRecord) -> None:
        """Learn from a finished round."""
        ...

    def release(self, slot: int, generation: int) -> None:
        """Forget a request."""
        ...


@runtime_checkable
class Calibrator(Protocol):
    """Maps c to calibrated c', position by position (Sequential Temperature Scaling, METHOD section 3)."""

    def calibrate(self, probs: FloatArray, batch: BatchView) -> FloatArray:
        """[R, gamma] -> [R, gamma]; entry k may depend on entries <= k alone."""
        ...


@runtime_checkable
class VerifyScheduler(Protocol):
    """Decides l_r (METHOD section 4)."""

    capabilities: SchedulerCapabilities

    def plan(self, batch: ScheduleInput, cost: Any | None) -> VerifyPlan:
        """Verify lengths, 0 <= l_r <= max_lens[r]. ``cost``: dspark._sched.CostTable, or None."""
        ...

    def release(self, slot: int, generation: int) -> None:
        """Forget a request."""
        ...


@runtime_checkable
class GammaPolicy(Protocol):
    """Decides, before drafting and from history alone, how many tokens each row drafts; 0 for none.

    Whatever it decides is exact: no token of the round exists yet. It is asked once a round, for the rows that could
    draft, and told of every round, plain ones included.
    """

    capabilities: GammaCapabilities

    def choose(self, batch: GammaInput, cost: Any | None) -> GammaChoice:
        """g_r of every row, 0 <= g_r <= batch.gamma. ``cost``: dspark._sched.CostTable, or None."""
        ...

    def observe(self, record: RoundRecord) -> None:
        """Learn from a finished round."""
        ...

    def release(self, slot: int, generation: int) -> None:
        """Forget a request."""
        ...


@runtime_checkable
class Verifier(Protocol):
    """Decides which drafts are accepted and which token follows them."""

    capabilities: VerifierCapabilities

    def verify(self, batch: VerifyInput) -> VerifyResult:
        """All requests of one mode; random decisions are taken from ``batch.draws`` alone."""
        ...


@runtime_checkable
class RoundObserver(Protocol):
    """Sees every finished round. A fault in it is reported once and it is dropped; no request is affected."""

    def on_round(self, record: RoundRecord) -> None: ...

    def on_finish(self, request: RequestView, reason: str) -> None: ...


@runtime_checkable
class LogitsProcessor(Protocol):
    """A custom processor of one request, between penalties and temperature. A function of the request's tokens.

    The engine calls ``fork()`` before a round, feeds drafts to the fork with ``advance``, drops it, and calls
    ``advance`` on the original for committed tokens alone: rejected tokens never reach it.
    """

    def fork(self) -> LogitsProcessor:
        """A copy whose advances do not reach this one."""
        ...

    def advance(self, token_id: int) -> None:
        """One more token of the output."""
        ...

    def process(self, logits: Tensor) -> Tensor:
        """[V] -> [V] for the next token; may mask with -inf."""
        ...


@dataclass(frozen=True, slots=True)
class BuildContext:
    """What a factory may use to build its component.

    Attributes:
        target: the target, or None while the target itself is built.
        vocab_size, gamma, max_slots, device, dtype: of the engine being built (0 and None while unknown).
        drafter: the built drafter, for estimators and calibrators that read its weights.
        resolve: build another component: ``resolve(kind, name, config)`` (a drafter builds its sequential head so).
        nested: (component, ``dist/name``, version) of what was built through ``resolve``; their faults are their own.
        extras: ``verifiers``, for estimators: mode -> registered name of the verifier that decides it; ``prunes``, for
            gamma policies: True where the scheduler shortens drafts by what they cost; ``kernels``, for verifiers:
            operation -> ``dspark.ops.dispatch.Choice``.
    """

    target: Any = None
    vocab_size: int = 0
    gamma: int = 0
    max_slots: int = 1
    device: Any = None
    dtype: Any = None
    drafter: Any = None
    resolve: Any = None
    extras: Mapping[str, Any] = field(default_factory=dict)
    nested: list[tuple[Any, str, str]] = field(default_factory=list)
