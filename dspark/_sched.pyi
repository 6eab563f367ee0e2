"""Verify-length schedulers, cost tables and temperature scaling, in Rust.

Arrays are C-contiguous numpy arrays of just the dtype named here; nothing is copied. A wrong shape, NaN, a value out of
range or a rising row of survivals raises ValueError; another type or dtype raises TypeError. R requests, gamma drafted
tokens a request, B executed tokens, tau expected tokens of a round, Theta = tau / seconds of the step.
"""

from collections.abc import Sequence
from typing import TypeAlias, final

import numpy as np
import numpy.typing as npt

_F64: TypeAlias = npt.NDArray[np.float64]
_F32: TypeAlias = npt.NDArray[np.float32]
_I64: TypeAlias = npt.NDArray[np.int64]
_Plan: TypeAlias = tuple[float, float, str]
"""Expected tokens tau, Theta in tokens per second (NaN without a cost table), and the stop reason."""

__all__ = [
    "Causal",
    "CostTable",
    "Global",
    "Lagged",
    "Lookahead",
    "fit_sts",
    "plan_fixed",
    "plan_off",
    "plan_threshold",
    "scale",
    "sts",
    "survival",
]

@final
class CostTable:
    """T_draft(R, gamma) + T_verify(B, context) + T_glue, in seconds. Immutable, hence frozen within a round.

    Args:
        points: (executed tokens, seconds), rising in tokens.
        mode: ``interpolated`` (straight lines between points) or ``staircase`` (a forward of B tokens costs what the
            smallest point of at least B costs). Beyond the last point, the line through the last two goes on.
        draft: (R, gamma, seconds of drafting); straight lines in between. Empty: drafting is free.
        glue: seconds of a step outside forwards.
        noise: relative spread of the measurement; a curve that varies no more is ``flat-cost``.
    """

    def __new__(
        cls,
        points: Sequence[tuple[int, float]],
        *,
        mode: str = "interpolated",
        draft: Sequence[tuple[int, int, float]] = ...,
        glue: float = 0.0,
        noise: float = 0.02,
    ) -> CostTable: ...
    @staticmethod
    def from_buckets(
        buckets: Sequence[tuple[int | None, Sequence[tuple[int, float]]]],
        *,
        mode: str = "interpolated",
        draft: Sequence[tuple[int, int, float]] = ...,
        glue: float = 0.0,
        noise: float = 0.02,
    ) -> CostTable:
        """A curve a context bucket: (largest context of the bucket, points); longer contexts use the last."""

    @staticmethod
    def from_sps(
        points: Sequence[tuple[int, float]],
        *,
        mode: str = "interpolated",
        draft: Sequence[tuple[int, int, float]] = ...,
        glue: float = 0.0,
        noise: float = 0.02,
    ) -> CostTable:
        """From (executed tokens, engine steps per second)."""

    def verify_seconds(self, tokens: int, context: int = 0) -> float:
        """T_verify(B, context)."""

    def draft_seconds(self, requests: int, gamma: int) -> float:
        """T_draft(R, gamma)."""

    def step_seconds(self, tokens: int, requests: int, gamma: int, context: int = 0) -> float:
        """Seconds of a step: drafting, one forward and glue."""

    def throughput(self, tau: float, tokens: int, requests: int, gamma: int, context: int = 0) -> float:
        """Theta of a round that is expected to commit tau tokens."""

    def plain_throughput(self, requests: int, tokens: int | None = None, context: int = 0) -> float:
        """Theta of a plain round: R / (T_verify(tokens, or R) + T_glue)."""

    def flat_over(self, low: int, high: int, context: int = 0) -> bool:
        """True where low..high tokens cost the same within noise."""

    @property
    def flat(self) -> bool:
        """True where all measured points cost the same within noise: extra tokens look free."""

    @property
    def state(self) -> str:
        """``flat-cost`` or ``measured``."""

    @property
    def mode(self) -> str:
        """``interpolated`` or ``staircase``."""

    @property
    def glue(self) -> float:
        """Seconds of a step outside forwards."""

    @property
    def noise(self) -> float:
        """Relative spread of the measurement."""

    @property
    def buckets(self) -> list[tuple[int | None, list[tuple[int, float]]]]:
        """Context buckets and their points; None: no bound."""

    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...

@final
class Causal:
    """Algorithm 1: descending survival (ties by position, then row), up to the first step that does not raise Theta."""

    def __new__(cls) -> Causal: ...
    def plan(
        self, survival: _F64, max_lens: _I64, out: _I64, cost: CostTable, base_tokens: int, context: int = 0
    ) -> _Plan:
        """Write verify lengths [R] to ``out``. ``survival``: [R, gamma]."""

