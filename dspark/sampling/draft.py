"""The draft side of a round: tokens are sampled here, and q, the law they were sampled from, stays here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.errors import ConfigError, RowFault
from dspark.ops import reference
from dspark.ops.reference import index_tensor, take_rows
from dspark.sampling.fused import FusedDistribution, FusedDrafts
from dspark.sampling.warpers import Warpers, warp
from dspark.types import BatchView, DraftBlock, DrawKeys, DrawSource, IntArray, Mode, Purpose


class PointMass:
    """q of tokens that are a function of history: 1 at each of them.

    Args:
        token_ids: [R, gamma] target ids.
        vocab_size: V.
    """

    def __init__(self, token_ids: Tensor, vocab_size: int) -> None:
        self.token_ids = token_ids
        self.vocab_size = vocab_size

    def token_probs(self) -> Tensor:
        """Ones, [R, gamma] float64."""
        return torch.ones(self.token_ids.shape, dtype=torch.float64, device=self.token_ids.device)

    def probs(self, rows: IntArray, positions: IntArray) -> Tensor:
        """One-hot rows, [n, V] float64."""
        where = index_tensor(rows, self.token_ids.device), index_tensor(positions, self.token_ids.device)
        hot = torch.zeros(len(rows), self.vocab_size, dtype=torch.float64, device=self.token_ids.device)
        return hot.scatter_(1, self.token_ids[where].unsqueeze(1), 1.0)


class DenseDistribution:
    """q of a sampled block. Rows that took the argmax are point masses, the others hold their law at each position.

    Laws are kept once, as weights in the precision that they were computed in; the law itself is those weights over
    their float64 sum. That is what was drawn from, and what ``token_probs`` and ``probs`` return.

    Args:
        token_ids: [R, gamma] target ids.
        token_probs: [R, gamma] float64.
        weights: gamma tensors [D, Vd] of the D rows with a law.
        dense: row of ``weights`` of each row of the block, -1 for a point mass, [R].
        vocab_size: V.
        token_maps: draft id -> target id of each position: [Vd], [R, K] for candidates of each row, or None.
    """

    def __init__(
        self,
        token_ids: Tensor,
        token_probs: Tensor,
        weights: list[Tensor],
        dense: IntArray,
        vocab_size: int,
        token_maps: list[Tensor | None],
    ) -> None:
        self.token_ids = token_ids
        self.vocab_size = vocab_size
        self._token_probs = token_probs
        self._weights = weights
        self._dense = dense
        self._maps = token_maps

    def token_probs(self) -> Tensor:
        """q(x_k), [R, gamma] float64; 1 where nothing was sampled."""
        return self._token_probs

    def probs(self, rows: IntArray, positions: IntArray) -> Tensor:
        """q over the target's vocabulary at n (row, position) pairs, [n, V] float64."""
        device = self.token_ids.device
        out = torch.zeros(len(rows), self.vocab_size, dtype=torch.float64, device=device)
        dense = self._dense[rows]
        for position in np.unique(positions).tolist():
            here = (positions == position) & (dense >= 0)
            if here.any():
                law = reference.normalised(self._weights[position][index_tensor(dense[here], device)])
                ids = self._maps[position]
                ids = take_rows(ids, rows[here]) if ids is not None and ids.dim() == 2 else ids
                out[index_tensor(np.flatnonzero(here), device)] = self._widen(law, ids)
        hot = np.flatnonzero(dense < 0)
        if len(hot):
            tokens = self.token_ids[index_tensor(rows[hot], device), index_tensor(positions[hot], device)]
            out[index_tensor(hot, device), tokens] = 1.0
        return out

    def _widen(self, law: Tensor, token_map: Tensor | None) -> Tensor:
        """[n, Vd] over draft ids -> [n, V] over target ids; ``token_map`` [Vd], or [n, Vd] where rows differ."""
        if token_map is None and law.shape[1] == self.vocab_size:
            return law
        wide = torch.zeros(law.shape[0], self.vocab_size, dtype=law.dtype, device=law.device)
        if token_map is None:
            wide[:, : law.shape[1]] = law
            return wide
        return wide.scatter_(1, token_map.expand(law.shape), law)


