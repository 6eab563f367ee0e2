"""Drafting through the operation ``bias_sample``: a block is drawn from base logits and the head's inputs, and q stays
known by these, not by a table of probabilities.

A source of draws that hashes gives the operation row keys. One that wants to see laws instead (the tests' enumerator)
is shown the operation's own: each token is forced in turn by its noise, and what the operation says of it is its
probability.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.errors import ConfigError, RowFault
from dspark.ops import noise
from dspark.ops.bias_sample import below, biased_logits, column_names
from dspark.ops.reference import index_tensor
from dspark.ops.reject_sample import Law
from dspark.types import BatchView, BoolArray, DrawKeys, DrawSource, IntArray, KeyArray, Mode, Purpose

FORCED = -1e30
"""Noise of every token but the one that is to be taken: finite, so that a token without probability shows."""


def hashed_keys(draws: DrawSource, keys: DrawKeys) -> KeyArray | None:
    """Row keys of n draws; None where the source does not hash, and wants to see laws."""
    function: Callable[[DrawKeys], KeyArray | None] | None = getattr(draws, "row_keys", None)
    return None if function is None else function(keys)


@dataclass(frozen=True, slots=True)
class Block:
    """What all positions of a block share.

    Attributes:
        base: base logits [G, R, Vd], or of each row's candidates [G, R, K].
        w2: W2 [Vd, r] of the head; None for no head.
        token_map: draft id -> target id, [Vd]; None where they are the same.
        candidates: draft ids of the columns, [G, R, K]; None for all.
    """

    base: Tensor
    w2: Tensor | None
    token_map: Tensor | None
    candidates: Tensor | None


class FusedDistribution:
    """q of a block that ``bias_sample`` drew.

    Args:
        block, latents, lse: what it drew from; latents are [R, r] of each position or None, lse [R].
        token_ids: [R, gamma] target ids.
        log_q: log q at them, [R, gamma] float32; 0 where nothing was sampled.
        temperature: [R], 0 for rows that took the argmax.
        vocab_size: V.
    """

    def __init__(
        self,
        block: Block,
        latents: Sequence[Tensor | None],
        lse: Sequence[Tensor],
        token_ids: Tensor,
        log_q: Tensor,
        temperature: Tensor,
        vocab_size: int,
    ) -> None:
        self.token_ids, self.log_q, self.vocab_size = token_ids, log_q, vocab_size
        self._block, self._temperature = block, temperature
        known = [x for x in latents if x is not None]
        self._latent = torch.stack(known) if known else None
        self._lse = torch.stack(list(lse))
        self._greedy: BoolArray = (temperature == 0).cpu().numpy()

    @property
    def law(self) -> Law:
        """For ``reject_sample``."""
        block, columns, names = self._block, None, None
        if block.token_map is not None and block.candidates is None:
            columns = inverse_map(block.token_map, self.vocab_size)
        elif block.token_map is not None and block.candidates is not None:
            names = block.token_map[block.candidates]
        return Law(block.base, self._lse, self._temperature, self._latent, block.w2, columns, block.candidates, names)

    def token_probs(self) -> Tensor:
        """q(x_k), [R, gamma] float64; 1 where nothing was sampled."""
        return torch.exp(self.log_q.to(torch.float64))

    def probs(self, rows: IntArray, positions: IntArray) -> Tensor:
        """q over the target's vocabulary at n (row, position) pairs, [n, V] float64."""
        device = self.token_ids.device
        r, k = index_tensor(rows, device), index_tensor(positions, device)
        block = self._block
        ids = None if block.candidates is None else block.candidates[k, r]
        latent = None if self._latent is None else self._latent[k, r]
        scores = biased_logits(block.base[k, r], latent, block.w2, ids)
        warm = torch.where(self._temperature[r] == 0, 1.0, self._temperature[r])
        law = torch.exp(below(scores / warm.unsqueeze(1), self._lse[k, r])).to(torch.float64)
        names = column_names(law.shape[1], block.token_map, ids, device)
        wide = torch.zeros(len(rows), max(self.vocab_size, law.shape[1]), dtype=torch.float64, device=device)
        wide.scatter_(1, names.expand(law.shape), law)
        hot = np.flatnonzero(self._greedy[rows])
        if len(hot):
            at = index_tensor(hot, device)
            wide[at] = 0.0
            wide[at, self.token_ids[r[at], k[at]]] = 1.0
        return wide[:, : self.vocab_size]


