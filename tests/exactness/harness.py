"""Toy engines for exact laws: every component that ships by name, on tables small enough to enumerate."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from dspark._sched import CostTable
from dspark.config import EngineConfig, SamplingParams
from dspark.engine.engine import Engine
from dspark.engine.parts import Parts
from dspark.protocols import BuildContext
from dspark.testing import TableDrafter, TableEstimator, TableTarget
from dspark.testing.cheats import schedule_input
from dspark.testing.toys import bad_draft_table, random_table
from dspark.types import Mode

torch.set_num_threads(1)

GAMMA = 2
TOKENS = 3
PROMPT = (0, 1, 2, 0)  # "0" occurred before, so ngram has something to copy

SAMPLING: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0),
    "T=1": SamplingParams(temperature=1.0),
    "T=.7": SamplingParams(temperature=0.7),
    "top_k": SamplingParams(temperature=1.3, top_k=2),
    "top_p": SamplingParams(temperature=1.0, top_p=0.8),
    "min_p": SamplingParams(temperature=1.0, min_p=0.3),
    "penalties": SamplingParams(
        temperature=1.0, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.7, logit_bias={1: 0.4}
    ),
}

# SPS at 1, 2, 3 tokens, and the same shape at 4, 5, 6, since the first round reads the prompt too. "rising" pays for
# one draft, and for a second if c_2 is good; "dip" loses with one draft and may win with two (Appendix A's shape).
COSTS: dict[str, tuple[float, ...]] = {
    "rising": (1.0, 0.58, 0.50, 0.40, 0.232, 0.20, 0.05),
    "dip": (1.0, 0.50, 0.45, 0.40, 0.20, 0.18, 0.05),
}

# c_k by (k, x_{k-1}): as adverse as Appendix A, so that l depends on what was drawn.
TOKEN_C = ((0.95, 0.8, 0.75), (0.9, 0.0, 0.4), (0.95, 0.1, 0.6))
CONSTANT_C = (0.85, 0.6, 0.5)
AVERAGES_SEEN = ((0.9, 0.9, 0.9), (0.8, 0.85, 0.9))
"""Confidences of two earlier rounds, from which history starts."""


@cache
def cost_table(name: str) -> CostTable:
    return sps_table(COSTS[name])


def sps_table(rates: Sequence[float]) -> CostTable:
    """A table of engine steps per second at 1, 2, .. tokens."""
    return CostTable([(tokens, 1.0 / rate) for tokens, rate in enumerate(rates, start=1)])


def build(kind: str, name: str, vocab_size: int = 3, gamma: int = GAMMA, **settings: Any) -> Any:
    """A component that ships, from its module's config class and factory."""
    module = importlib.import_module(f"dspark.{kind}.{name}" + "_" * (name == "global"))
    config = next(
        value
        for key, value in vars(module).items()
        if key.lower() == f"{name}config" and getattr(value, "__module__", "") == module.__name__
    )
    context = BuildContext(vocab_size=vocab_size, gamma=gamma, max_slots=4, device=torch.device("cpu"))
    return module.build(config(**settings), context)


def target(vocab: int = 3, *, seed: int = 1, **settings: Any) -> TableTarget:
    return TableTarget(random_table(vocab + 1, vocab, vocab, seed=seed, scale=1.0), mix=0.4, **settings)


@cache
def draft_table(kind: str, vocab: int = 3) -> torch.Tensor:
    """Draft logits by previous token. "table" leaves out one token after most tokens: q(v) = 0 < p(v) is in it."""
    if kind == "bad":
        return bad_draft_table(target(vocab))
    table = random_table(vocab, vocab, seed=2, scale=1.0)
    for v in range(1, vocab):
        table[v, (v + 1) % vocab] = -torch.inf
    return table


def make_drafter(kind: str, vocab: int = 3, gamma: int = GAMMA) -> Any:
    if kind == "ngram":
        return build("drafters", "ngram", vocab, gamma, min_n=1, max_n=3)
    return TableDrafter(draft_table(kind, vocab), gamma=gamma)