class RoundSampler:
    """The :class:`dspark.protocols.DraftSampler` of one round.

    Greedy rows take the argmax (q is a point mass). The others pass the request's temperature, top-k, top-p and min-p,
    then draw: ``rejection`` by one uniform under (request key, anchor, offset, DRAFT), ``coupled`` as the argmax of
    log q + g with the noise of (seed, the token's absolute position, its target id). Penalties and custom processors
    do not touch q: they make it a little worse, never wrong.

    Args:
        batch: rows that draft.
        draws: where decisions are taken.
        vocab_size: V of the target. Draft logits may be wider (padding: the surplus is cut) or narrower.
        device: where the target's tokens live; None for the device of the draft logits.
        kernel: ``bias_sample``, where one was chosen; drafters that can may then draw through ``fused``.

    Attributes:
        fused: for drafters that add a head's bias to base logits: draws a block without ever writing their sum
            (:class:`dspark.sampling.fused.FusedDrafts`). None without a kernel. A block takes all of its positions this
            way or none.
        draws_taken: number of random decisions so far: after the first one, a fault may depend on draft values.
    """

    def __init__(
        self,
        batch: BatchView,
        draws: DrawSource,
        vocab_size: int,
        device: torch.device | str | None = None,
        kernel: Callable[..., Any] | None = None,
    ) -> None:
        self.batch = batch
        self.vocab_size = vocab_size
        self._taken = 0
        self._draws = draws
        self._device = device
        self._anchors = np.array([r.anchor_position for r in batch.requests], dtype=np.int64)
        self._keys = np.array([r.key for r in batch.requests], dtype=np.uint64)
        modes = [r.mode for r in batch.requests]
        self._laws = np.array([i for i, m in enumerate(modes) if m is not Mode.GREEDY], dtype=np.int64)
        law_modes = [modes[i] for i in self._laws]
        self._rejection = np.array([j for j, m in enumerate(law_modes) if m is Mode.REJECTION], dtype=np.int64)
        self._coupled = np.array([j for j, m in enumerate(law_modes) if m is Mode.COUPLED], dtype=np.int64)
        self._together = bool((np.diff(self._laws) == 1).all())
        self._warpers = Warpers.of([batch.requests[i].params for i in self._laws])
        self.fused: FusedDrafts | None = None
        if kernel is not None:
            self.fused = FusedDrafts(kernel, batch, draws, vocab_size, device)
        self._tokens: list[Tensor] = []
        self._probs: list[Tensor] = []
        self._weights: list[Tensor] = []
        self._maps: list[Tensor | None] = []

    @property
    def draws_taken(self) -> int:
        """Random decisions so far."""
        fused = 0 if self.fused is None else len(self.fused.tokens) * self.fused.draws_a_position
        return self._taken + fused

    def sample(self, logits: Tensor, offset: int, token_map: Tensor | None = None, *, reuse: bool = False) -> Tensor:
        """Sample x_{offset+1} of every row from corrected draft logits [R, Vd], or [R, K] of each row's candidates.

        Args:
            logits: before temperature. bf16 and float16 are raised to float32 first, float64 stays.
            offset: 0 for x_1; offsets come in order.
            token_map: draft id -> target id, [Vd] int64, one to one (see :func:`check_token_map`); or [R, K] int64, the
                target ids of each row's candidates, different within a row: q is cut to exactly those.
            reuse: ``logits`` is the sampler's from now on. float32 and float64 become q's weights where they lie, so
                that a block of logits that is handed over slice by slice is never held twice. The caller must not
                read it again.

        Returns:
            Target ids, [R] int64.

        Raises:
            RowFault: rows without a finite logit.
            ConfigError: offsets out of order, or shapes that do not fit.
        """
        if offset != len(self._tokens) or logits.shape[0] != len(self.batch):
            raise ConfigError(
                f"DraftSampler.sample: expected offset {len(self._tokens)} and {len(self.batch)} rows, "
                f"got offset {offset} and {logits.shape[0]} rows"
            )
        if token_map is not None and token_map.shape not in ((logits.shape[1],), tuple(logits.shape)):
            raise ConfigError(f"token map {tuple(token_map.shape)} for {logits.shape[1]} draft logits a row")
        if token_map is None:
            logits = logits[:, : self.vocab_size]
        own = reuse or logits.dtype != reference.working_dtype(logits)
        logits = logits.to(reference.working_dtype(logits))
        finite = torch.isfinite(logits.amax(dim=-1))
        if not bool(finite.all()):
            bad = (~finite).nonzero().flatten().tolist()
            raise RowFault(f"draft logits of rows {bad} at offset {offset} hold no finite maximum", bad)
        draft, probs = self._decide(logits, offset, token_map, own)
        tokens = draft
        if token_map is not None:
            each = token_map.dim() == 2
            tokens = token_map.gather(1, draft.unsqueeze(1)).squeeze(1) if each else token_map[draft]
        self._tokens.append(tokens)
        self._probs.append(probs)
        self._maps.append(token_map)
        return tokens

    def _decide(self, logits: Tensor, offset: int, token_map: Tensor | None, own: bool) -> tuple[Tensor, Tensor]:
        """Draft ids [R] and q at them [R] float64; ``logits`` are overwritten where they are the sampler's ``own``."""
        probs = torch.ones(logits.shape[0], dtype=torch.float64, device=logits.device)
        if not len(self._laws):
            return reference.argmax_rows(logits), probs
        whole = len(self._laws) == logits.shape[0]
        draft = None if whole else reference.argmax_rows(logits)
        scores = take_rows(logits, self._laws)
        if own and not self._together:
            scores = logits[: len(self._laws)].copy_(scores)  # back into the buffer: it is still the only one
        warped = scores if self._warpers.idle else warp(scores, self._warpers, inplace=own)
        chosen = torch.empty(len(self._laws), dtype=torch.int64, device=logits.device)
        if len(self._coupled):
            who = self._laws[self._coupled]
            ids = take_rows(token_map, who) if token_map is not None and token_map.dim() == 2 else token_map
            noise = self._draws.gumbel(self._keys[who], self._anchors[who] + 1 + offset, self.vocab_size, ids)
            known = take_rows(warped, self._coupled)
            best = reference.argmax_rows(known + noise[:, : known.shape[1]])
            chosen = _placed(chosen, self._coupled, best)
            self._taken += len(self._coupled)
        weights = reference.exponentials(warped, inplace=own or warped is not scores)
        if len(self._rejection):
            law = reference.normalised(take_rows(weights, self._rejection))
            drawn = self._draws.categorical(self._draft_keys(offset), law)
            chosen = _placed(chosen, self._rejection, drawn)
            self._taken += len(self._rejection)
        picked = weights.gather(1, chosen.unsqueeze(1)).squeeze(1).to(torch.float64)
        probs = _placed(probs, self._laws, picked / weights.sum(-1, dtype=torch.float64))
        self._weights.append(weights)
        return (chosen if draft is None else _placed(draft, self._laws, chosen)), probs

    def _draft_keys(self, offset: int) -> DrawKeys:
        who = self._laws[self._rejection]
        return DrawKeys(self._keys[who], self._anchors[who], np.full(len(who), offset, dtype=np.int64), Purpose.DRAFT)

    def finish(self, lens: IntArray | None = None, **block: Any) -> DraftBlock:
        """The block of what was sampled; positions that were not are padded with token 0 and mean nothing.

        Args:
            lens: length of each row, [R], at most what was sampled; None for all of it.
            block: ``hidden`` and ``features`` of the DraftBlock.

        Raises:
            ConfigError: a length outside 0..the number of sampled positions.
        """
        fused = self.fused if self.fused is not None and self.fused.tokens else None
        steps, gamma = len(self._tokens if fused is None else fused.tokens), self.batch.gamma
        lens = np.full(len(self.batch), steps, dtype=np.int64) if lens is None else np.asarray(lens, dtype=np.int64)
        if lens.shape != (len(self.batch),) or (lens < 0).any() or (lens > steps).any():
            raise ConfigError(f"DraftSampler.finish: lens {lens.tolist()} for {steps} sampled positions")
        if fused is not None:
            return DraftBlock(*_padded(fused.finish(), gamma, lens), **block)
        device = self._tokens[0].device if steps else (self._device or "cpu")
        tokens = torch.zeros(len(self.batch), max(gamma, steps), dtype=torch.int64, device=device)
        probs = torch.ones(tokens.shape, dtype=torch.float64, device=device)
        if steps:
            tokens[:, :steps] = torch.stack(self._tokens, dim=1)
            probs[:, :steps] = torch.stack(self._probs, dim=1)
        if not len(self._laws):
            return DraftBlock(tokens, lens, PointMass(tokens, self.vocab_size), **block)
        dense = np.full(len(self.batch), -1, dtype=np.int64)
        dense[self._laws] = np.arange(len(self._laws))
        q = DenseDistribution(tokens, probs, list(self._weights), dense, self.vocab_size, list(self._maps))
        return DraftBlock(tokens, lens, q, **block)

    def point_mass(self, token_ids: Tensor, lens: IntArray, **block: Any) -> DraftBlock:
        """A block of tokens [R, gamma] that are a function of history."""
        ids = token_ids.to(torch.int64)
        return DraftBlock(ids, np.asarray(lens, dtype=np.int64), PointMass(ids, self.vocab_size), **block)


