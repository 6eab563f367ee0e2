"""The gamma policy ``adaptive``: how much to draft, if anything, decided before drafting (METHOD section 4).

It weighs Theta = tau / (T_draft(R, gamma) + T_verify(B) + T_glue) against R / (T_verify(R) + T_glue) of a plain round,
with acceptance from history and seconds from the cost table. Three decisions, in this order:

- *guard*: below a threshold of predicted gain rounds are plain, but for a probe now and then;
- *gamma*: the block of most Theta;
- *early exit*: rows whose next draft is likely to fail, by their anchor and the target's state, sit out.

Nothing of the coming round exists when they are taken, so no drafted token can decide its own admission.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from dspark.capabilities import GammaCapabilities
from dspark.errors import ConfigError
from dspark.protocols import BuildContext
from dspark.scheduling._common import check_share
from dspark.scheduling._difficulty import Difficulty
from dspark.scheduling._gain import Expected, Outlook
from dspark.scheduling._guard import Correction, Probes, Regime
from dspark.scheduling._history import History
from dspark.types import FloatArray, GammaChoice, GammaInput, IntArray, RoundRecord

REVIEW = 4
"""Rounds for which guard and gamma hold while nothing but averages has changed: rounds are short, reviews take time."""

LONGER = 32
"""Each so many-th drafting round asks for one token more than seems best, chosen by rounds alone."""

CAPABILITIES = GammaCapabilities(needs_cost=True, needs_entropy=True)


@dataclass(frozen=True, slots=True)
class AdaptiveConfig:
    """Settings of ``adaptive``.

    Attributes:
        threshold: predicted gain over plain decoding under which rounds are plain.
        hysteresis: a plain phase ends only at ``threshold + hysteresis``.
        switch: another gamma is taken where it promises so much more Theta than the present one.
        early_exit: let rows sit out by the difficulty of their next draft.
        explore_every: each so many-th round with rows that sit out, one of them drafts, chosen by rounds alone.
        probe_share: share of the time of plain phases that probes may take.
        probe_gamma: tokens drafted in a probe.
        probe_rows: most rows that probe at once; they take turns.
        probe_looks: most probes in a row, where they go better than expected.
        prior_mean: acceptance of a first draft before anything was seen.
        prior_strength: outcomes that the prior weighs as much as.
        memory: outcomes after which an older one weighs 1/e.
        alarm: evidence, in nats, of a changed acceptance at which what came before is forgotten.
    """

    threshold: float = 0.04
    hysteresis: float = 0.02
    switch: float = 0.01
    early_exit: bool = True
    explore_every: int = 16
    probe_share: float = 0.01
    probe_gamma: int = 2
    probe_rows: int = 4
    probe_looks: int = 8
    prior_mean: float = 0.7
    prior_strength: float = 4.0
    memory: float = 256.0
    alarm: float = 7.0

    def __post_init__(self) -> None:
        for name in ("threshold", "hysteresis", "switch", "probe_share", "prior_mean"):
            check_share(f"AdaptiveConfig.{name}", getattr(self, name))
        for name in ("explore_every", "probe_gamma", "probe_rows", "probe_looks"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"AdaptiveConfig.{name}: expected an integer of at least 1, got {value!r}")
        for name, low in (("prior_strength", 1e-6), ("memory", 1.0), ("alarm", 1.0)):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or value < low:
                raise ConfigError(f"AdaptiveConfig.{name}: expected a number of at least {low:g}, got {value!r}")


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a round was expected to be, until it is known what it was."""

    expected: Expected
    plain: Expected
    regime: Regime
    features: FloatArray | None
    cost: Any


