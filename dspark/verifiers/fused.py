"""Verification through the operation ``reject_sample``: all requests of a mode in one call, read back once.

A source of draws that hashes gives it uniforms and row keys. One that wants to see laws (the tests' enumerator) is
asked draft by draft with the chances that the operation reports, and for the token after with the law that it draws
from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.config import SamplingParams
from dspark.errors import RowFault
from dspark.ops import noise, reject_sample
from dspark.ops.reference import index_tensor
from dspark.ops.reject_sample import Decided, Law
from dspark.protocols import BuildContext
from dspark.sampling.draft import PointMass
from dspark.sampling.fused import FORCED, FusedDistribution, exact, hashed_keys
from dspark.sampling.settings import settings_of
from dspark.sampling.warpers import Warpers, warp
from dspark.types import DrawKeys, IntArray, KeyArray, Mode, Purpose, VerifyInput, VerifyResult

_CODES = {
    Mode.GREEDY: reject_sample.GREEDY,
    Mode.REJECTION: reject_sample.REJECTION,
    Mode.COUPLED: reject_sample.COUPLED,
}


def kernel_of(context: BuildContext) -> Callable[..., Any] | None:
    """The kernel of ``reject_sample`` that was chosen for the engine; None for plain torch."""
    choice = context.extras.get("kernels", {}).get(reject_sample.OP)
    return None if choice is None else choice.call


@dataclass(frozen=True, slots=True)
class _Drafts:
    """Drafted tokens [R, G] and what they were drawn from."""

    token_ids: Tensor
    log_q: Tensor | None = None
    law: Law | None = None
    rows: Tensor | None = None


def drafts_of(batch: VerifyInput, mode: Mode) -> _Drafts | None:
    """The drafts as the operation takes them; None where q is of another kind, which the plain verifier reads.

    Only ``rejection`` asks for q at all.
    """
    width = int(batch.verify_lens.max(initial=0))
    ids = batch.draft_ids[:, :width]
    if width == 0 or mode is not Mode.REJECTION or isinstance(batch.q, PointMass):
        return _Drafts(ids)
    if not isinstance(batch.q, FusedDistribution):
        return None
    rows = index_tensor(batch.draft_rows, ids.device)
    return _Drafts(ids, batch.q.log_q[rows][:, :width], batch.q.law, rows.to(torch.int32))


def warped(batch: VerifyInput) -> VerifyInput:
    """The batch with scores that have passed every request's warpers, for torch code that expects them so."""
    if batch.unwarped is None:
        return batch
    params: list[SamplingParams | None] = [None] * len(batch.scores)
    for start, length, own in zip(batch.row_starts.tolist(), batch.verify_lens.tolist(), batch.unwarped, strict=True):
        params[start : start + length + 1] = [own] * (length + 1)
    return replace(batch, scores=warp(batch.scores, Warpers.of(params)), unwarped=None)