def _padded(
    drawn: tuple[Tensor, Tensor, FusedDistribution], gamma: int, lens: IntArray
) -> tuple[Tensor, IntArray, FusedDistribution]:
    """Token ids [R, gamma], lengths and q of a block that may have been drawn in part."""
    tokens, log_q, q = drawn
    missing = gamma - tokens.shape[1]
    if missing > 0:
        tokens = torch.nn.functional.pad(tokens, (0, missing))
        q.token_ids, q.log_q = tokens, torch.nn.functional.pad(log_q, (0, missing))
    return tokens, lens, q


def _placed(out: Tensor, rows: IntArray, values: Tensor) -> Tensor:
    """``out`` with ``values`` at ``rows``; the values themselves where they are all rows."""
    if len(rows) == len(out):
        return values
    out[index_tensor(rows, out.device)] = values
    return out


def check_token_map(token_map: Tensor, draft_vocab: int, vocab_size: int) -> None:
    """Refuse a draft-to-target map that is not one to one into the target's vocabulary.

    Raises:
        ConfigError: wrong length, ids outside the vocabulary, or a target id twice.
    """
    if token_map.shape != (draft_vocab,):
        raise ConfigError(f"token map of shape {tuple(token_map.shape)} for a draft vocabulary of {draft_vocab}")
    if int(token_map.min()) < 0 or int(token_map.max()) >= vocab_size:
        raise ConfigError(f"token map points outside the target's vocabulary of {vocab_size}")
    if torch.unique(token_map).numel() != draft_vocab:
        raise ConfigError("token map sends two draft ids to one target id")
