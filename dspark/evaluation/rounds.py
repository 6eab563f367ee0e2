"""Verified rounds as arrays: what was thought of each draft, and what became of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dspark.errors import EvaluationError
from dspark.types import BoolArray, Committed, FloatArray, IntArray, RequestView, RoundRecord


@dataclass(frozen=True, slots=True)
class Rounds:
    """N decoding rounds. A round that drafted nothing has 0 offered, and its row of ``probs`` means nothing.

    Attributes:
        probs: c_k, [N, gamma].
        offered: drafts that were verified, [N]; what lay beyond a cut at EOS, stop or max_tokens is not among them.
        accepted: drafts that were accepted, [N].
        committed: tokens that the round added, [N].
    """

    probs: FloatArray
    offered: IntArray
    accepted: IntArray
    committed: IntArray

    def __len__(self) -> int:
        return len(self.offered)

    @property
    def gamma(self) -> int:
        """Block size."""
        return int(self.probs.shape[1])

    @property
    def weight(self) -> BoolArray:
        """Where position k was offered, [N, gamma]."""
        return np.asarray(np.arange(self.gamma) < self.offered[:, None])

    @property
    def prefix(self) -> IntArray:
        """1 where the first k drafts were all accepted, [N, gamma]."""
        return (np.arange(self.gamma) < self.accepted[:, None]).astype(np.int64)

    @property
    def logits(self) -> FloatArray:
        """log c - log(1 - c), [N, gamma]; infinite for certainties."""
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(self.probs) - np.log1p(-self.probs))

    def take(self, rows: IntArray | BoolArray) -> Rounds:
        """Some of the rounds."""
        return Rounds(self.probs[rows], self.offered[rows], self.accepted[rows], self.committed[rows])

    def drafted(self) -> Rounds:
        """The rounds in which drafts were verified."""
        return self.take(self.offered > 0)

    @classmethod
    def concat(cls, parts: Sequence[Rounds], gamma: int) -> Rounds:
        """One after another; none for no parts."""
        empty = np.zeros(0, dtype=np.int64)
        every = [cls(np.zeros((0, gamma)), empty, empty, empty), *parts]
        return cls(
            np.concatenate([p.probs for p in every]),
            np.concatenate([p.offered for p in every]),
            np.concatenate([p.accepted for p in every]),
            np.concatenate([p.committed for p in every]),
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON; c of what was not offered is left out."""
        probs = [row[:n].tolist() for row, n in zip(self.probs, self.offered.tolist(), strict=True)]
        counts = {name: getattr(self, name).tolist() for name in ("offered", "accepted", "committed")}
        return {"gamma": self.gamma, **counts, "probs": probs}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Rounds:
        """The inverse of :meth:`as_dict`.

        Raises:
            EvaluationError: entries that are missing or contradict one another.
        """
        try:
            counts = {n: np.array(raw[n], dtype=np.int64) for n in ("offered", "accepted", "committed")}
            probs = np.zeros((len(counts["offered"]), int(raw["gamma"])))
            for row, values in zip(probs, raw["probs"], strict=True):
                row[: len(values)] = values
            rounds = cls(probs, **counts)
        except (KeyError, TypeError, ValueError) as err:
            raise EvaluationError(f"rounds: {type(err).__name__}: {err}") from err
        same = len(counts["offered"]) == len(counts["accepted"]) == len(counts["committed"])
        ordered = same and (counts["offered"] >= counts["accepted"]).all() and (counts["accepted"] >= 0).all()
        if not ordered or not ((probs >= 0) & (probs <= 1)).all() or (counts["offered"] > rounds.gamma).any():
            raise EvaluationError("rounds: expected 0 <= accepted <= offered <= gamma and probabilities in [0, 1]")
        return rounds


@dataclass(slots=True)
class RoundLog:
    """An observer that keeps the rounds of each live request until they are taken.

    A step that reads a prompt and drafts nothing is no round: its token comes from prefill, whatever the drafter.

    Attributes:
        gamma: block size of the engine; set by whoever drives it, before the first step.
        pending: rounds that verified drafts and have not been taken.
    """

    gamma: int = 0
    pending: int = 0
    _rows: dict[str, list[tuple[FloatArray, int, int, int]]] = field(default_factory=dict)

    def on_round(self, record: RoundRecord) -> None:
        """Keep what each request did."""
        for done in record.committed:
            if not done.new_ids or (_reads_prompt(done.request) and not _drafted(record, done)):
                continue
            probs = np.zeros(self.gamma)
            if done.offered and record.confidence is not None:
                width = min(self.gamma, record.confidence.probs.shape[1])
                probs[:width] = record.confidence.probs[done.row, :width]
            self.pending += done.offered > 0
            row = (probs, done.offered, done.accepted, len(done.new_ids))
            self._rows.setdefault(done.request.request_id, []).append(row)

    def on_finish(self, request: RequestView, reason: str) -> None:
        """Nothing: whoever submitted the request takes its rounds."""

    def take(self, request_id: str) -> Rounds:
        """The rounds of a request, which are forgotten here."""
        rows = self._rows.pop(request_id, [])
        if not rows:
            return Rounds.concat([], self.gamma)
        self.pending -= sum(row[1] > 0 for row in rows)
        probs, offered, accepted, committed = zip(*rows, strict=True)
        counts = (np.array(values, dtype=np.int64) for values in (offered, accepted, committed))
        return Rounds(np.stack(probs), *counts)


def _reads_prompt(request: RequestView) -> bool:
    return request.num_cached < request.prompt_len


def _drafted(record: RoundRecord, done: Committed) -> bool:
    return done.row >= 0 and record.draft is not None and int(record.draft.lens[done.row]) > 0
