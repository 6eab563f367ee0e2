"""The values that flow through a decoding round.

Shapes: R requests (rows), gamma drafted tokens a row (the block size), V vocabulary, B = sum of query lengths,
d width of the drafter. Everything here is frozen: a component reads it and returns a new value.
Host decisions (lengths, plans, outcomes) are numpy; token and logit tensors live on the target's device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from dspark.errors import ConfigError
from dspark.tokens import TokenView as TokenView
from dspark.views import BatchView as BatchView
from dspark.views import BoolArray as BoolArray
from dspark.views import FloatArray as FloatArray
from dspark.views import IntArray as IntArray
from dspark.views import KeyArray as KeyArray
from dspark.views import Mode as Mode
from dspark.views import Purpose as Purpose
from dspark.views import RequestView as RequestView

if TYPE_CHECKING:
    from torch import Tensor

    from dspark.config import SamplingParams


@dataclass(frozen=True, slots=True)
class DrawKeys:
    """Keys of n random draws: (request key, anchor position of the round, offset, purpose): METHOD 4, rule 4."""

    request: KeyArray
    anchor: IntArray
    offset: IntArray
    purpose: Purpose

    def __len__(self) -> int:
        return len(self.request)


@runtime_checkable
class DraftDistribution(Protocol):
    """q: the law that the drafted tokens were sampled from. One object serves sampling and acceptance."""

    def token_probs(self) -> Tensor:
        """q(x_k) of every drafted token, [R, gamma]."""
        ...

    def probs(self, rows: IntArray, positions: IntArray) -> Tensor:
        """q at n (row, position) pairs over the target's vocabulary, [n, V]."""
        ...


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """What a drafter proposes.

    Attributes:
        token_ids: x_1..x_gamma, target ids, [R, gamma] int64; entries at or beyond ``lens`` mean nothing.
        lens: how many tokens each row really has, [R]; decided before any of them is sampled.
        q: the distribution that they were sampled from.
        hidden: the backbone's hidden states [R, gamma, d], where there are any.
        features: anything else for estimators (such as the Markov embedding of x_{k-1}), [R, gamma, ...]; position k
            must be a function of x_{<k} and of history.
    """

    token_ids: Tensor
    lens: IntArray
    q: DraftDistribution
    hidden: Tensor | None = None
    features: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Confidence:
    """c_k = P(x_k accepted | x_1..x_{k-1} accepted) and a_k = prod_{i<=k} c_i, both [R, gamma]."""

    probs: FloatArray
    survival: FloatArray


@dataclass(frozen=True, slots=True)
class ScheduleInput:
    """What a scheduler may read.

    Attributes:
        probs: c, [R, gamma].
        survival: a, [R, gamma]; non-increasing along a row, 0 at and beyond ``max_lens``.
        max_lens: the longest prefix of each row that may be verified, [R].
        slots, generations: identity of each row, [R].
        base_tokens: tokens that the forward executes at l = 0: anchors, pending tokens and prefill.
        context, gamma: the longest context in the batch, in tokens, for context buckets; block size of this round.
        groups: rows of one number share running averages: one verifier and temperature, [R]; None for one group.
    """

    probs: FloatArray
    survival: FloatArray
    max_lens: IntArray
    slots: IntArray
    generations: IntArray
    base_tokens: int
    context: int
    gamma: int
    groups: IntArray | None = None


@dataclass(frozen=True, slots=True)
class GammaInput:
    """What a gamma policy may read: everything is known before anything of the round is drawn.

    Attributes:
        requests: the R rows that could draft, in row order.
        gamma: the longest block that may be asked for.
        decoding: decoding rows of the step, D >= R; each commits a token at least.
        base_tokens: tokens that the forward executes without drafts: anchors, pending tokens and prompt chunks.
        context: the longest context of the step, in tokens.
        groups: rows of one number share averages: one verifier and temperature, [R].
    """

    requests: tuple[RequestView, ...]
    gamma: int
    decoding: int
    base_tokens: int
    context: int
    groups: IntArray


