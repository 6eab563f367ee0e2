"""Whole engines around one component under test, and the exact law of what they emit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch

from dspark._sched import CostTable
from dspark.config import EngineConfig, SamplingParams
from dspark.engine.engine import Engine
from dspark.engine.parts import Parts
from dspark.errors import DSparkWarning
from dspark.plugins import Catalog, Kind
from dspark.protocols import BuildContext
from dspark.testing.cheats import schedule_input
from dspark.testing.contracts import Seen
from dspark.testing.enumerate import EnumerationError, law, total_variation
from dspark.testing.oracle import target_law
from dspark.testing.suite import load_catalog
from dspark.testing.toys import TableDrafter, TableEstimator, TableTarget, random_table
from dspark.types import Mode

PROMPT = (0, 1, 2, 0)
"""0 occurred before, so drafters that copy have something to copy."""

COSTS = {
    "rising": (1.0, 0.58, 0.50, 0.40, 0.232, 0.20, 0.05),
    "dip": (1.0, 0.50, 0.45, 0.40, 0.20, 0.18, 0.05),
}
"""Steps per second at 1, 2, .. tokens, and the same shape again for the step that reads the prompt too. "dip" is
Appendix A's: one draft loses, two may win."""

CONFIDENCES = ((0.95, 0.8, 0.75), (0.9, 0.0, 0.4), (0.95, 0.1, 0.6))
"""c_k by (k, x_{k-1}): what was drawn decides how much of the rest pays."""

HISTORY = ((0.9, 0.9, 0.9), (0.8, 0.85, 0.9))
"""Confidences of two earlier rounds, from which schedulers' averages start."""

TOLERANCE = 1e-9


@cache
def cost_table(name: str) -> CostTable:
    """One of ``COSTS``."""
    return sps_table(COSTS[name])


def sps_table(rates: Sequence[float]) -> CostTable:
    """A cost table of engine steps per second at 1, 2, .. tokens."""
    return CostTable([(tokens, 1.0 / rate) for tokens, rate in enumerate(rates, start=1)])


def shipped(kind: Kind, name: str, *, gamma: int = 2, vocab: int = 3, **settings: Any) -> Any:
    """A component that comes with dspark."""
    context = BuildContext(vocab_size=vocab, gamma=gamma, max_slots=4, device=torch.device("cpu"))
    return builtin_catalog().build(kind, f"dspark/{name}", settings, context)


@cache
def builtin_catalog() -> Catalog:
    """The catalog, of which ``shipped`` takes what is built in."""
    return load_catalog({})


def with_history(scheduler: Any, cost: CostTable | None, *, rows: int = 1, gamma: int = 2) -> Any:
    """Let a scheduler see two earlier rounds."""
    for seen in HISTORY:
        scheduler.plan(schedule_input(np.tile(np.resize(np.array(seen), gamma), (rows, 1))), cost)
    return scheduler


def toy_target(vocab: int = 3, *, seed: int = 1, **settings: Any) -> TableTarget:
    """A target of ``vocab`` tokens that depends on its whole prefix."""
    return TableTarget(random_table(vocab + 1, vocab, vocab, seed=seed, scale=1.0), mix=0.4, **settings)


def toy_drafter(vocab: int = 3, gamma: int = 2, *, seed: int = 2) -> TableDrafter:
    """A drafter that leaves out a token after most tokens, so that q(v) = 0 < p(v) occurs."""
    table = random_table(vocab, vocab, seed=seed, scale=1.0)
    for v in range(1, vocab):
        table[v, (v + 1) % vocab] = -torch.inf
    return TableDrafter(table, gamma=gamma)


