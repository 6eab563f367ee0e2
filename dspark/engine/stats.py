"""Counters of requests and of the engine.

Accepted length counts the bonus, corrected or emitted-on-mismatch token (paper, footnote 3): it is the mean over rounds
of committed tokens, never a product of marginal rates. Per-position rates divide by the times that a position was
offered, since drafts differ in width.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspark.engine.batcher import Work
    from dspark.engine.round import Outcome


@dataclass(slots=True)
class Acceptance:
    """Offered and accepted drafts by position.

    Attributes:
        offered: rounds that verified position k (0-based), whatever came before it.
        reached: rounds that verified it after accepting all before it.
        accepted: rounds that accepted it.
        rounds: decoding rounds.
        committed: tokens committed in them, after the cut at stop and length.
    """

    offered: list[int] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    rounds: int = 0
    committed: int = 0

    def add(self, offered: int, accepted: int, committed: int) -> None:
        """Count one round of one request."""
        if len(self.offered) < offered:
            grow = offered - len(self.offered)
            for counts in (self.offered, self.reached, self.accepted):
                counts.extend([0] * grow)
        for k in range(offered):
            self.offered[k] += 1
            if k <= accepted:
                self.reached[k] += 1
            if k < accepted:
                self.accepted[k] += 1
        self.rounds += 1
        self.committed += committed

    @property
    def accepted_length(self) -> float:
        """Committed tokens a round, tau."""
        return self.committed / self.rounds if self.rounds else 0.0

    @property
    def rates(self) -> list[float]:
        """Share of the offers of each position that were accepted."""
        return [a / o if o else 0.0 for a, o in zip(self.accepted, self.offered, strict=True)]

    @property
    def conditional_rates(self) -> list[float]:
        """The same, of the offers whose earlier positions were all accepted."""
        return [a / r if r else 0.0 for a, r in zip(self.accepted, self.reached, strict=True)]

    def as_dict(self) -> dict[str, Any]:
        return {
            "rounds": self.rounds,
            "committed": self.committed,
            "accepted_length": self.accepted_length,
            "offered": list(self.offered),
            "accepted": list(self.accepted),
            "acceptance": self.rates,
            "conditional_acceptance": self.conditional_rates,
        }


@dataclass(slots=True)
class RequestStats:
    """One request's figures; times are seconds since it was submitted.

    Attributes:
        cached_tokens: tokens of the prompt that were taken over from another request instead of read.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance)
    drafted: int = 0
    first_token_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def output_tokens(self) -> int:
        return self.acceptance.committed

    @property
    def tokens_saved(self) -> int:
        """Target passes that drafting spared: tokens beyond one a round."""
        return self.acceptance.committed - self.acceptance.rounds

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "drafted": self.drafted,
            "tokens_saved": self.tokens_saved,
            "first_token_seconds": self.first_token_seconds,
            "seconds": self.seconds,
            **self.acceptance.as_dict(),
        }


@dataclass(slots=True)
class Gains:
    """Gain of drafting over plain decoding, in the steps that the gamma policy let draft and that read no prompt.

    Attributes:
        steps: such steps.
        predicted: sum over them of the gain that was predicted.
        tokens, seconds: committed in them, and how long they took.
        plain_tokens, plain_seconds: what plain steps of the same requests would have done, by the cost table; 0 where
            the table is not one of measured times.
    """

    steps: int = 0
    predicted: float = 0.0
    tokens: int = 0
    seconds: float = 0.0
    plain_tokens: int = 0
    plain_seconds: float = 0.0

    @property
    def measured(self) -> float | None:
        """Tokens a second over those of plain steps, minus 1; None where there is nothing to compare."""
        if not (self.seconds and self.plain_seconds and self.plain_tokens):
            return None
        return self.tokens / self.seconds / (self.plain_tokens / self.plain_seconds) - 1.0

    def as_dict(self) -> dict[str, Any]:
        predicted = self.predicted / self.steps if self.steps else None
        return {"steps": self.steps, "predicted": predicted, "measured": self.measured}