@dataclass(frozen=True, slots=True)
class GammaChoice:
    """How many tokens each row may draft in the coming round.

    Attributes:
        gammas: g_r in 0..gamma, [R]; the block is as long as the longest, and rows of 0 do not draft.
        reason: why the round is what it is: ``drafting``, ``probe``, ``guard``, ``early-exit``, ``static``, ...
        row_reasons: why rows were left out or shortened -> how many of them.
        gain: predicted Theta of drafting over that of a plain round, minus 1; NaN where nothing was predicted. Where
            the round is plain, this is the gain that it was weighed by.
        verify_all: everything that is drafted is verified, whatever the scheduler would say: a probe, which would teach
            nothing where a scheduler that expects little verifies nothing.
    """

    gammas: IntArray
    reason: str
    row_reasons: Mapping[str, int] = field(default_factory=dict)
    gain: float = float("nan")
    verify_all: bool = False


@dataclass(frozen=True, slots=True)
class VerifyPlan:
    """How much of each draft to verify.

    Attributes:
        verify_lens: l_r, without the anchor, [R].
        expected_accepts: sum_r (1 + sum_{j<=l_r} a_{r,j}), the expected tokens of the round.
        throughput: the predicted Theta in tokens per second; NaN without a cost table.
        stop_reason: why the scheduler stopped where it did; or the named state (``no-cost-table``, ``flat-cost``).
    """

    verify_lens: IntArray
    expected_accepts: float
    throughput: float
    stop_reason: str


@dataclass(frozen=True, slots=True)
class VerifyLayout:
    """One packed target forward: S sequences, B = cu_query_lens[-1] query tokens.

    Sequence s owns rows cu_query_lens[s]:cu_query_lens[s+1]; its tokens stand at consecutive absolute positions, and
    each attends to positions 0..its own of its slot. The target writes their keys and values there: what an earlier
    round left at these positions is stale and overwritten, so rollback is a shorter start position, not a copy.

    Attributes:
        token_ids: [B] int64.
        positions: absolute positions, [B] int64.
        slots: slot of each sequence, [S].
        cu_query_lens: [S + 1], from 0 to B.
        logit_rows: rows of [B] whose logits are wanted, strictly increasing, [N].
    """

    token_ids: Tensor
    positions: Tensor
    slots: IntArray
    starts: IntArray
    cu_query_lens: IntArray
    logit_rows: IntArray

    def __post_init__(self) -> None:
        n = int(self.token_ids.shape[0])
        cu = self.cu_query_lens
        if len(cu) != len(self.slots) + 1 or len(self.starts) != len(self.slots):
            raise ConfigError(f"VerifyLayout: {len(self.slots)} slots, {len(cu)} offsets, {len(self.starts)} starts")
        if cu[0] != 0 or cu[-1] != n or (np.diff(cu) < 1).any():
            raise ConfigError(f"VerifyLayout: cu_query_lens must rise from 0 to {n}, got {cu.tolist()}")
        if self.positions.shape != self.token_ids.shape:
            raise ConfigError("VerifyLayout: positions and token_ids differ in shape")
        if len(np.unique(self.slots)) != len(self.slots):
            raise ConfigError(f"VerifyLayout: a slot appears twice: {self.slots.tolist()}")
        rows = self.logit_rows
        if len(rows) and (rows[0] < 0 or rows[-1] >= n or (np.diff(rows) < 1).any()):
            raise ConfigError(f"VerifyLayout: logit_rows must be increasing rows of 0..{n - 1}")

    @property
    def num_tokens(self) -> int:
        """B: tokens that the forward executes."""
        return int(self.cu_query_lens[-1])

    @property
    def query_lens(self) -> IntArray:
        """Query tokens of each sequence, [S]."""
        return np.diff(self.cu_query_lens)


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """Logits of ``layout.logit_rows`` [N, V] and, where asked for, taps of all rows [B, m * d_t]."""

    logits: Tensor
    taps: Tensor | None = None


