"""What ``adaptive`` knows of past rounds: rates by group of rows, by request, and what each request left behind."""

from __future__ import annotations

import math

import numpy as np

from dspark.scheduling._difficulty import Difficulty, Signals
from dspark.scheduling._rates import Rates
from dspark.types import Committed, FloatArray, GammaInput, IntArray, RequestView, RoundRecord

OWN_STRENGTH = 16.0
"""Acceptances expected of a request until its own record weighs as much as the shared averages."""
OWN_MEMORY = 64.0
OWN_RANGE = (0.25, 1.5)


class _Own:
    """One request: acceptances that it had and that were expected of it, decayed; and its signals."""

    __slots__ = ("expected", "generation", "signals", "won")

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.won = self.expected = 0.0
        self.signals: Signals | None = None

    @property
    def ratio(self) -> float:
        ratio = (self.won + OWN_STRENGTH) / (self.expected + OWN_STRENGTH)
        return min(max(ratio, OWN_RANGE[0]), OWN_RANGE[1])


class History:
    """Acceptance by group and by request.

    Args:
        gamma: longest block.
        prior, memory, alarm: see :class:`dspark.scheduling._rates.Rates`.
    """

    def __init__(self, gamma: int, prior: tuple[float, float], memory: float, alarm: float) -> None:
        self._settings = (gamma, prior, memory, alarm)
        self._groups: dict[int, Rates] = {}
        self._own: dict[int, _Own] = {}

    @property
    def changes(self) -> int:
        """How often acceptance was found to have changed."""
        return sum(rates.changes for rates in self._groups.values())

    def rates(self) -> list[list[float]]:
        """Conditional acceptance by position, of each group, over all gammas."""
        return [[round(float(x), 4) for x in rates(self._settings[0])] for rates in self._groups.values()]

    def filled(self, batch: GammaInput) -> float:
        """Share of rows that draft something where they are asked."""
        groups = batch.groups.tolist()
        return sum(self._of(g).filled for g in groups) / len(groups) if groups else 1.0

    def rising(self, batch: GammaInput) -> bool:
        """True while there is evidence that drafts became better than the averages say."""
        return any(self._of(g).rise.evidence > 0.0 for g in set(batch.groups.tolist()))

    def survival(self, batch: GammaInput, gamma: int, first: FloatArray | None = None) -> FloatArray:
        """Expected survival a, [R, gamma], of blocks of gamma; 0 beyond what a row may still commit.

        Args:
            first: acceptance of each row's first draft, [R], where it is known better than on average.
        """
        shared = {g: self._of(g)(gamma) for g in set(batch.groups.tolist())}
        rates = np.array([shared[g] for g in batch.groups.tolist()])
        rates *= np.array([[self._ratio(view)] for view in batch.requests])
        np.minimum(rates, 0.995, out=rates)
        if first is not None:
            rates[:, 0] = np.minimum(first, 0.995)
        room = np.array([view.max_draft for view in batch.requests])
        survival: FloatArray = rates.cumprod(axis=1)
        if int(room.min(initial=gamma)) < gamma:
            survival[np.arange(gamma)[None, :] >= room[:, None]] = 0.0
        return survival

    def features(self, batch: GammaInput, difficulty: Difficulty) -> FloatArray:
        """Raw features of each row's next draft, [R, n]; unknown where the request left no signals."""
        rows = []
        for view in batch.requests:
            own = self._own.get(view.slot)
            known = own.signals if own is not None and own.generation == view.generation else None
            rows.append(known if known is not None else Signals(view.anchor, math.nan))
        return difficulty.features(rows)

    def learn(self, record: RoundRecord, gammas: IntArray) -> tuple[IntArray, FloatArray] | None:
        """Take in outcomes of a round in which rows were asked for ``gammas``, [R].

        Returns:
            rows of the choice whose first position was offered, and whether it was accepted (0 or 1); None for none.
        """
        if record.batch is None or record.choice is None:
            return None
        asked = np.flatnonzero(gammas)  # rows of the round's batch, in order
        groups = record.choice[0].groups[asked]
        drafted = np.zeros(len(asked), dtype=bool) if record.draft is None else record.draft.lens > 0
        for group in set(groups.tolist()):
            mine = groups == group
            self._of(group).fill(int(mine.sum()), int(drafted[mine].sum()))
        if record.draft is None:
            return None
        width = int(record.draft.token_ids.shape[1])
        done = [c for c in record.committed if c.row >= 0 and c.finish_reason != "error"]
        firsts: list[tuple[int, float]] = []
        for group in dict.fromkeys(groups.tolist()):
            seen, won, judged = np.zeros(width), np.zeros(width), [0.0, 0.0]
            for one in done:
                if groups[one.row] != group or not record.draft.lens[one.row]:
                    continue
                self._outcome(one, record, seen, won)
                if one.offered:
                    judged[0] += 1.0
                    judged[1] += float(one.accepted > 0)
                    firsts.append((int(asked[one.row]), float(one.accepted > 0)))
            rates = self._of(group)
            self._learn_own([one for one in done if groups[one.row] == group], rates, width)
            if seen.any():
                rates.add(width, seen, won, (judged[0], judged[1]))
        if not firsts:
            return None
        return np.array([r for r, _ in firsts], dtype=np.int64), np.array([a for _, a in firsts])

    def _outcome(self, one: Committed, record: RoundRecord, seen: FloatArray, won: FloatArray) -> None:
        """Add one row's offered positions up to the first rejection, and confidences of what was not offered."""
        reached = min(one.offered, one.accepted + 1)
        seen[:reached] += 1.0
        won[: one.accepted] += 1.0
        if record.confidence is None or record.draft is None or one.accepted < one.offered or one.finish_reason:
            return
        alive = 1.0
        for k in range(one.offered, int(record.draft.lens[one.row])):
            c = float(record.confidence.probs[one.row, k])
            seen[k] += alive
            won[k] += alive * c
            alive *= c

    def _learn_own(self, done: list[Committed], rates: Rates, width: int) -> None:
        expected = rates(width) if done else np.zeros(0)
        for one in done:
            reached = min(one.offered, one.accepted + 1)
            if reached:
                own = self._request(one.request)
                keep = math.exp(-reached / OWN_MEMORY)
                own.won = own.won * keep + one.accepted
                own.expected = own.expected * keep + float(expected[:reached].sum())

    def keep(self, record: RoundRecord, *, hidden: bool) -> None:
        """Remember what each request knows before its next draft: anchor, entropy and, if asked, hidden state."""
        live = [one for one in record.committed if one.new_ids and one.finish_reason is None]
        states = _hidden(live) if hidden else [None] * len(live)
        for one, state in zip(live, states, strict=True):
            self._request(one.request).signals = Signals(one.new_ids[-1], one.entropy, state)

    def release(self, slot: int, generation: int) -> None:
        """Forget a request; one that has its slot by now is kept."""
        own = self._own.get(slot)
        if own is not None and own.generation == generation:
            del self._own[slot]

    def _request(self, view: RequestView) -> _Own:
        own = self._own.get(view.slot)
        if own is None or own.generation != view.generation:
            own = self._own[view.slot] = _Own(view.generation)
        return own

    def _ratio(self, view: RequestView) -> float:
        own = self._own.get(view.slot)
        return own.ratio if own is not None and own.generation == view.generation else 1.0

    def _of(self, group: int) -> Rates:
        rates = self._groups.get(group)
        if rates is None:
            rates = self._groups[group] = Rates(*self._settings)
        return rates


def _hidden(done: list[Committed]) -> list[FloatArray | None]:
    """The target's features at the position that each anchor was decided at, the last one that was read: [d] each."""
    import torch

    if any(one.taps is None or not len(one.taps) for one in done):
        return [None] * len(done)
    last: list[torch.Tensor] = [one.taps[-1] for one in done if one.taps is not None]
    return list(torch.stack(last).detach().double().cpu().numpy()) if last else []
