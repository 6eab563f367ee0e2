"""What a gamma policy is held to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from dspark.plugins import Kind
from dspark.testing.contracts import Seen, contract
from dspark.testing.materials import BlockMaker, make_batch, make_record, random_tokens
from dspark.testing.pipeline import check_law, cost_table, make_parts, sps_table
from dspark.testing.suite import ComponentSuite
from dspark.types import GammaInput, Mode

STAIRS = tuple(1.0 / (1.0 + 0.15 * n + 0.9 * (n // 6)) for n in range(1, 64))


class GammaPolicySuite(ComponentSuite):
    """Holds a gamma policy to ``dspark.protocols.GammaPolicy``.

    Attributes:
        gamma: the largest block size tried.
    """

    kind: ClassVar[Kind] = Kind.GAMMA
    gamma: int = 4

    def inputs(self, rows: int, gamma: int, *, base: int | None = None, mode: Mode = Mode.REJECTION) -> GammaInput:
        """What a policy is asked about before a round."""
        batch = make_batch(self.random(f"{rows}.{gamma}"), rows, gamma, 5, mode=mode)
        tokens = rows if base is None else base
        return GammaInput(batch.requests, gamma, max(rows, 1), tokens, 16, np.zeros(rows, dtype=np.int64))

    def trained(self, rounds: int = 6) -> Any:
        """A policy that has seen some rounds."""
        made, rng, maker = self.build(), self.random("rounds"), BlockMaker(5, seed=self.seed)
        for index in range(rounds):
            batch = make_batch(rng, 2, self.gamma, 5)
            block = maker.block(batch, random_tokens(rng, 2, self.gamma, 5))
            made.observe(make_record(batch, block, rng.integers(0, self.gamma + 1, 2).tolist(), index=index))
        return made

    @contract("it gives each row a whole number of tokens from 0 to gamma, and a reason, with a cost table and without")
    def test_choices(self) -> None:
        for made in (self.build(), self.trained()):
            for rows, gamma in ((1, 1), (1, self.gamma), (3, self.gamma)):
                for mode in Mode:
                    for cost in (sps_table(STAIRS), None):
                        self.case = {"rows": rows, "gamma": gamma, "mode": mode.value, "cost": cost is not None}
                        self._check(made.choose(self.inputs(rows, gamma, mode=mode), cost), rows, gamma)
        self._check(self.build().choose(self.inputs(2, 2, base=40), sps_table(STAIRS)), 2, 2)

    def _check(self, choice: Any, rows: int, gamma: int) -> None:
        gammas = np.asarray(choice.gammas)
        if gammas.shape != (rows,) or gammas.dtype.kind not in "iu" or (gammas < 0).any() or (gammas > gamma).any():
            raise Seen(f"gammas are {gammas.tolist()} ({gammas.dtype}), expected {rows} of 0..{gamma}", **self.case)
        if not choice.reason or math.isinf(choice.gain):
            raise Seen(f"reason {choice.reason!r}, gain {choice.gain}", **self.case)

    @contract("what it decides is a function of its inputs and of what it observed: a second one decides the same")
    def test_determinism(self) -> None:
        given, cost = self.inputs(2, self.gamma), sps_table(STAIRS)
        first, second = (self.trained().choose(given, cost).gammas.tolist() for _ in range(2))
        if first != second:
            raise Seen(f"one {first}, another {second}")

    @contract("it takes every record, and goes on when requests leave")
    def test_every_record(self) -> None:
        made, rng = self.build(), self.random("records")
        batch = make_batch(rng, 2, self.gamma, 5)
        block = BlockMaker(5, seed=self.seed).block(batch, random_tokens(rng, 2, self.gamma, 5))
        made.observe(make_record(None, None, ()))
        made.observe(make_record(batch, block, (0, 0), index=1))
        made.observe(make_record(batch, block, (1, self.gamma), index=2, failed=0))
        made.release(0, 1)
        made.release(7, 3)
        self._check(made.choose(self.inputs(2, self.gamma), sps_table(STAIRS)), 2, self.gamma)

    @contract("a whole engine in which it decides emits the target's law, by enumeration under `rejection`")
    def test_exact_law(self) -> None:
        for name in self.tables():
            check_law(
                lambda draws, name=name: make_parts(draws, gamma_policy=self.build(), cost=cost_table(name)),  # type: ignore[misc]
                cost_table=name,
            )

    def tables(self) -> Sequence[str]:
        """Cost tables of ``dspark.testing.pipeline`` to decide by."""
        return ("dip", "rising")