@dataclass(frozen=True, slots=True)
class VerifyInput:
    """What a verifier decides from: R requests of its mode.

    Attributes:
        scores: the target's *processed* logits, [N, V]; masked tokens are -inf. Row r's anchor is at
            ``row_starts[r]``, its k-th draft's row at ``row_starts[r] + k``.
        row_starts, verify_lens: of each request, [R]; verify_lens is l_r.
        draft_ids: [R, gamma] on the device.
        q: the draft's law, and ``draft_rows`` [R] the rows of it that these requests are.
        keys, anchors: request keys or seeds, and absolute positions of the anchors, [R].
        draws: where every random decision is taken.
        unwarped: parameters of each request, R of them, whose temperature, top-k, top-p and min-p ``scores`` have yet
            to pass: for a verifier that declares ``unwarped``. None where they have passed them.
    """

    scores: Tensor
    row_starts: IntArray
    verify_lens: IntArray
    draft_ids: Tensor
    q: DraftDistribution
    draft_rows: IntArray
    keys: KeyArray
    anchors: IntArray
    draws: DrawSource
    unwarped: tuple[SamplingParams, ...] | None = None


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """Accepted drafts and the corrected, bonus or emitted token of each request, both [R]."""

    num_accepted: IntArray
    next_ids: IntArray


@dataclass(frozen=True, slots=True)
class Committed:
    """What a round added to one request, cut at stop, EOS and max_tokens before anything is streamed or counted.

    Attributes:
        request: the view that the round began with.
        row: its row in the round's DraftBlock, or -1 if it did not draft.
        new_ids: committed tokens in order.
        offered, accepted: drafts that were verified (l_r) and accepted; what lies beyond a cut counts as neither.
        num_cached: valid target cache entries from now on.
        taps: tap rows of the newly *cached* positions, [num_cached - request.num_cached, m * d_t], or None.
        finish_reason: ``stop``, ``length``, ``abort``, ``error``, or None while it goes on.
        entropy: of the target's processed law that the last new token was decided from, in nats; NaN where nobody
            asked for it.
    """

    request: RequestView
    row: int
    new_ids: tuple[int, ...]
    offered: int
    accepted: int
    num_cached: int
    taps: Tensor | None = None
    finish_reason: str | None = None
    entropy: float = float("nan")


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One engine step, for observers: what was drafted, planned, verified and committed, and how long it took.

    Attributes:
        index: step number of the engine.
        batch: the rows that drafted, or None in a plain step.
        draft, confidence, plan: None in a plain step.
        committed: one entry a request that decoded or prefilled in the step.
        executed_tokens: B, as executed by the target.
        seconds: time of each phase.
        unproven: True where a batch-wide fault left ``rejection`` rows without a proof of exactness.
        choice: what the gamma policy decided before the round, and what it knew; None where no row could draft.
    """

    index: int
    batch: BatchView | None
    draft: DraftBlock | None
    confidence: Confidence | None
    plan: VerifyPlan | None
    committed: tuple[Committed, ...]
    executed_tokens: int
    seconds: Mapping[str, float]
    unproven: bool = False
    choice: tuple[GammaInput, GammaChoice] | None = None


class DrawSource(Protocol):
    """Where every random decision is taken. Production hashes counters; the tests' enumerator branches."""

    def categorical(self, keys: DrawKeys, probs: Tensor) -> Tensor:
        """One draw from each row of ``probs`` [n, V] (rows sum to 1), [n] int64."""
        ...

    def accept(self, keys: DrawKeys, probs: Tensor) -> BoolArray:
        """True with probability ``probs`` [n], independently, [n]."""
        ...

    def gumbel(self, seeds: KeyArray, positions: IntArray, vocab_size: int, token_ids: Tensor | None = None) -> Tensor:
        """Gumbel noise of n (seed, absolute position) pairs for every target token id, [n, V] float32, or for
        ``token_ids`` [m] or [n, m] alone, [n, m]. A function of (seed, position, token id); never +inf."""
        ...