class FusedDrafts:
    """Draws the positions of one block, left to right.

    q has each row's temperature, and neither top-k, top-p nor min-p, which would take the biased logits of a whole row:
    a draft that they mask has p = 0 and is rejected. With top_k = 1, which leaves one token, the argmax is drafted.

    Args:
        kernel: ``bias_sample``.
        batch, draws: of the round.
        vocab_size: V of the target.
        device: of the logits.
    """

    def __init__(
        self, kernel: Callable[..., Any], batch: BatchView, draws: DrawSource, vocab_size: int, device: Any
    ) -> None:
        self._kernel, self._draws, self.vocab_size = kernel, draws, vocab_size
        self._modes = np.array([r.mode for r in batch.requests], dtype=object)
        self._keys = np.array([r.key for r in batch.requests], dtype=np.uint64)
        self._anchors = np.array([r.anchor_position for r in batch.requests], dtype=np.int64)
        warm = [0.0 if r.mode is Mode.GREEDY or r.params.top_k == 1 else r.params.temperature for r in batch.requests]
        self.temperature = torch.tensor(warm, dtype=torch.float32, device=device)
        self._rejection = np.flatnonzero(self._modes == Mode.REJECTION)
        self._coupled = np.flatnonzero(self._modes == Mode.COUPLED)
        self._block: Block | None = None
        self._halves: Tensor | None = None
        self._latents: list[Tensor | None] = []
        self.tokens: list[Tensor] = []
        self._log_q: list[Tensor] = []
        self._lse: list[Tensor] = []
        self._checked = False

    @property
    def draws_a_position(self) -> int:
        """Random decisions of one position."""
        return len(self._rejection) + len(self._coupled)

    def begin(self, block: Block) -> None:
        """Set what the block is drawn from.

        Raises:
            ConfigError: a block was begun already, or it is wider than the target's vocabulary and has no map.
        """
        if self._block is not None:
            raise ConfigError("FusedDrafts.begin: a sampler draws one block")
        if block.candidates is None and block.token_map is None and block.base.shape[2] > self.vocab_size:
            w2 = None if block.w2 is None else block.w2[: self.vocab_size]
            block = Block(block.base[:, :, : self.vocab_size], w2, None, None)
        self._block = block
        self._halves = self._hash(len(block.base))

    def _hash(self, gamma: int) -> Tensor | None:
        """Row keys of all positions in one transfer, [gamma, R, 2]; None where the source of draws does not hash."""
        offsets = np.repeat(np.arange(gamma, dtype=np.int64), len(self._rejection))
        who = np.tile(self._rejection, gamma)
        hashed = hashed_keys(self._draws, DrawKeys(self._keys[who], self._anchors[who], offsets, Purpose.DRAFT))
        if hashed is None:
            return None
        words = np.zeros((gamma, len(self._keys)), dtype=np.uint64)
        words[:, self._rejection] = hashed.reshape(gamma, -1)
        if len(self._coupled):
            places = self._anchors[self._coupled] + 1 + np.arange(gamma)[:, None]
            seeds = np.broadcast_to(self._keys[self._coupled], places.shape)
            words[:, self._coupled] = noise.row_keys(noise.NOISE, seeds.ravel(), places.ravel()).reshape(places.shape)
        return noise.key_halves(words, self.temperature.device)

    def sample(self, latent: Tensor | None, offset: int) -> Tensor:
        """Draw x_{offset+1} of every row from the head's input [R, r], [R] int64 target ids.

        Raises:
            ConfigError: no block, or offsets out of order.
        """
        block = self._block
        if block is None or offset != len(self.tokens):
            raise ConfigError(f"FusedDrafts.sample: expected offset {len(self.tokens)} of a block, got {offset}")
        ids = None if block.candidates is None else block.candidates[offset]
        given = (block.base[offset], self.temperature)
        rest = (latent, block.w2, block.token_map, ids)
        halves, table = self._randomness(offset, lambda noisy: self._kernel(*given, self._no_keys, *rest, noisy), rest)
        token, log_q, lse = self._kernel(*given, halves, *rest, table)
        self._latents.append(latent)
        self.tokens.append(token)
        self._log_q.append(log_q)
        self._lse.append(lse)
        return self.tokens[-1]

    @property
    def _no_keys(self) -> Tensor:
        return torch.zeros(len(self._keys), 2, dtype=torch.int32, device=self.temperature.device)

    def _randomness(
        self, offset: int, call: Callable[[Tensor], Any], rest: tuple[Tensor | None, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """Keys, and noise in their place where the source of draws does not hash."""
        if self._halves is not None:
            return self._halves[offset], None
        who = self._rejection
        offsets = np.full(len(who), offset, dtype=np.int64)
        asked = DrawKeys(self._keys[who], self._anchors[who], offsets, Purpose.DRAFT)
        places = self._anchors[self._coupled] + 1 + offset
        if self._block is None:
            raise ConfigError("FusedDrafts: no block")
        width = self._block.base.shape[2]
        names = column_names(width, rest[2], rest[3], self.temperature.device).expand(len(self._keys), width)
        table = torch.zeros(len(self._keys), width, device=self.temperature.device)
        if len(places):
            at = index_tensor(self._coupled, table.device)
            table[at] = self._draws.gumbel(self._keys[self._coupled], places, self.vocab_size, names[at])
        if len(who):
            at = index_tensor(who, table.device)
            law = forced_law(call, names, table)[at]
            chosen = self._draws.categorical(asked, law)
            table[at] = FORCED
            table[at, chosen] = 0.0
        return self._no_keys, table

    def finish(self) -> tuple[Tensor, Tensor, FusedDistribution]:
        """Token ids and log q [R, gamma], and q.

        Raises:
            RowFault: rows where a position had no finite score. Raised once; then the block is what was sampled.
            ConfigError: nothing was sampled.
        """
        if self._block is None or not self.tokens:
            raise ConfigError("FusedDrafts.finish: nothing was sampled")
        tokens, log_q = torch.stack(self.tokens, dim=1), torch.stack(self._log_q, dim=1)
        if not self._checked:
            self._checked = True
            bad = (~torch.isfinite(log_q)).any(dim=1).nonzero().flatten().tolist()
            if bad:
                raise RowFault(f"draft logits of rows {bad} hold no finite maximum", bad)
        block = self._block
        q = FusedDistribution(block, self._latents, self._lse, tokens, log_q, self.temperature, self.vocab_size)
        return tokens, log_q, q


def forced_law(call: Callable[[Tensor], Any], names: Tensor, table: Tensor) -> Tensor:
    """The law of an operation that takes noise, over columns: exp of what it says of each token when that is forced.

    Args:
        call: noise [R, W] -> (token [R], log-probability [R], ..).
        names: token id of each column, [R, W].
        table: noise to start from, [R, W]; not changed.

    Returns:
        [R, W] float64; see :func:`exact`.
    """
    law = torch.zeros(table.shape, dtype=torch.float64, device=table.device)
    for column in range(table.shape[1]):
        noisy = torch.full_like(table, FORCED)
        noisy[:, column] = 0.0
        token, log_p = call(noisy)[:2]
        said = torch.where(token == names[:, column], log_p.to(torch.float64), -math.inf)
        law[:, column] = torch.exp(said)
    return exact(law)


def exact(law: Tensor) -> Tensor:
    """Float32 laws [n, W] brought to sum 1 in float64. Rows that miss 1 by more than rounding are left as they are."""
    total = law.sum(-1, keepdim=True)
    return torch.where((total - 1.0).abs() <= 1e-5, law / total, law)


def inverse_map(token_map: Tensor, vocab_size: int) -> Tensor:
    """Target id -> draft id of a pruned vocabulary, [V] int32; -1 where it has none."""
    columns = torch.full((vocab_size,), -1, dtype=torch.int32, device=token_map.device)
    columns[token_map] = torch.arange(len(token_map), dtype=torch.int32, device=token_map.device)
    return columns
