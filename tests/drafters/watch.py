"""What a stretch of torch code allocates, and an engine whose vocabulary is large enough for it to show."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dspark.config import SamplingParams
from dspark.drafters.dspark import DSparkDraft
from dspark.engine import round as rounds
from dspark.engine.engine import Engine
from dspark.ops.dispatch import Choice
from dspark.sampling.draws import CounterDraws
from dspark.testing.toys import random_table
from dspark.types import Mode, TargetOutput
from dspark.verifiers.coupled import CoupledVerifier
from dspark.verifiers.greedy import GreedyVerifier
from dspark.verifiers.rejection import RejectionVerifier
from tests.drafters.golden import make_drafter
from tests.drafters.toys import FeatureTarget, toy_checkpoint
from tests.exactness.harness import cost_table, engine, make_estimator, make_parts, make_scheduler

VOCAB = 97
ROWS = 3


class Allocations(TorchDispatchMode):
    """Notes every operator that makes a tensor of at least ``limit`` elements in memory of its own."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit, self.found = limit, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, torch.Tensor)]
        held = {x.untyped_storage().data_ptr() for x in given}
        for made in tree_leaves(out):
            if not isinstance(made, torch.Tensor) or any(made is x for x in given):
                continue
            storage = made.untyped_storage()
            if storage.nbytes() // made.element_size() >= self.limit and storage.data_ptr() not in held:
                self.found.append(f"{func} {tuple(made.shape)}")
        return out


class SingleTarget(FeatureTarget):
    """In float32, as a model's logits are at most."""

    def forward(self, layout: Any, taps: Any = ()) -> TargetOutput:
        output = super().forward(layout, taps)
        return replace(output, logits=output.logits.float(), taps=None if output.taps is None else output.taps.float())


@cache
def table() -> torch.Tensor:
    return random_table(VOCAB + 1, VOCAB, VOCAB, seed=1, scale=2.0)


def made_engine(head: str, bias: Any, reject: Any, candidates: int | None = None) -> Engine:
    """An engine of ROWS slots with a block drafter; None for the engine's own code."""
    target = SingleTarget(table(), mix=0.4)
    drafter = make_drafter(toy_checkpoint(head, vocab=VOCAB), target, dtype=torch.float32, candidates=candidates)
    parts = make_parts(
        CounterDraws(),
        drafter=drafter,
        estimator=make_estimator("constant"),
        scheduler=make_scheduler("fixed", rows=ROWS),
        target=target,
        cost=cost_table("dip"),
    )
    calls = {"bias_sample": bias, "reject_sample": reject}
    parts.kernels = {op: Choice(op, "cpu", "float32", op, "a test's", call) for op, call in calls.items()}
    parts.verifiers = {
        Mode.GREEDY: GreedyVerifier(reject),
        Mode.REJECTION: RejectionVerifier(reject),
        Mode.COUPLED: CoupledVerifier(reject),
    }
    return engine(parts, slots=ROWS, max_len=24)


def requests(tokens: int = 6, **params: Any) -> list[tuple[tuple[int, ...], SamplingParams]]:
    """A greedy request, one with a seed and one without, with ``params`` for those that sample."""
    shared: dict[str, Any] = {"max_tokens": tokens, "temperature": 0.8, **params}
    return [
        ((3, 1, 4), SamplingParams(max_tokens=tokens, temperature=0.0)),
        ((1, 5), SamplingParams(seed=9, **shared)),
        ((9, 2, 6, 5), SamplingParams(request_key=77, **shared)),
    ]


@contextmanager
def watching(monkeypatch: pytest.MonkeyPatch, drafts: Sequence[str]) -> Iterator[Allocations]:
    """Notes what drafting makes from base logits on (the drafter's methods ``drafts``), and processing and verifying:
    everything as large as one row of scores for each request."""
    watch = Allocations(ROWS * VOCAB)

    def within(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            with watch:
                return call(*arguments, **named)

        return run

    with monkeypatch.context() as patch:
        for name in drafts:
            patch.setattr(DSparkDraft, name, within(getattr(DSparkDraft, name)))
        for name in ("process", "verify", "commit"):
            patch.setattr(rounds, name, within(getattr(rounds, name)))
        yield watch
