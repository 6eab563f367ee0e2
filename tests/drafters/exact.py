"""Block drafters in the real engine on three tokens, as functions of their draws: cells of their exact matrix.

A block drafter first drafts when everything before the anchor was read with its features. So the prompt but for its
last token is read by a step of its own; the first decoding round then drafts, and two drafts of it can be verified.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from dspark.confidence.linear import LinearConfidence
from dspark.config import SamplingParams
from dspark.drafters.dspark import DSparkDraft
from dspark.engine.engine import Engine
from dspark.sampling.draws import CounterDraws
from dspark.testing import law, target_law, total_variation
from dspark.testing.toys import random_table
from dspark.types import BoolArray, DrawKeys, Purpose
from tests.drafters.toys import FeatureTarget, toy_drafter
from tests.exactness.harness import (
    GAMMA,
    PROMPT,
    SAMPLING,
    TOKENS,
    cost_table,
    decode,
    engine,
    make_estimator,
    make_parts,
    make_scheduler,
)

torch.set_num_threads(1)

HEADS = ("markov", "gated", "rnn", "none")
ESTIMATORS = ("constant", "online", "token", "linear")
SCHEDULERS = (
    *((name, cost) for name in ("causal", "lookahead", "lagged") for cost in ("rising", "dip")),
    *((name, "dip") for name in ("fixed", "threshold", "off")),
)
SAMPLED = tuple(name for name in SAMPLING if name != "greedy")
BEFORE_ANCHOR = len(PROMPT) - 1
ROUND = GAMMA + 1
"""Most tokens that one round commits."""


class Draws:
    """An enumerator's draws without the branches that a test does not want: there, one outcome is certain.

    Args:
        branches: the enumerator's draws.
        end: length of prompt and output; drafts that no round could commit before it are not branched on.
        picks: what was picked in other runs of the same program.

    Attributes:
        picking: nothing is branched on; outcomes are what production would draw, by the request's key.
    """

    def __init__(self, branches: Any, end: int, picks: dict[Any, torch.Tensor] | None = None) -> None:
        self.branches, self.end = branches, end
        self.picks = {} if picks is None else picks
        self.picking = False

    def categorical(self, keys: DrawKeys, probs: torch.Tensor) -> torch.Tensor:
        if self.picking:
            probs = self._pick(keys, lambda: one_hot(CounterDraws().categorical(keys, probs), probs))
        elif keys.purpose is Purpose.DRAFT:
            beyond = torch.from_numpy(keys.anchor + keys.offset + 3 > self.end)
            probs = torch.where(beyond[:, None], one_hot(probs.argmax(1), probs), probs)
        picked: torch.Tensor = self.branches.categorical(keys, probs)
        return picked

    def accept(self, keys: DrawKeys, probs: torch.Tensor) -> BoolArray:
        if self.picking:
            probs = self._pick(keys, lambda: torch.from_numpy(CounterDraws().accept(keys, probs).astype(np.float64)))
        picked: BoolArray = self.branches.accept(keys, probs)
        return picked

    def gumbel(self, *arguments: Any) -> Any:
        return self.branches.gumbel(*arguments)

    def _pick(self, keys: DrawKeys, draw: Callable[[], torch.Tensor]) -> torch.Tensor:
        name = (*keys.request.tolist(), *keys.anchor.tolist(), *keys.offset.tolist(), keys.purpose)
        if name not in self.picks:
            self.picks[name] = draw()
        return self.picks[name]


def one_hot(tokens: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Laws [n, V] that are certain of ``tokens`` [n]."""
    return torch.nn.functional.one_hot(tokens, like.shape[1]).to(like.dtype)


@cache
def toy_target() -> FeatureTarget:
    return FeatureTarget(random_table(4, 3, 3, seed=1, scale=1.0), mix=0.4)


@cache
def drafter_of(head: str, anchor_first: bool, candidates: int | None) -> DSparkDraft:
    """One for all runs of a cell: every run begins in a slot that its predecessor left."""
    return toy_drafter(head, toy_target(), anchor_first=anchor_first, candidates=candidates)