def verify(kernel: Callable[..., Any], batch: VerifyInput, mode: Mode) -> VerifyResult | None:
    """Decide all requests of ``batch``, which are of one mode; None where the operation does not know their q.

    Raises:
        RowFault: rows where no token has a finite score.
    """
    drafts = drafts_of(batch, mode)
    if drafts is None:
        return None
    if not len(batch.row_starts):
        return VerifyResult(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    call = _Call(kernel, batch, mode, drafts)
    found = {Mode.GREEDY: call.greedy, Mode.COUPLED: call.coupled, Mode.REJECTION: call.rejection}[mode]()
    table = torch.stack((found.accepted.to(torch.float64), found.token.to(torch.float64), found.log_prob)).cpu().numpy()
    bad = np.flatnonzero(~np.isfinite(table[2]))
    if len(bad):
        raise RowFault(f"rows {bad.tolist()}: no token has a finite score where they were decided", bad)
    return VerifyResult(table[0].astype(np.int64), table[1].astype(np.int64))


class _Call:
    """One call of the operation, in its arguments' terms."""

    def __init__(self, kernel: Callable[..., Any], batch: VerifyInput, mode: Mode, drafts: _Drafts) -> None:
        self.kernel, self.batch, self.drafts = kernel, batch, drafts
        self.rows, self.width = drafts.token_ids.shape
        self.device = batch.scores.device
        self._scores = batch.scores if batch.scores.dtype != torch.float64 else batch.scores.to(torch.float32)
        self._lens = torch.from_numpy(batch.verify_lens.astype(np.int32)).to(self.device)
        self._starts = torch.from_numpy(batch.row_starts.astype(np.int32)).to(self.device)
        self._mode = torch.full((self.rows,), _CODES[mode], dtype=torch.int32, device=self.device)
        sampled = mode is not Mode.GREEDY and batch.unwarped is not None
        self._settings = settings_of(batch.unwarped or (), self.device) if sampled else None

    def run(self, uniforms: Tensor | None, words: KeyArray | None, gumbel: Tensor | None = None) -> Decided:
        """The operation on processed scores, with the warpers that they have yet to pass."""
        shape = (self.rows, self.width + 1)
        if uniforms is None:
            uniforms = torch.zeros(self.rows, self.width, dtype=torch.float64, device=self.device)
        if words is None:
            words = np.zeros(shape, dtype=np.uint64)
        keys = noise.key_halves(words.reshape(shape), self.device)
        drafts = self.drafts
        found: Decided = self.kernel(
            self._scores, self._starts, self._lens, drafts.token_ids, self._mode, uniforms, keys, drafts.log_q,
            drafts.law, drafts.rows, self._settings, gumbel,
        )  # fmt: skip
        return found

    def asked(self, rows: IntArray, offsets: IntArray | int, purpose: Purpose) -> DrawKeys:
        """Keys of the draws of ``rows`` at ``offsets``, broadcast."""
        who, k = np.broadcast_arrays(rows, np.asarray(offsets, dtype=np.int64))
        who, k = who.ravel(), k.ravel()
        return DrawKeys(self.batch.keys[who], self.batch.anchors[who], k, purpose)

    def greedy(self) -> Decided:
        """The argmax of each row; nothing is drawn."""
        return self.run(None, None)

    def coupled(self) -> Decided:
        """Noise by seed and absolute position; from the source itself where that does not hash."""
        places = self.batch.anchors[:, None] + 1 + np.arange(self.width + 1)[None, :]
        if hashed_keys(self.batch.draws, self.asked(np.arange(0), 0, Purpose.ACCEPT)) is None:
            return self.run(None, None, self._noise_table())
        seeds = np.broadcast_to(self.batch.keys[:, None], places.shape)
        return self.run(None, noise.row_keys(noise.NOISE, seeds.ravel(), places.ravel()))

    def _noise_table(self) -> Tensor:
        """Noise of every row of a coupled batch, [N, V]."""
        vocab = self._scores.shape[1]
        table = torch.zeros(self._scores.shape, dtype=torch.float32, device=self.device)
        for k in range(self.width + 1):
            who = np.flatnonzero(self.batch.verify_lens >= k)
            at = index_tensor(self.batch.row_starts[who] + k, self.device)
            table[at] = self.batch.draws.gumbel(self.batch.keys[who], self.batch.anchors[who] + 1 + k, vocab).to(table)
        return table

    def rejection(self) -> Decided:
        """Uniforms and noise by request key, anchor, offset and purpose."""
        everyone, offsets = np.arange(self.rows)[:, None], np.arange(self.width + 1)[None, :]
        words = hashed_keys(self.batch.draws, self.asked(everyone, offsets, Purpose.RESIDUAL))
        if words is None:
            return self.shown()
        uniforms = None
        if self.width:
            drawn = self.batch.draws.uniforms(self.asked(everyone, offsets[:, : self.width], Purpose.ACCEPT))  # type: ignore[attr-defined]
            uniforms = torch.from_numpy(drawn.reshape(self.rows, self.width)).to(self.device)
        return self.run(uniforms, words)

    def shown(self) -> Decided:
        """A rejection batch whose source of draws sees chances and laws."""
        uniforms = torch.zeros(self.rows, self.width, dtype=torch.float64, device=self.device)
        chance = self.run(uniforms, None).chance
        alive = np.arange(self.rows)
        accepted = np.zeros(self.rows, dtype=np.int64)
        for k in range(self.width):
            alive = alive[self.batch.verify_lens[alive] > k]
            if not len(alive):
                break
            odds = chance[index_tensor(alive, self.device), k].to(torch.float64)
            stays = self.batch.draws.accept(self.asked(alive, k, Purpose.ACCEPT), odds)
            uniforms[index_tensor(alive[~stays], self.device), k] = 1.0
            alive = alive[stays]
            accepted[alive] = k + 1
        law = self._final_law(uniforms)
        drawn = self.batch.draws.categorical(self.asked(np.arange(self.rows), accepted, Purpose.RESIDUAL), law)
        table = torch.full(self._scores.shape, FORCED, dtype=torch.float32, device=self.device)
        table[index_tensor(self.batch.row_starts + accepted, self.device), drawn] = 0.0
        return self.run(uniforms, None, table)

    def _final_law(self, uniforms: Tensor) -> Tensor:
        """What the token after is drawn from, [R, V] float64: of each token, forced, the operation says its share."""
        table = torch.full(self._scores.shape, FORCED, dtype=torch.float32, device=self.device)
        law = torch.zeros(self.rows, table.shape[1], dtype=torch.float64, device=self.device)
        for token in range(table.shape[1]):
            table[:, token] = 0.0
            found = self.run(uniforms, None, table)
            law[:, token] = torch.where(found.token == token, found.log_prob.to(torch.float64).exp(), 0.0)
            table[:, token] = FORCED
        return exact(law)