def toy_estimator(vocab: int = 3, gamma: int = 2) -> TableEstimator:
    """An estimator as adverse as Appendix A."""
    table = np.tile(np.resize(np.array(CONFIDENCES), (gamma, 3)), (1, -(-vocab // 3)))
    return TableEstimator(table[:, :vocab])


def make_parts(draws: Any, *, gamma: int = 2, vocab: int = 3, cost: Any = None, **parts: Any) -> Parts:
    """Toy parts around those that are given (``drafter``, ``estimator``, ``scheduler``, ..)."""
    chosen: dict[str, Callable[[], Any]] = {
        "target": lambda: toy_target(vocab),
        "drafter": lambda: toy_drafter(vocab, gamma),
        "estimator": lambda: toy_estimator(vocab, gamma),
        "calibrator": lambda: shipped(Kind.CALIBRATOR, "identity"),
        "scheduler": lambda: shipped(Kind.SCHEDULER, "threshold"),
        "verifiers": lambda: {mode: shipped(Kind.VERIFIER, mode.value) for mode in Mode},
    }
    made = {name: parts.pop(name) if name in parts else make() for name, make in chosen.items()}
    return Parts(draws=draws, gamma=gamma, cost=cost, **made, **parts)


def make_engine(
    parts: Parts, *, slots: int = 1, max_len: int = 24, observers: Sequence[Any] = (), **config: Any
) -> Engine:
    """An engine of these parts."""
    settings = EngineConfig(max_slots=slots, max_len=max_len, **config)
    return Engine(parts, settings, observers=[("under test", o) for o in observers])


def decode(engine: Engine, requests: Sequence[tuple[Sequence[int], SamplingParams]]) -> tuple[tuple[int, ...], ...]:
    """Run requests to their ends: the tokens of each.

    Raises:
        ComponentError: a request ended with an error.
        Seen: a component raised and was switched off or dropped.
    """
    names = [engine.submit(prompt, params) for prompt, params in requests]
    tokens: dict[str, tuple[int, ...]] = dict.fromkeys(names, ())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DSparkWarning)
        for chunk in engine.run():
            if chunk.error is not None:
                raise chunk.error
            tokens[chunk.request_id] += chunk.ids
    if engine.stats.faults:
        said = [str(w.message) for w in caught if issubclass(w.category, DSparkWarning)]
        raise Seen(f"it raised within a round: {'; '.join(said)}", prompts=[list(p) for p, _ in requests])
    return tuple(tokens[name] for name in names)


def check_law(
    make: Callable[[Any], Parts],
    *,
    tokens: int = 3,
    params: SamplingParams | None = None,
    prompt: Sequence[int] = PROMPT,
    **case: Any,
) -> None:
    """The law of a whole generation, by exact enumeration, has to be the target's.

    Args:
        make: parts from a draw source; called once a path.
        tokens: how many are generated.
        params: of the request; temperature 1 where None.
        case: for the message.

    Raises:
        Seen: with the two laws of the first token that differ most.
    """
    params = replace(params or SamplingParams(temperature=1.0), max_tokens=tokens, request_key=1)
    next_logits: list[Any] = []

    def program(draws: Any) -> tuple[int, ...]:
        parts = make(draws)
        next_logits[:] = [parts.target.next_logits]  # type: ignore[attr-defined]
        engine = make_engine(parts)
        (out,) = decode(engine, [(prompt, params)])
        return out

    try:
        got = law(program)
    except EnumerationError as err:
        raise Seen(str(err), prompt=list(prompt), tokens=tokens, **case) from err
    wanted = target_law(next_logits[0], prompt, params)
    distance = total_variation(got, wanted)
    if distance > TOLERANCE:
        short = next((n for n in range(1, tokens + 1) if _gap(got, wanted, n) > TOLERANCE), tokens)
        raise Seen(
            f"the output's law is {distance:.3g} from the target's in total variation; "
            f"the first {short} token(s): {_rounded(_heads(got, short))} "
            f"instead of {_rounded(_heads(wanted, short))}",
            prompt=list(prompt),
            tokens=tokens,
            **case,
        )


def _heads(laws: dict[tuple[int, ...], float], count: int) -> dict[tuple[int, ...], float]:
    """The law of the first ``count`` tokens."""
    out: dict[tuple[int, ...], float] = {}
    for tokens, mass in laws.items():
        out[tokens[:count]] = out.get(tokens[:count], 0.0) + mass
    return out


def _gap(got: dict[tuple[int, ...], float], wanted: dict[tuple[int, ...], float], count: int) -> float:
    return total_variation(_heads(got, count), _heads(wanted, count))


def _rounded(laws: dict[tuple[int, ...], float]) -> dict[tuple[int, ...], float]:
    return {tokens: round(mass, 6) for tokens, mass in sorted(laws.items())}