@dataclass(frozen=True)
class Cell:
    """One cell of the matrix; ``cost`` and the sampling are named as in the core's."""

    head: str
    anchor_first: bool
    estimator: str
    scheduler: str
    cost: str
    sampling: str
    candidates: int | None = None

    def __str__(self) -> str:
        layout = "dspark" if self.anchor_first else "dflash"
        kept = "" if self.candidates is None else f"-{self.candidates} candidates"
        return f"{self.head}-{layout}-{self.estimator}-{self.scheduler}-{self.cost}-{self.sampling}{kept}"

    @property
    def drafter(self) -> DSparkDraft:
        return drafter_of(self.head, self.anchor_first, self.candidates)

    def params(self, tokens: int, key: int) -> SamplingParams:
        return replace(SAMPLING[self.sampling], max_tokens=tokens, request_key=key)

    def engine(self, draws: Any, scheduler: Any = None, observers: Sequence[Any] = ()) -> Engine:
        """An engine with one slot; ``scheduler`` replaces the named one."""
        parts = make_parts(
            draws,
            drafter=self.drafter,
            estimator=make_estimator(self.estimator) if self.estimator != "linear" else linear(self.drafter),
            scheduler=scheduler if scheduler is not None else make_scheduler(self.scheduler, self.cost),
            target=toy_target(),
            cost=cost_table(self.cost),
        )
        return engine(parts, step_tokens=BEFORE_ANCHOR, observers=observers)


def linear(drafter: DSparkDraft) -> LinearConfidence:
    """The toy checkpoint's confidence head, made steep: c_k depends on what was drawn before x_k."""
    weights = drafter.confidence_weights
    return LinearConfidence(weights["weight"] * 4, weights["bias"])


def whole(cell: Cell, *, scheduler: Callable[[], Any] | None = None, observers: Sequence[Any] = ()) -> float:
    """TV to the target of TOKENS tokens after PROMPT, every draw of the generation branched on."""

    def program(draws: Any) -> tuple[int, ...]:
        made = cell.engine(Draws(draws, len(PROMPT) + TOKENS), scheduler and scheduler(), observers)
        return decode(made, [(PROMPT, cell.params(TOKENS, 1))])[0]

    return total_variation(law(program), wanted(cell.sampling, ()))


def one_round(
    cell: Cell, *, key: int = 1, scheduler: Callable[[], Any] | None = None, observers: Sequence[Any] = ()
) -> float:
    """TV to the target of one round after a drafted one, what it left open completed from the target.

    The round before falls as production draws it with ``key``; only the second is branched on.
    """
    before: list[tuple[int, ...]] = []
    picks: dict[Any, torch.Tensor] = {}

    def program(draws: Any) -> tuple[int, ...]:
        mine = Draws(draws, len(PROMPT) + 2 * ROUND, picks)
        made = cell.engine(mine, scheduler and scheduler(), observers)
        made.submit(PROMPT, cell.params(2 * ROUND, key))
        mine.picking = True
        made.step()
        before[:] = [made.step()[0].ids]
        mine.picking = False
        ids = made.step()[0].ids
        made.close()
        return ids

    committed = law(program)
    history, got = before[0], dict[tuple[int, ...], float]()
    for start, mass in committed.items():
        for rest, p in wanted(cell.sampling, history + start, ROUND - len(start)).items():
            got[start + rest] = got.get(start + rest, 0.0) + mass * p
    return total_variation(got, wanted(cell.sampling, history))


@cache
def wanted(sampling: str, output: tuple[int, ...], tokens: int = ROUND) -> dict[tuple[int, ...], float]:
    """The target's law of so many tokens after PROMPT and ``output``."""
    params = replace(SAMPLING[sampling], max_tokens=len(output) + tokens)
    return target_law(toy_target().next_logits, PROMPT, params, output=output)


class Lengths:
    """Observes the rounds that draft: verify lengths, and how many drafts each accepted."""

    def __init__(self) -> None:
        self.seen: set[tuple[int, int]] = set()

    def on_round(self, record: Any) -> None:
        if record.plan is not None:
            self.seen |= {(int(record.plan.verify_lens[0]), done.accepted) for done in record.committed}

    def on_finish(self, request: Any, reason: str) -> None:
        pass
