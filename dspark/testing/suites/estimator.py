"""What a confidence estimator is held to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from dspark.plugins import Kind
from dspark.testing.contracts import NotApplicable, Seen, contract
from dspark.testing.materials import BlockMaker, make_batch, make_record, random_tokens, regenerated, subset
from dspark.testing.pipeline import check_law, cost_table, make_parts, shipped
from dspark.testing.suite import ComponentSuite
from dspark.types import BatchView, DraftBlock, FloatArray, Mode

if TYPE_CHECKING:
    from torch import Tensor

SIZES = ((1, 1), (1, 2), (2, 2), (1, 4), (3, 4))
"""(rows, gamma), small ones first."""


class EstimatorSuite(ComponentSuite):
    """Holds an estimator to ``dspark.protocols.ConfidenceEstimator``.

    Blocks are a toy drafter's, with q, ``hidden`` and ``features`` (``markov``, ``match_length``) that are functions of
    x_{<k} and history; override ``block`` for an estimator that reads others.

    Attributes:
        vocab_size, hidden_size, rank: of these blocks.
        gamma: the largest block size tried.
        tolerance: between c of a row alone and in a batch, where rounding may differ.
    """

    kind: ClassVar[Kind] = Kind.ESTIMATOR
    vocab_size: int = 5
    hidden_size: int = 6
    rank: int = 4
    gamma: int = 4
    tolerance: float = 1e-6

    def block(self, batch: BatchView, token_ids: Tensor) -> DraftBlock:
        """The block of a drafter whose draws fell on ``token_ids`` [R, gamma]."""
        return self.maker(self.vocab_size).block(batch, token_ids)

    def maker(self, vocab: int) -> BlockMaker:
        """Tables of the toy drafter."""
        return BlockMaker(vocab, hidden_size=self.hidden_size, rank=self.rank, seed=self.seed)

    def sizes(self) -> Sequence[tuple[int, int]]:
        """(rows, gamma) to try."""
        return [(rows, gamma) for rows, gamma in SIZES if gamma <= self.gamma]

    def example(self, rows: int, gamma: int) -> tuple[BatchView, Tensor]:
        """A batch and drafted tokens."""
        rng = self.random(f"{rows}.{gamma}")
        batch = make_batch(rng, rows, gamma, self.vocab_size)
        return batch, random_tokens(rng, rows, gamma, self.vocab_size)

    def trained(self, *, rounds: int = 6) -> Any:
        """An estimator that has seen some rounds."""
        made, rng = self.build(), self.random("rounds")
        for index in range(rounds):
            batch, tokens = self.example(2, self.gamma)
            made.observe(
                make_record(batch, self.block(batch, tokens), rng.integers(0, self.gamma + 1, 2).tolist(), index=index)
            )
        return made

    def estimate(self, made: Any, batch: BatchView, token_ids: Tensor) -> FloatArray:
        """c of a block."""
        return np.array(made.estimate(batch, self.block(batch, token_ids)), dtype=np.float64)

    @contract("c is [R, gamma], every entry a number from 0 to 1, before and after it has learned")
    def test_values(self) -> None:
        for made in (self.build(), self.trained()):
            for rows, gamma in self.sizes():
                batch, tokens = self.example(rows, gamma)
                self.case = {"rows": rows, "gamma": gamma, "drafts": tokens}
                got = made.estimate(batch, self.block(batch, tokens))
                probs = np.asarray(got, dtype=np.float64)
                if probs.shape != (rows, gamma):
                    raise Seen(f"the shape is {probs.shape}", **self.case)
                if not ((probs >= 0) & (probs <= 1)).all():
                    raise Seen(f"c = {probs.tolist()}", **self.case)

    @contract("c_k is a function of x_{<k} and history: x_k and what comes after change nothing (non-anticipation)")
    def test_non_anticipation(self) -> None:
        made = self.trained()
        if made.capabilities.anticipates:
            raise NotApplicable("it declares anticipates=True, and is refused with `rejection`")
        for rows, gamma in self.sizes():
            batch, tokens = self.example(rows, gamma)
            wanted = self.estimate(made, batch, tokens)
            for row in range(rows):
                for k in range(gamma):
                    self._change(made, batch, tokens, wanted, row, k)

    def _change(self, made: Any, batch: BatchView, tokens: Tensor, wanted: FloatArray, row: int, k: int) -> None:
        """Try every x_{k + 1} of a row, alone and with everything after it."""
        for shift in range(1, self.vocab_size):
            for alone in (True, False):
                other = tokens.clone()
                last = k + 1 if alone else tokens.shape[1]
                other[row, k:last] = (other[row, k:last] + shift) % self.vocab_size
                got = self.estimate(made, batch, other)
                for r in range(len(batch)):
                    end = k + 1 if r == row else tokens.shape[1]
                    moved = np.flatnonzero(got[r, :end] != wanted[r, :end])
                    if len(moved):
                        j = int(moved[0])
                        whose = "" if r == row else f" of another row ({r})"
                        raise Seen(
                            f"c_{j + 1}{whose} is {wanted[r, j]:.6g}, but {got[r, j]:.6g} after x_{k + 1} of row {row} "
                            f"changed from {int(tokens[row, k])} to {int(other[row, k])}",
                            drafts=tokens,
                            changed=other,
                            histories=[list(q.ids) for q in batch.requests],
                        )

    @contract("it is frozen within a round: asked twice it answers the same, and only `observe` changes that")
    def test_frozen_within_a_round(self) -> None:
        made = self.trained()
        batch, tokens = self.example(2, min(2, self.gamma))
        first = self.estimate(made, batch, tokens)
        again = self.estimate(made, batch, tokens)
        if not np.array_equal(first, again):
            raise Seen(f"first {first.tolist()}, then {again.tolist()}", drafts=tokens)

    @contract("what it answers is a function of its inputs and of what it observed: a second one answers the same")
    def test_determinism(self) -> None:
        batch, tokens = self.example(2, min(2, self.gamma))
        first, second = (self.estimate(self.trained(), batch, tokens) for _ in range(2))
        if not np.array_equal(first, second):
            raise Seen(f"one {first.tolist()}, another {second.tolist()}", drafts=tokens)

    @contract("without `shared_state`, a row's c depends on its own history alone: batch, order and neighbours do not")
    def test_rows_are_apart(self) -> None:
        if self.build().capabilities.shared_state:
            raise NotApplicable("it declares shared_state=True")
        batch, tokens = self.example(3, min(3, self.gamma))
        whole = self.estimate(self.trained(), batch, tokens)
        for rows in ([0], [2], [2, 0]):
            got = self.estimate(self.trained(), subset(batch, rows), tokens[rows])
            if not np.allclose(got, whole[rows], rtol=0, atol=self.tolerance):
                raise Seen(f"rows {rows} got {got.tolist()}, in the batch {whole[rows].tolist()}", drafts=tokens)

    @contract("without `shared_state`, a request that takes a released slot begins anew")
    def test_slots_are_reused(self) -> None:
        if self.build().capabilities.shared_state:
            raise NotApplicable("it declares shared_state=True")
        made = self.trained()
        batch, tokens = self.example(2, min(2, self.gamma))
        for request in batch.requests:
            made.release(request.slot, request.generation)
        later = regenerated(batch, 2)
        got, fresh = self.estimate(made, later, tokens), self.estimate(self.build(), later, tokens)
        if not np.array_equal(got, fresh):
            raise Seen(f"{got.tolist()} in slots used before, {fresh.tolist()} in a fresh estimator", drafts=tokens)

    @contract("it takes every record: plain steps, rows that failed, rounds in which nothing was accepted or offered")
    def test_every_record(self) -> None:
        made = self.build()
        batch, tokens = self.example(2, self.gamma)
        block = self.block(batch, tokens)
        for record in (
            make_record(None, None, ()),
            make_record(batch, block, (0, 0)),
            make_record(batch, block, (1, self.gamma), failed=0),
            make_record(
                batch, DraftBlock(block.token_ids, 0 * block.lens, block.q, block.hidden, block.features), (0, 0)
            ),
        ):
            made.observe(record)
        made.release(3, 9)
        if not np.isfinite(self.estimate(made, batch, tokens)).all():
            raise Seen("c is not finite afterwards", drafts=tokens)

    @contract("it changes none of its inputs")
    def test_inputs_stay(self) -> None:
        made = self.trained()
        batch, tokens = self.example(2, min(2, self.gamma))
        block = self.block(batch, tokens)
        kept = block.token_ids.clone(), block.lens.copy(), None if block.hidden is None else block.hidden.clone()
        made.estimate(batch, block)
        same = torch.equal(block.token_ids, kept[0]) and np.array_equal(block.lens, kept[1])
        if not same or (block.hidden is not None and kept[2] is not None and not torch.equal(block.hidden, kept[2])):
            raise Seen("it wrote to the block that it was given", drafts=tokens)

    @contract("scheduled by it, a whole engine emits the target's law, by enumeration under `rejection`")
    def test_exact_law(self) -> None:
        if self.build().capabilities.anticipates:
            raise NotApplicable("it declares anticipates=True")
        if self.build().capabilities.needs_hidden:
            raise NotApplicable("it needs hidden states, which the toy drafter of the engine has not")
        for scheduler, settings, cost in (("threshold", {"threshold": 0.5}, "dip"), ("causal", {}, "rising")):

            def make(draws: Any, name: str = scheduler, own: Any = settings, cost: str = cost) -> Any:
                planner = shipped(Kind.SCHEDULER, name, **own)
                return make_parts(draws, estimator=self.build(), scheduler=planner, cost=cost_table(cost))

            check_law(make, scheduler=scheduler, mode=Mode.REJECTION.value)
