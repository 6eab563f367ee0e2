"""The first half of a round: draft, confidence, schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dspark.engine.faults import RoundFaults
from dspark.engine.parts import Parts
from dspark.engine.state import RequestState
from dspark.errors import ComponentError, RowFault
from dspark.types import BatchView, Confidence, DraftBlock, FloatArray, IntArray, RequestView, ScheduleInput, VerifyPlan


@dataclass(frozen=True, slots=True)
class Drafting:
    """The rows that draft in this step, in the order of ``batch``."""

    rows: tuple[RequestState, ...]
    batch: BatchView
    verify_all: bool = False


def select(parts: Parts, decode: tuple[RequestState, ...], views: dict[RequestState, RequestView]) -> Drafting | None:
    """Rows that may draft: they have room for one, and taps of all before the anchor where the drafter reads them."""
    if parts.gamma == 0 or not parts.drafting:
        return None
    taps = parts.drafter.capabilities.needs_taps
    rows = tuple(r for r in decode if r.max_draft > 0 and not (taps and r.pending > 1))
    if not rows:
        return None
    return Drafting(rows, BatchView(tuple(views[r] for r in rows), parts.gamma))


def draft(parts: Parts, faults: RoundFaults, drafting: Drafting, sampler: Any) -> DraftBlock | None:
    """The drafter's block. Where it raised, what had been sampled by then (no draw is thrown away), or None."""

    def propose() -> DraftBlock:
        block: DraftBlock = parts.drafter.propose(drafting.batch, sampler)
        rows = len(drafting.rows)
        if block.token_ids.dim() != 2 or block.token_ids.shape[0] != rows or len(block.lens) != rows:
            raise ComponentError(
                f"expected token_ids [{rows}, gamma] and {rows} lens, "
                f"got {tuple(block.token_ids.shape)} and {len(block.lens)}"
            )
        if (block.lens < 0).any() or (block.lens > min(block.token_ids.shape[1], drafting.batch.gamma)).any():
            raise ComponentError(f"lens {block.lens.tolist()} outside 0..{block.token_ids.shape[1]}")
        check_tokens(block, parts.target.vocab_size)
        return block

    block = faults.plan_phase("draft", "drafter", drafting.rows, propose)
    if block is None:
        block = sampler.finish()
    return block if block is not None and block.lens.any() else None


def check_tokens(block: DraftBlock, vocab_size: int) -> None:
    """Raises:
    RowFault: rows with a drafted token that the target's embedding does not have.
    """
    ids = block.token_ids.cpu().numpy()
    drafted = np.arange(ids.shape[1]) < block.lens[:, None]
    bad = np.flatnonzero((drafted & ((ids < 0) | (ids >= vocab_size))).any(axis=1))
    if len(bad):
        raise RowFault(f"drafted tokens outside the target's vocabulary of {vocab_size} in rows {bad.tolist()}", bad)


def estimate(parts: Parts, faults: RoundFaults, drafting: Drafting, block: DraftBlock) -> Confidence | None:
    """Calibrated confidences and their products along each row, 0 beyond what may be verified."""
    if faults.forced or not parts.planning:
        return None

    def checked(probs: FloatArray) -> FloatArray:
        probs = np.asarray(probs, dtype=np.float64)
        if probs.shape != block.token_ids.shape or not ((probs >= 0) & (probs <= 1)).all():
            raise ComponentError(f"expected {tuple(block.token_ids.shape)} probabilities in [0, 1], got {probs}")
        return probs

    def run(kind: str, call: Callable[[], FloatArray]) -> FloatArray | None:
        return faults.plan_phase("confidence", kind, drafting.rows, lambda: checked(call()))

    raw = run("estimator", lambda: parts.estimator.estimate(drafting.batch, block))
    probs = None if raw is None else run("calibrator", lambda: parts.calibrator.calibrate(raw, drafting.batch))
    if probs is not None:
        return Confidence(probs, survival(probs, max_lens(drafting, block)))
    return None


def max_lens(drafting: Drafting, block: DraftBlock) -> IntArray:
    """The longest prefix of each row that can be committed."""
    room = np.fromiter((v.max_draft for v in drafting.batch.requests), dtype=np.int64, count=len(drafting.rows))
    return np.minimum(block.lens, room)


def survival(probs: FloatArray, lens: IntArray) -> FloatArray:
    """a_{r,j} = prod_{i<=j} c_{r,i} (METHOD section 4), 0 for j > lens[r]."""
    products: FloatArray = np.cumprod(probs, axis=1, dtype=np.float64)
    products[np.arange(probs.shape[1])[None, :] >= lens[:, None]] = 0.0
    return products


def schedule(
    parts: Parts,
    faults: RoundFaults,
    drafting: Drafting,
    block: DraftBlock,
    confidence: Confidence | None,
    base_tokens: int,
    context: int,
) -> VerifyPlan:
    """Verify lengths. Without a plan (a fault, a missing cost table) they are fixed, and the reason says so."""
    lens = max_lens(drafting, block)
    if confidence is None:
        return fixed_plan(lens, None if faults.forced else parts.fixed_gamma, "fault" if faults.forced else "degraded")
    if drafting.verify_all:
        return fixed_plan(lens, None, "probe", confidence)
    if parts.cost is None and parts.scheduler.capabilities.needs_cost:
        return fixed_plan(lens, parts.fixed_gamma, "no-cost-table", confidence)
    views = drafting.batch.requests
    request = ScheduleInput(
        probs=confidence.probs,
        survival=confidence.survival,
        max_lens=lens,
        slots=np.array([v.slot for v in views], dtype=np.int64),
        generations=np.array([v.generation for v in views], dtype=np.int64),
        base_tokens=base_tokens,
        context=context,
        gamma=drafting.batch.gamma,
        groups=np.array([parts.group(v) for v in views], dtype=np.int64),
    )

    def run() -> VerifyPlan:
        plan = parts.scheduler.plan(request, parts.cost)
        verify = plan.verify_lens
        if verify.shape != lens.shape or verify.dtype.kind not in "iu" or ((verify < 0) | (verify > lens)).any():
            raise ComponentError(f"verify_lens: expected integers in 0..{lens.tolist()}, got {verify.tolist()}")
        return plan

    plan = faults.plan_phase("schedule", "scheduler", drafting.rows, run)
    return plan if plan is not None else fixed_plan(lens, None, "fault")


def fixed_plan(lens: IntArray, most: int | None, reason: str, confidence: Confidence | None = None) -> VerifyPlan:
    """Verify a fixed length of every draft."""
    verify = lens.copy() if most is None else np.minimum(lens, most)
    expected = float(len(lens))
    if confidence is not None:
        inside = np.arange(confidence.survival.shape[1])[None, :] < verify[:, None]
        expected += float((confidence.survival * inside).sum())
    return VerifyPlan(verify, expected, float("nan"), reason)


def pad_lengths(plan: VerifyPlan, lens: IntArray) -> VerifyPlan:
    """For a target without ragged batches: the longest scheduled length for all, since padding runs them anyway.

    The shortest would anticipate: another row's low confidence would shorten this one after its draft was drawn.
    """
    longest = int(plan.verify_lens.max(initial=0))
    verify = np.minimum(lens, longest)
    return VerifyPlan(verify, plan.expected_accepts, plan.throughput, f"{plan.stop_reason}+ragged-padding")