class AdaptiveGamma:
    """Guard, gamma and early exit from acceptance history and measured cost.

    Batches of 1, 2-3, 4-7, .. decoding rows have a regime each: whether it drafts, and with which gamma.

    Args:
        config: settings.
        gamma: longest block.
        prunes: the scheduler shortens drafts by what they cost; else whatever a row drafts is verified, and rows are
            asked for no more than is worth verifying.

    Attributes:
        history: acceptance rates by group and by request, and what is known of each request's next draft.
        difficulty: acceptance of first drafts, from what is known before drafting.
    """

    capabilities: GammaCapabilities = CAPABILITIES

    def __init__(self, config: AdaptiveConfig, gamma: int, *, prunes: bool = True) -> None:
        self.config = config
        self._prunes = prunes
        self.history = History(gamma, (config.prior_mean, config.prior_strength), config.memory, config.alarm)
        self.difficulty = Difficulty()
        self._regimes: dict[int, Regime] = {}
        self._correction = Correction()
        self._probes = Probes(config.probe_share, config.probe_looks)
        self._asked: _Asked | None = None
        self._rounds = 0
        self._exits = 0

    @property
    def wants_entropy(self) -> bool:
        """Whether what is learned from entropies could be used soon: not in a plain phase."""
        return self.config.early_exit and self._asked is not None

    def choose(self, batch: GammaInput, cost: Any | None) -> GammaChoice:
        """g_r by cost and history; the whole block without a cost table."""
        rows = len(batch.requests)
        self._asked = None
        self._rounds += 1
        if cost is None or batch.gamma == 0:
            reason = "no-cost-table" if batch.gamma else "static"
            return GammaChoice(np.full(rows, batch.gamma, dtype=np.int64), reason)
        filled = self.history.filled(batch)
        regime = self._regimes.setdefault(batch.decoding.bit_length(), Regime())
        # a prompt in the step changes neither regime nor gamma: both hold for the rounds after it too
        steady = batch if batch.base_tokens == batch.decoding else None
        outlook = Outlook(steady or dataclasses.replace(batch, base_tokens=batch.decoding), cost, filled)
        if regime.cost is not cost:
            regime.restart(cost)
        known = (rows, batch.decoding, batch.gamma, self.history.changes)
        if regime.known != known or self._rounds >= regime.review:
            self._review(batch, outlook, regime)
            regime.known, regime.review = known, self._rounds + REVIEW
        if not regime.on:
            return self._plain(batch, outlook, regime)
        self._probes.clear()
        return self._draft(batch, outlook if steady else Outlook(batch, cost, filled), regime)

    def _review(self, batch: GammaInput, outlook: Outlook, regime: Regime) -> None:
        """Decide anew whether to draft, and with which gamma."""
        options = {g: outlook.best(self.history.survival(batch, g)) for g in range(1, batch.gamma + 1)}
        best = max(options.values(), key=lambda option: option.rate)
        gain = self._correction.factor * best.rate / outlook.plain.rate - 1.0
        if not regime.decide(gain, self.config.threshold, self.config.hysteresis):
            return
        present = options.get(regime.gamma)
        if present is None or present.rate < (1.0 - self.config.switch) * best.rate:
            regime.gamma = best.gamma

    def _plain(self, batch: GammaInput, outlook: Outlook, regime: Regime) -> GammaChoice:
        """A round of a plain phase, or a probe."""
        self._correction.fade()
        rows, gamma = len(batch.requests), min(self.config.probe_gamma, batch.gamma)
        count = min(rows, self.config.probe_rows)
        extra = outlook.verify(count * gamma) - outlook.verify(0) + outlook.cost.draft_seconds(count, gamma)
        gammas = np.zeros(rows, dtype=np.int64)
        if not self._probes.due(outlook.plain.seconds, max(extra, 0.0), self.history.rising(batch)):
            return GammaChoice(gammas, "guard", {"guard": rows}, regime.gain)
        gammas[(self._rounds * count + np.arange(count)) % rows] = gamma
        left = {"guard": rows - count} if rows > count else {}
        regime.review = 0  # what it shows counts at once
        return GammaChoice(gammas, "probe", left, regime.gain, verify_all=True)

    def _draft(self, batch: GammaInput, outlook: Outlook, regime: Regime) -> GammaChoice:
        """A drafting round: rows that are not worth it sit out."""
        features = self.history.features(batch, self.difficulty) if self.config.early_exit else None
        trusted = features is not None and self.difficulty.trusted
        first = self.difficulty.predict(features) if features is not None and trusted else None
        regime.rounds += 1
        longer = regime.gamma < batch.gamma and regime.rounds % LONGER == 0  # else deeper positions are never seen
        gamma = regime.gamma + longer
        survival = self.history.survival(batch, gamma, first)
        turn = np.roll(np.arange(len(survival)), self._rounds)  # of equal rows, each is left out in turn
        if trusted:
            expected = outlook.worth(survival[turn], regime.rate(outlook.plain.rate))
        else:
            expected = outlook.best(survival[turn])
        lens = np.empty(len(survival), dtype=np.int64)
        lens[turn] = expected.lens
        gammas, reasons = self._gammas(survival, lens, gamma, "early-exit" if trusted else "history")
        self._asked = _Asked(expected, outlook.plain, regime, features, outlook.cost)
        return GammaChoice(gammas, "drafting" if gammas.any() else "early-exit", reasons, regime.gain)

    def _gammas(self, survival: FloatArray, lens: IntArray, gamma: int, reason: str) -> tuple[IntArray, dict[str, int]]:
        """g_r [R] of rows of which so much is worth verifying, and why some draft less."""
        reasons: dict[str, int] = {}
        if self._prunes:
            # rows as good as the worst that is worth it draft too: the scheduler picks among them
            worst = min((float(survival[r, 0]) for r in np.flatnonzero(lens)), default=math.inf)
            gammas = np.where(survival[:, 0] >= worst - 1e-12, gamma, 0).astype(np.int64)
        else:
            gammas = lens.copy()
        out = np.flatnonzero(gammas == 0)
        if len(out):
            reasons[reason] = len(out)
            self._exits += 1
            if self._exits % self.config.explore_every == 0:
                gammas[out[(self._exits // self.config.explore_every) % len(out)]] = gamma
                reasons["explore"] = 1
        short = int(((gammas > 0) & (gammas < gamma)).sum())
        if short:
            reasons["shortened"] = short
        return gammas, reasons

    def observe(self, record: RoundRecord) -> None:
        """Learn acceptance, and compare what came with what was expected."""
        asked, wanted = self._asked, self.wants_entropy
        changes = self.history.changes
        if record.choice is not None:
            batch, choice = record.choice
            outcomes = self.history.learn(record, choice.gammas)
            if asked is not None and asked.features is not None and outcomes is not None:
                rows, accepted = outcomes
                tokens = np.array([batch.requests[r].anchor for r in rows], dtype=np.int64)
                self.difficulty.learn(asked.features[rows], tokens, accepted)
            if self.history.changes != changes:
                self._correction.clear()  # it was about another drafter, or another kind of text
            elif asked is not None and batch.base_tokens == batch.decoding:
                self._compare(record, asked)
        self.history.keep(record, hidden=wanted)
        self._asked = None

    def _compare(self, record: RoundRecord, asked: _Asked) -> None:
        """Tokens that came, in seconds by the table, against what was expected."""
        tokens = float(sum(len(done.new_ids) for done in record.committed))
        rows, gamma = (len(record.batch), record.batch.gamma) if record.batch is not None else (0, 0)
        if record.choice is None or tokens <= 0.0:
            return
        seconds = asked.cost.verify_seconds(record.executed_tokens, record.choice[0].context) + asked.cost.glue
        seconds += asked.cost.draft_seconds(rows, gamma) if rows else 0.0
        asked.regime.add(tokens, seconds)
        if record.draft is not None and asked.expected.gamma:
            # of the rows that were asked, so many found something to draft
            share = float((record.draft.lens > 0).mean())
            plain, whole = asked.plain, asked.expected
            expected = (
                plain.tokens + share * (whole.tokens - plain.tokens),
                plain.seconds + share * (whole.seconds - plain.seconds),
            )
            self._correction.add((tokens, seconds), expected)

    def release(self, slot: int, generation: int) -> None:
        """Forget a request's own record; what was learned from it stays."""
        self.history.release(slot, generation)

    def describe(self) -> dict[str, Any]:
        """What it believes, for people: rates by group, corrections, whether difficulty is believed."""
        return {
            "correction": self._correction.factor,
            "difficulty_trusted": self.difficulty.trusted,
            "difficulty_advantage": self.difficulty.advantage,
            "changes": self.history.changes,
            "rates": self.history.rates(),
            "drafting": {f"{1 << (b - 1)}+": r.on for b, r in sorted(self._regimes.items()) if b},
        }


def build(config: AdaptiveConfig, context: BuildContext) -> AdaptiveGamma:
    """Factory of ``adaptive``."""
    return AdaptiveGamma(config, context.gamma, prunes=bool(context.extras.get("prunes", True)))
