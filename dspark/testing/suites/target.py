"""What a target is held to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from dspark.errors import CapacityError
from dspark.plugins import Kind
from dspark.protocols import PrefixTarget
from dspark.testing.contracts import NotApplicable, Seen, contract
from dspark.testing.suite import ComponentSuite
from dspark.types import TargetOutput, VerifyLayout

if TYPE_CHECKING:
    from torch import Tensor

SLOTS, LENGTH = 4, 32


class TargetSuite(ComponentSuite):
    """Holds a target to ``dspark.protocols.Target``: packed forwards, the slot cache, taps.

    Attributes:
        tolerance: between two ways to compute one row's logits, relative to the largest.
        taps: layers that are asked for, where it has taps.
    """

    kind: ClassVar[Kind] = Kind.TARGET
    build_seconds: float = 30.0
    tolerance: float = 1e-4
    taps: Sequence[int] = (0,)

    def target(self) -> Any:
        """A new target with room for four requests of 32 tokens."""
        made = self.build()
        made.allocate(SLOTS, LENGTH)
        return made

    def sequences(self, vocab: int) -> list[list[int]]:
        """Token ids of different lengths."""
        rng = self.random("sequences")
        return [rng.integers(0, vocab, size=n).tolist() for n in (1, 5, 8)]

    def logits(self, target: Any, parts: Sequence[tuple[int, int, Sequence[int]]]) -> list[Tensor]:
        """Run (slot, start, tokens) packed; logits [n, V] of each sequence."""
        output = target.forward(layout(target, parts))
        lens = [len(tokens) for _, _, tokens in parts]
        return list(output.logits.detach().double().cpu().split(lens))

    def _same(self, got: Tensor, wanted: Tensor, what: str, **case: Any) -> None:
        scale = max(float(wanted.abs().max()), 1e-6)
        gap = float((got - wanted).abs().max())
        if not gap <= self.tolerance * scale:
            raise Seen(f"{what}: logits differ by {gap:.3g} of {scale:.3g}", **case)

    @contract("its attributes say what it is, and `fingerprint` what a measured cost depends on, in strings")
    def test_attributes(self) -> None:
        made = self.target()
        shown = {n: getattr(made, n) for n in ("name", "vocab_size", "max_len", "num_layers", "eos_token_ids")}
        if not made.name or made.vocab_size < 2 or made.num_layers < 1 or not isinstance(made.eos_token_ids, tuple):
            raise Seen(f"attributes {shown}")
        prints = dict(made.fingerprint())
        if not prints or not all(isinstance(k, str) and isinstance(v, str) for k, v in prints.items()):
            raise Seen(f"fingerprint {prints}")

    @contract("`allocate` returns the length of a slot, and refuses a budget that is too small by a CapacityError")
    def test_allocation(self) -> None:
        made = self.build()
        got = made.allocate(SLOTS, LENGTH)
        if got != LENGTH or made.max_len != LENGTH:
            raise Seen(f"allocate({SLOTS}, {LENGTH}) returned {got}, max_len is {made.max_len}")
        try:
            self.build().allocate(SLOTS, LENGTH, 1)
        except CapacityError as err:
            if not any(ch.isdigit() for ch in str(err)):
                raise Seen(f"the CapacityError names no bytes: {err}") from err
        else:
            raise Seen("a budget of one byte was accepted", budget_bytes=1)

    @contract("logits are those of the rows that were asked for, [N, V]")
    def test_logit_rows(self) -> None:
        made = self.target()
        tokens = self.sequences(made.vocab_size)[2]
        whole = self.logits(made, [(0, 0, tokens)])[0]
        for rows in ([len(tokens) - 1], [0, 3], []):
            output = made.forward(layout(made, [(1, 0, tokens)], rows))
            if tuple(output.logits.shape) != (len(rows), made.vocab_size):
                raise Seen(f"logits are {tuple(output.logits.shape)}", logit_rows=rows)
            if rows:
                self._same(output.logits.detach().double().cpu(), whole[rows], f"rows {rows}", tokens=tokens)

    @contract("sequences packed into one forward get the logits that they get alone, in any order")
    def test_packed_is_alone(self) -> None:
        made = self.target()
        sequences = self.sequences(made.vocab_size)
        alone = [self.logits(self.target(), [(0, 0, tokens)])[0] for tokens in sequences]
        for order in ([0, 1], [2, 0], [1, 2, 0]):
            packed = self.logits(made, [(slot, 0, sequences[i]) for slot, i in enumerate(order)])
            for got, i in zip(packed, order, strict=True):
                self._same(got, alone[i], f"sequence {i} packed as {order}", tokens=sequences[i])

    @contract("a sequence read in parts gets the logits of one read at once: keys are at their positions")
    def test_parts(self) -> None:
        made = self.target()
        tokens = self.sequences(made.vocab_size)[2]
        whole = self.logits(made, [(0, 0, tokens)])[0]
        for cut in (1, 4, len(tokens) - 1):
            first = self.logits(made, [(1, 0, tokens[:cut])])[0]
            second = self.logits(made, [(1, cut, tokens[cut:])])[0]
            self._same(torch.cat([first, second]), whole, f"read in parts of {cut}", tokens=tokens)

    @contract("rollback is a smaller start: what an earlier round left behind it is never read")
    def test_rollback(self) -> None:
        made = self.target()
        tokens = self.sequences(made.vocab_size)[2]
        wrong = [(t + 1) % made.vocab_size for t in tokens[3:]]
        wanted = self.logits(self.target(), [(1, 0, tokens[:4])])[0][3:]
        self.logits(made, [(1, 0, [*tokens[:3], *wrong])])
        again = self.logits(made, [(1, 3, tokens[3:4])])[0]
        self._same(again, wanted, "after rejected tokens", tokens=tokens[:4], rejected=wrong)

    @contract("a slot that is used again shows nothing of the request before")
    def test_slots_are_reused(self) -> None:
        made = self.target()
        _, short, long = self.sequences(made.vocab_size)
        wanted = self.logits(self.target(), [(2, 0, short)])[0]
        self.logits(made, [(2, 0, long)])
        self._same(self.logits(made, [(2, 0, short)])[0], wanted, "in a slot used before", tokens=short)

    @contract("with `copy_prefix`, a slot goes on from what it or another holds; `cache_version` tells of each write")
    def test_prefixes(self) -> None:
        made = self.target()
        offered: object = made
        if not isinstance(offered, PrefixTarget):
            raise NotApplicable("it has no copy_prefix")
        _, short, long = self.sequences(made.vocab_size)
        text, versions = [*long[:5], *short], [made.cache_version]
        wanted = self.logits(self.target(), [(1, 0, text)])[0]
        self.logits(made, [(0, 0, long), (1, 0, text[::-1])])
        versions.append(made.cache_version)
        for slot in (1, 0):
            if not made.copy_prefix(0, slot, 5):
                raise Seen("it gives nothing of a sound slot away", source=0, slot=slot)
            versions.append(made.cache_version)
            got = self.logits(made, [(slot, 5, short)])[0]
            versions.append(made.cache_version)
            self._same(got, wanted[5:], f"slot {slot} after the first 5 tokens of slot 0", tokens=text)
        unseen = [i for i in range(1, len(versions)) if versions[i] == versions[i - 1]]
        if unseen and unseen != [4]:  # in place there may be nothing to write
            raise Seen(f"cache_version went {versions} through forward, and copy_prefix and forward twice")

    @contract("one layout gives the same bits every time")
    def test_determinism(self) -> None:
        made = self.target()
        tokens = self.sequences(made.vocab_size)[1]
        first, again = (self.logits(made, [(0, 0, tokens)])[0] for _ in range(2))
        if not torch.equal(first, again):
            raise Seen("the second forward gave other logits", tokens=tokens)

    @contract("with taps, hidden states of the layers asked for come for every row, [B, m * d], wherever it is packed")
    def test_taps(self) -> None:
        made = self.target()
        if not made.capabilities.taps:
            raise NotApplicable("it declares taps=False")
        _, short, long = self.sequences(made.vocab_size)
        taps = tuple(self.taps)
        one = self._taps(made, [(0, 0, short)], taps)
        two = self._taps(made, [(0, 0, short), (1, 0, long)], taps)
        if one.shape[0] != len(short) or two.shape[0] != len(short) + len(long) or one.shape[1] % len(taps):
            raise Seen(f"taps are {tuple(one.shape)} and {tuple(two.shape)}", tokens=[len(short), len(long)], taps=taps)
        self._same(two[: len(short)], one, "taps packed and alone", tokens=short)

    def _taps(self, made: Any, parts: Sequence[tuple[int, int, Sequence[int]]], taps: Sequence[int]) -> Tensor:
        output: TargetOutput = made.forward(layout(made, parts, []), taps)
        if output.taps is None:
            raise Seen("no taps came back", taps=taps)
        return output.taps.detach().double().cpu()

    @contract("`executed_tokens` counts what is run, padding included: never less than the layout's tokens")
    def test_executed_tokens(self) -> None:
        made = self.target()
        sequences = self.sequences(made.vocab_size)
        given = layout(made, [(slot, 0, tokens) for slot, tokens in enumerate(sequences)])
        count = made.executed_tokens(given)
        if count < given.num_tokens:
            raise Seen(f"{count} for a layout of {given.num_tokens}", lens=[len(t) for t in sequences])
        if not made.capabilities.ragged and count < max(map(len, sequences)) * len(sequences):
            raise Seen(f"ragged is False, but {count} leaves padding out", lens=[len(t) for t in sequences])


def layout(
    target: Any, parts: Sequence[tuple[int, int, Sequence[int]]], rows: Sequence[int] | None = None
) -> VerifyLayout:
    """(slot, start, tokens) of each sequence, packed; logits of all rows, or of ``rows``."""
    ids = [t for _, _, tokens in parts for t in tokens]
    places = [start + i for _, start, tokens in parts for i in range(len(tokens))]
    lens = [len(tokens) for _, _, tokens in parts]
    return VerifyLayout(
        token_ids=torch.tensor(ids, dtype=torch.int64, device=target.device),
        positions=torch.tensor(places, dtype=torch.int64, device=target.device),
        slots=np.array([slot for slot, _, _ in parts], dtype=np.int64),
        starts=np.array([start for _, start, _ in parts], dtype=np.int64),
        cu_query_lens=np.concatenate([[0], np.cumsum(lens)]).astype(np.int64),
        logit_rows=np.arange(len(ids), dtype=np.int64) if rows is None else np.array(rows, dtype=np.int64),
    )