@dataclass(slots=True)
class EngineStats:
    """The engine's figures since it was built or reset.

    Attributes:
        steps: target forwards.
        drafting_steps: steps that drafted.
        executed_tokens: tokens that the target ran.
        verified: drafts that were verified; drafted: drafts proposed.
        prefill_tokens: prompt tokens read.
        prefix_hits: requests that began with a prefix that another one had read.
        cached_tokens: prompt tokens that they did not read again.
        phase_seconds: prefix (admission, where prefixes are kept), gamma, draft, confidence, schedule, pack, target,
            process, verify, commit, observe; ``step`` is all.
        states: named states and how many rounds they held (``no-cost-table``, ``flat-cost``, ``ragged-padding``, ...).
        stop_reasons: why schedulers stopped, by rounds.
        gammas: steps by length of the block that they drafted; 0 is a plain one.
        gamma_reasons: why the gamma policy chose as it did, by steps (``drafting``, ``guard``, ``probe``,
            ``early-exit``, ``static``, ``no-cost-table``, ...).
        row_reasons: why single requests drafted less or nothing, by rounds of a request.
        buffered_tokens: tokens committed in rounds in which their request could draft and did not: a drafter that reads
            features keeps theirs, and projects them when the request drafts again.
        cost_updates: how often the cost table was adjusted to real steps.
        faults: faults by component and phase.
        unproven_rounds: rounds that a batch-wide fault left without a proof of exactness.
        low_margins: greedy decisions whose two best scores lie under 1e-4 apart (only with ``count_margins``).
    """

    acceptance: Acceptance = field(default_factory=Acceptance)
    steps: int = 0
    drafting_steps: int = 0
    executed_tokens: int = 0
    drafted: int = 0
    verified: int = 0
    prefill_tokens: int = 0
    prefix_hits: int = 0
    cached_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    phase_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    states: Counter[str] = field(default_factory=Counter)
    stop_reasons: Counter[str] = field(default_factory=Counter)
    gammas: Counter[int] = field(default_factory=Counter)
    gamma_reasons: Counter[str] = field(default_factory=Counter)
    row_reasons: Counter[str] = field(default_factory=Counter)
    gains: Gains = field(default_factory=Gains)
    buffered_tokens: int = 0
    cost_updates: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    unproven_rounds: int = 0
    low_margins: int = 0

    @property
    def verify_budget(self) -> float:
        """Drafts verified a decoding round of a request."""
        return self.verified / self.acceptance.rounds if self.acceptance.rounds else 0.0

    @property
    def overhead(self) -> float:
        """Share of the time that is not a model forward (target or drafter)."""
        step = self.phase_seconds["step"]
        model = self.phase_seconds["target"] + self.phase_seconds["draft"]
        return (step - model) / step if step else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "drafting_steps": self.drafting_steps,
            "executed_tokens": self.executed_tokens,
            "prefill_tokens": self.prefill_tokens,
            "prefix_hits": self.prefix_hits,
            "cached_tokens": self.cached_tokens,
            "drafted": self.drafted,
            "verified": self.verified,
            "verify_budget": self.verify_budget,
            "tokens_saved": self.acceptance.committed - self.acceptance.rounds,
            **self.acceptance.as_dict(),
            "finished": dict(self.finished),
            "phase_seconds": dict(self.phase_seconds),
            "overhead": self.overhead,
            "states": dict(self.states),
            "stop_reasons": dict(self.stop_reasons),
            "gammas": {str(g): n for g, n in sorted(self.gammas.items())},
            "gamma_reasons": dict(self.gamma_reasons),
            "row_reasons": dict(self.row_reasons),
            "gain": self.gains.as_dict(),
            "buffered_tokens": self.buffered_tokens,
            "cost_updates": self.cost_updates,
            "faults": dict(self.faults),
            "unproven_rounds": self.unproven_rounds,
            "low_margins": self.low_margins,
        }


def count_round(stats: EngineStats, outcome: Outcome) -> int:
    """Count what a step ran and committed; drafts that it verified."""
    record = outcome.record
    stats.steps += 1
    stats.executed_tokens += record.executed_tokens
    stats.prefill_tokens += outcome.prefill_tokens
    stats.low_margins += outcome.low_margins
    stats.unproven_rounds += outcome.faults.unproven
    stats.faults.update(outcome.faults.counts)
    for phase, seconds in record.seconds.items():
        stats.phase_seconds[phase] += seconds
    offered = 0
    for done in record.committed:
        if done.new_ids:
            stats.acceptance.add(done.offered, done.accepted, len(done.new_ids))
            stats.verified += done.offered
            offered += done.offered
    return offered


def count_choice(stats: EngineStats, outcome: Outcome, work: Work, cost: Any) -> None:
    """Count what the gamma policy decided about a step, why, and what came of it.

    Args:
        cost: the table of measured times that the step was planned with; None where there is none.
    """
    record = outcome.record
    if record.choice is None:
        return
    known, choice = record.choice
    drafted = record.batch is not None
    stats.gammas[record.batch.gamma if record.batch is not None else 0] += 1
    stats.gamma_reasons[choice.reason] += 1
    stats.row_reasons.update(choice.row_reasons)
    could = {view.request_id for view, g in zip(known.requests, choice.gammas.tolist(), strict=True) if g == 0}
    stats.buffered_tokens += sum(len(c.new_ids) for c in record.committed if c.request.request_id in could)
    if drafted and choice.reason != "probe" and not outcome.prefill_tokens:
        gains = stats.gains
        gains.steps += 1
        gains.predicted += choice.gain if choice.gain == choice.gain else 0.0
        gains.tokens += sum(len(c.new_ids) for c in record.committed)
        gains.seconds += sum(record.seconds.values())
        if cost is not None:
            gains.plain_tokens += len(work.decode)
            gains.plain_seconds += cost.verify_seconds(known.base_tokens, known.context) + cost.glue
