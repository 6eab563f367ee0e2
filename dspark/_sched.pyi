"""Verify-length schedulers, cost tables, temperature scaling and a simulator of the engine, in Rust.

Arrays are C-contiguous numpy arrays of just the dtype named here; nothing is copied. A wrong shape, NaN, a value out of
range or a rising row of survivals raises ValueError; another type or dtype raises TypeError. R requests, gamma drafted
tokens a request, B executed tokens, tau expected tokens of a round, Theta = tau / seconds of the step.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias, final

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
    "Roofline",
    "Trace",
    "fit_sts",
    "plan_fixed",
    "plan_off",
    "plan_threshold",
    "scale",
    "simulate",
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

@final
class Trace:
    """Recorded drafts of N requests: M rounds, gamma tokens at most.

    Args:
        prompt, output, most: prompt tokens, output tokens and max_tokens of each request, [N].
        offsets: the rounds of request i are ``offsets[i]:offsets[i + 1]``, [N + 1].
        at: output tokens before each round, [M], rising within a request.
        drafted: drafted tokens, [M].
        accepted: how many of them, from the first, the target accepts, [M].
        probs: c, [M, gamma].
        taps: the drafter reads the target's features, so that nothing is drafted in the step that reads a prompt.
    """

    def __new__(
        cls,
        prompt: _I64,
        output: _I64,
        most: _I64,
        offsets: _I64,
        at: _I64,
        drafted: _I64,
        accepted: _I64,
        probs: _F64,
        *,
        taps: bool = False,
    ) -> Trace: ...
    def __len__(self) -> int: ...
    @property
    def rounds(self) -> int:
        """M."""

    @property
    def gamma(self) -> int:
        """Longest draft."""

    @property
    def taps(self) -> bool:
        """Whether nothing is drafted in the step that reads a prompt."""

    @property
    def rates(self) -> list[float]:
        """Share of the drafts that reached position k and were accepted there, [gamma]."""

@final
class Roofline:
    """A machine by its limits: T = max((P w + k C) / bandwidth, (2 P B + f A) / flops), in seconds.

    B executed tokens, C cached tokens that attention reads, A attended (query, key) pairs.

    Args:
        parameters: P, parameters that a token passes through.
        bandwidth: bytes a second.
        flops: operations a second.
        draft_parameters: of the drafter; 0 for one that costs nothing.
        parameter_bytes: w, bytes of a parameter.
        cache_bytes: k, bytes of keys and values of a token over all layers.
        pair_flops: f, operations of a pair over all layers.
        glue: constant seconds a step.
    """

    def __new__(
        cls,
        parameters: float,
        bandwidth: float,
        flops: float,
        *,
        draft_parameters: float = 0.0,
        parameter_bytes: float = 2.0,
        cache_bytes: float = 0.0,
        pair_flops: float = 0.0,
        glue: float = 0.0,
    ) -> Roofline: ...
    def table(self, contexts: Sequence[int], most_tokens: int, requests: int, gamma: int) -> CostTable:
        """The table that a profile of this machine would be: a bucket a context, which must rise."""

    def verify_seconds(self, tokens: int, cached: int = ..., pairs: int = ...) -> float:
        """Seconds of a forward."""

    def draft_seconds(self, requests: int, gamma: int) -> float:
        """Seconds of a draft."""

def simulate(
    trace: Trace,
    cost: CostTable,
    *,
    requests: int,
    concurrency: int | None = None,
    rate: float | None = None,
    scheduler: str = "causal",
    gamma: int | None = None,
    adaptive: float | None = None,
    length: int | None = None,
    threshold: float = 0.5,
    confidence: str = "recorded",
    roofline: Roofline | None = None,
    shuffle: bool = False,
    replicas: int = 1,
    max_slots: int = 32,
    step_tokens: int = 512,
    kv_tokens: int | None = None,
    extra_prompt: int = 0,
    seed: int = 0,
) -> dict[str, Any]:
    """Replay a trace as the engine would run it; a function of its arguments.

    Args:
        trace: what is drafted and accepted where.
        cost: what schedulers plan with and, without ``roofline``, what steps take.
        requests: how many come in all; the trace is gone through again and again.
        concurrency: closed loop: so many are in the system, one comes as another ends.
        rate: open loop: so many a second, Poisson. One of the two is given.
        scheduler: one of the package's names, or ``clairvoyant``: only what will be accepted is verified.
        gamma: drafted tokens a round; None for the trace's.
        adaptive: choose gamma up to ``gamma`` by cost and history; the value is the guard's threshold.
        length: verify length of ``fixed``; None for all.
        threshold: of ``threshold``.
        confidence: ``recorded``, ``learned`` from the replay's own outcomes, or ``oracle``.
        roofline: what steps really take.
        shuffle: go through the trace in a new random order each time.
        replicas: engines; a request goes to the one with the fewest.
        max_slots, step_tokens: as in EngineConfig.
        kv_tokens: cache tokens of an engine, of which a request holds its prompt and max_tokens.
        extra_prompt: tokens that every prompt is longer than recorded.
        seed: decides all that is random.

    Returns:
        Totals, and ``records``: columns with an entry a request in the order of arrival.
    """
