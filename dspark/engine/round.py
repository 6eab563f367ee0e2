"""One decoding round: draft, confidence, schedule, pack, target, process, verify, commit (paper, section 3)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from dspark.engine import planning
from dspark.engine.batcher import Work
from dspark.engine.choosing import choose
from dspark.engine.commit import commit
from dspark.engine.faults import RoundFaults
from dspark.engine.pack import Packed, pack
from dspark.engine.parts import Parts
from dspark.engine.replay import RecordedDraws
from dspark.engine.state import Chunk, RequestState
from dspark.engine.verification import process, verify
from dspark.errors import ComponentError
from dspark.sampling.draft import RoundSampler
from dspark.types import Committed, RoundRecord, TargetOutput


@dataclass(slots=True)
class Outcome:
    """What a step did: the record for observers, the chunks for callers, the faults it met."""

    record: RoundRecord
    chunks: list[Chunk]
    faults: RoundFaults
    prefill_tokens: int = 0
    low_margins: int = 0


@dataclass(slots=True)
class Clock:
    """Seconds of each phase of one step."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - began


def run_round(parts: Parts, work: Work, index: int) -> Outcome:
    """Run one step for every active request. Random decisions, and what was learnt before it, are all it depends on."""
    clock, draws = Clock(), RecordedDraws(parts.draws)
    faults = RoundFaults(parts, draws)
    views = {r: r.view() for r in work.requests}
    base_tokens = work.base_tokens
    with clock("gamma"):
        drafting, choice = choose(parts, faults, work, planning.select(parts, work.decode, views))
    block = confidence = plan = None
    if drafting is not None:
        target, kernel = parts.target, parts.kernel("bias_sample")
        sampler = RoundSampler(drafting.batch, draws, target.vocab_size, target.device, kernel)
        with clock("draft"):
            block = planning.draft(parts, faults, drafting, sampler)
    if drafting is not None and block is not None:
        with clock("confidence"):
            confidence = planning.estimate(parts, faults, drafting, block)
        with clock("schedule"):
            plan = planning.schedule(parts, faults, drafting, block, confidence, base_tokens, work.context)
            if not parts.target.capabilities.ragged:
                plan = planning.pad_lengths(plan, planning.max_lens(drafting, block))
    rows = drafting.rows if drafting is not None else ()

    def lay_out() -> Packed | None:
        return pack(work, set(faults.failed), rows, block, plan, parts.target.device)

    with clock("pack"):
        packed = lay_out()
    chunks: list[Chunk] = []
    committed: list[Committed] = []
    executed = low = 0
    if packed is not None:
        with clock("target"):
            packed, output, executed = forward(parts, faults, packed, lay_out)
        if output is not None:
            with clock("process"):
                scores, alive = process(parts, faults, packed, output)
            with clock("verify"):
                verified = verify(parts, faults, draws, packed, scores, alive, block)
                low = verified.low_margins
            with clock("commit"):
                committed, chunks = commit(packed, views, rows, output, verified, faults)
    record = RoundRecord(
        index=index,
        batch=drafting.batch if drafting is not None else None,
        draft=block,
        confidence=confidence,
        plan=plan,
        committed=tuple(committed),
        executed_tokens=executed,
        seconds=clock.seconds,
        unproven=faults.unproven,
        choice=choice,
    )
    return Outcome(record, chunks, faults, base_tokens - len(work.decode) if packed is not None else 0, low)


def forward(
    parts: Parts, faults: RoundFaults, packed: Packed, lay_out: Callable[[], Packed | None]
) -> tuple[Packed, TargetOutput | None, int]:
    """The one target forward of the step, and the tokens it executed.

    A fault attributed to requests repeats it, packed anew, without them.
    """
    everyone = [*packed.decode, *(r for r, _ in packed.prefill)]
    taps = parts.drafter.tap_layers if parts.drafting else ()

    def run(rows: Sequence[RequestState]) -> tuple[TargetOutput, int]:
        nonlocal packed
        if len(rows) < len(everyone):
            packed = lay_out() or packed
        output = parts.target.forward(packed.layout, taps)
        wanted = (len(packed.layout.logit_rows), parts.target.vocab_size)
        if tuple(output.logits.shape) != wanted:
            raise ComponentError(f"expected logits {wanted} of the rows asked for, got {tuple(output.logits.shape)}")
        return output, parts.target.executed_tokens(packed.layout)

    ran, _ = faults.final_phase("target", "target", everyone, run)
    return (packed, None, 0) if ran is None else (packed, *ran)