def make_estimator(kind: str, vocab: int = 3, gamma: int = GAMMA) -> Any:
    if kind == "constant":
        return build("confidence", "constant", vocab, gamma, probs=CONSTANT_C[:gamma])
    if kind == "online":
        return build("confidence", "online", vocab, gamma, explore_every=2)
    table = np.array(TOKEN_C)[:gamma]
    return TableEstimator(np.tile(table, (1, -(-vocab // 3)))[:, :vocab])


def make_scheduler(name: str, cost: str = "dip", *, rows: int = 1, gamma: int = GAMMA, generation: int = 1) -> Any:
    """A scheduler whose history begins two rounds before the first one."""
    settings = {"threshold": {"threshold": 0.5}}.get(name, {})
    made = build("scheduling", name, gamma=gamma, **settings)
    return seed_history(made, cost_table(cost), rows=rows, gamma=gamma, generation=generation)


def seed_history(scheduler: Any, cost: CostTable | None, *, rows: int, gamma: int, generation: int = 1) -> Any:
    for seen in AVERAGES_SEEN:
        probs = np.tile(np.resize(np.array(seen), gamma), (rows, 1))
        scheduler.plan(schedule_input(probs, generation=generation), cost)
    return scheduler


@cache
def verifier(mode: Mode) -> Any:
    return build("verifiers", mode.value)


def make_parts(
    draws: Any,
    *,
    drafter: Any,
    estimator: Any,
    scheduler: Any,
    target: TableTarget,
    cost: CostTable | None = None,
    gamma: int = GAMMA,
    **settings: Any,
) -> Parts:
    return Parts(
        target=target,
        drafter=drafter,
        estimator=estimator,
        calibrator=build("confidence", "identity"),
        scheduler=scheduler,
        verifiers={mode: verifier(mode) for mode in Mode},
        draws=draws,
        gamma=gamma,
        cost=cost,
        **settings,
    )


def engine(
    parts: Parts,
    *,
    slots: int = 1,
    max_len: int = 16,
    observers: Sequence[Any] = (),
    tokenizer: Any = None,
    **settings: Any,
) -> Engine:
    config = EngineConfig(max_slots=slots, max_len=max_len, **settings)
    return Engine(parts, config, tokenizer=tokenizer, observers=[("test", o) for o in observers])


Requests = Sequence[tuple[Sequence[int], SamplingParams]]


def decode(made: Engine, requests: Requests, *, faults: bool = False) -> tuple[tuple[int, ...], ...]:
    """Run requests to their ends: the tokens of each; with ``faults``, (-1,) marks one that ended with an error."""
    names = [made.submit(prompt, params) for prompt, params in requests]
    tokens: dict[str, tuple[int, ...]] = dict.fromkeys(names, ())
    for chunk in made.run():
        if chunk.finish_reason == "error":
            if not faults:
                raise chunk.error or AssertionError("a request ended with an error")
            tokens[chunk.request_id] = (-1,)
        else:
            tokens[chunk.request_id] += chunk.ids
    return tuple(tokens[name] for name in names)


@dataclass(frozen=True)
class Case:
    """One cell of the matrix."""

    drafter: str
    estimator: str
    scheduler: str
    sampling: str
    cost: str = "dip"

    def __str__(self) -> str:
        return f"{self.drafter}-{self.estimator}-{self.scheduler}-{self.cost}-{self.sampling}"

    @property
    def params(self) -> SamplingParams:
        return replace(SAMPLING[self.sampling], max_tokens=TOKENS, request_key=1)

    def program(self, scheduler: Callable[[], Any] | None = None) -> Callable[[Any], tuple[int, ...]]:
        """Decode TOKENS tokens after PROMPT, as a function of the draws; ``scheduler`` replaces the named one."""

        def run(draws: Any) -> tuple[int, ...]:
            parts = make_parts(
                draws,
                drafter=make_drafter(self.drafter),
                estimator=make_estimator(self.estimator),
                scheduler=scheduler() if scheduler else make_scheduler(self.scheduler, self.cost),
                target=target(),
                cost=cost_table(self.cost),
            )
            return decode(engine(parts), [(PROMPT, self.params)])[0]

        return run