@final
class Global:
    """The best prefix of Algorithm 1's order, in retrospect: exact with ``coupled`` and greedy alone."""

    def __new__(cls) -> Global: ...
    def plan(
        self, survival: _F64, max_lens: _I64, out: _I64, cost: CostTable, base_tokens: int, context: int = 0
    ) -> _Plan:
        """Write verify lengths [R] to ``out``. ``survival``: [R, gamma]."""

@final
class Lookahead:
    """Algorithm 1 that may cross a dip of Theta: an irrevocable walk by running averages of conditional survival."""

    def __new__(cls, prior: float = 0.8) -> Lookahead: ...
    def plan(
        self,
        survival: _F64,
        max_lens: _I64,
        out: _I64,
        cost: CostTable,
        base_tokens: int,
        context: int = 0,
        groups: _I64 | None = None,
    ) -> _Plan:
        """Write verify lengths [R] to ``out``, then learn. ``groups``, [R]: rows of a number share averages."""

    def observe(self, survival: _F64, max_lens: _I64, groups: _I64 | None = None) -> None:
        """Learn a round that was planned otherwise."""

    def averages(self, gamma: int, group: int = 0) -> list[float]:
        """sum a_j / sum a_{j-1} for positions 1..gamma."""

    def seed_averages(self, rates: _F64, group: int = 0, weight: float = 1.0) -> None:
        """Take ``rates``, [gamma], as the averages of a group."""

@final
class Lagged:
    """K from the survivals of two rounds ago, by (slot, generation); the K best current candidates are admitted."""

    def __new__(cls, prior: float = 0.8) -> Lagged: ...
    def plan(
        self,
        survival: _F64,
        max_lens: _I64,
        slots: _I64,
        generations: _I64,
        out: _I64,
        cost: CostTable,
        base_tokens: int,
        context: int = 0,
        groups: _I64 | None = None,
    ) -> _Plan:
        """Write verify lengths [R] to ``out``, then learn these survivals."""

    def observe(
        self, survival: _F64, max_lens: _I64, slots: _I64, generations: _I64, groups: _I64 | None = None
    ) -> None:
        """Learn a round that was planned otherwise."""

    def release(self, slot: int, generation: int) -> None:
        """Forget a request."""

    def __len__(self) -> int: ...
    def seed_history(self, slot: int, generation: int, survival: _F64) -> None:
        """Take ``survival``, [gamma], as what a request had in its last two rounds."""

    def averages(self, gamma: int, group: int = 0) -> list[float]:
        """sum a_j / sum a_{j-1} for positions 1..gamma."""

    def seed_averages(self, rates: _F64, group: int = 0, weight: float = 1.0) -> None:
        """Take ``rates``, [gamma], as the averages of a group."""

def plan_off(
    survival: _F64, max_lens: _I64, out: _I64, base_tokens: int, cost: CostTable | None = None, context: int = 0
) -> _Plan:
    """l = 0."""

def plan_fixed(
    survival: _F64,
    max_lens: _I64,
    out: _I64,
    base_tokens: int,
    length: int | None = None,
    cost: CostTable | None = None,
    context: int = 0,
) -> _Plan:
    """l = min(length, max_lens); without a length, max_lens."""

def plan_threshold(
    probs: _F64,
    survival: _F64,
    max_lens: _I64,
    out: _I64,
    threshold: float,
    base_tokens: int,
    cost: CostTable | None = None,
    context: int = 0,
) -> _Plan:
    """Each draft up to, and without, its first c_k below the threshold. ``probs``: c, [R, gamma]."""

def survival(probs: _F64, max_lens: _I64, out: _F64) -> None:
    """Prefix products of c, 0 at and beyond ``max_lens``, to ``out``; all [R, gamma]."""

def sts(logits: _F32 | _F64, temperatures: _F64, max_lens: _I64, probs: _F64, survival: _F64) -> None:
    """c_k = sigmoid(logit_k / T_k) to ``probs``; its prefix products, 0 at and beyond ``max_lens``, to ``survival``."""

def scale(probs: _F64, temperatures: _F64, out: _F64) -> None:
    """c'_k = sigmoid(logit(c_k) / T_k) to ``out``; T_k = 1 changes nothing."""

def fit_sts(
    logits: _F64,
    offered: _I64,
    accepted: _I64,
    temperatures: _F64,
    ece: _F64,
    grid: _F64 | None = None,
    bins: int = 20,
) -> None:
    """Sequential Temperature Scaling: T_1, T_2, .. in order, each the one of ``grid`` with the product's least ECE.

    ``logits`` [N, gamma], ``offered`` and ``accepted`` [N] of N rounds; the fit goes to ``temperatures`` and its ECE on
    these rounds to ``ece``, [gamma] each. Positions beyond ``offered`` do not count. The grid is 0.1 to 10 in steps of
    2 % where none is given.
    """
