"""Problems for the kernels, on any device: the interpreter's tests and those on a GPU take them from here.

Logits and weights are small multiples of 1/8, exact in every dtype, and so are their products and sums: a kernel and
its reference see the same scores to the bit, whatever the order of their sums, and have to draw the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.ops import bias_sample, noise, reject_sample
from dspark.ops.reject_sample import Law, Settings
from dspark.types import Purpose


def eighths(generator: torch.Generator, *shape: int, most: int = 24, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random multiples of 1/8 up to ``most`` / 8 in size."""
    return (torch.randint(-most, most + 1, shape, generator=generator).float() / 8).to(dtype)


def keys_of(rows: int, offsets: int, purpose: Purpose, *, seed: int = 0) -> Tensor:
    """Halves of the row keys of requests seed + 0, 1, .. at offsets 0, 1, .., [R, offsets, 2]."""
    requests = np.arange(rows, dtype=np.uint64)[:, None] + np.uint64(seed)
    words = noise.row_keys(noise.DRAW, requests, 5, np.arange(offsets)[None, :], int(purpose))
    return noise.key_halves(words.reshape(rows, offsets))


@dataclass(frozen=True)
class BiasCase:
    """One call of ``bias_sample``: R rows of V columns, a head of ``rank`` (0: none)."""

    rows: int
    width: int
    rank: int
    dtype: torch.dtype = torch.float32
    pruned: bool = False
    candidates: int = 0
    logits: str = "plain"
    seed: int = 0

    def __str__(self) -> str:
        extra = [w for w, on in (("pruned", self.pruned), (f"{self.candidates}-of", self.candidates)) if on]
        name = f"{self.rows}x{self.width}-r{self.rank}-{str(self.dtype)[6:]}-{self.logits}"
        return "-".join([name, *extra])

    def arguments(self, device: Any = "cpu") -> dict[str, Any]:
        """What both the kernel and the reference are given."""
        g = torch.Generator().manual_seed(1000 + self.seed)
        base = eighths(g, self.rows, self.width, dtype=self.dtype)
        if self.logits == "extreme":
            base = base * 0 + torch.where(torch.rand(base.shape, generator=g) < 0.5, -1e4, 1e4).to(self.dtype)
        elif self.logits == "lonely":  # all but one masked
            alone = torch.randint(0, self.width, (self.rows, 1), generator=g)
            base = torch.full_like(base, -torch.inf).scatter_(1, alone, 1.0)
        elif self.logits == "tied":
            base = torch.zeros_like(base)
        temperature = torch.tensor([0.0, 1.0, 0.5, 2.0, 0.7])[torch.arange(self.rows) % 5]
        made: dict[str, Any] = {
            "base": base,
            "temperature": temperature if self.rows > 1 else torch.tensor([1.0]),
            "keys": keys_of(self.rows, 1, Purpose.DRAFT, seed=self.seed)[:, 0],
            "latent": eighths(g, self.rows, self.rank, most=6, dtype=self.dtype) if self.rank else None,
            "w2": eighths(g, self.width, self.rank, most=3, dtype=self.dtype) if self.rank else None,
            "token_map": torch.randperm(2 * self.width, generator=g)[: self.width] if self.pruned else None,
        }
        if self.candidates:
            ids = torch.rand(self.rows, self.width, generator=g).topk(self.candidates).indices.sort().values
            made |= {"base": base.gather(1, ids), "candidates": ids}
        return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in made.items()}


BIAS_CASES = (
    BiasCase(1, 1, 0),
    BiasCase(1, 65, 16),
    BiasCase(3, 257, 24, torch.bfloat16),
    BiasCase(17, 129, 300, torch.bfloat16),
    BiasCase(20, 77, 40),
    BiasCase(5, 1025, 0, torch.float16),
    BiasCase(6, 130, 8, pruned=True),
    BiasCase(6, 200, 24, torch.bfloat16, pruned=True),
    BiasCase(5, 300, 20, candidates=33),
    BiasCase(5, 300, 20, torch.bfloat16, pruned=True, candidates=70),
    BiasCase(4, 90, 0, candidates=1),
    BiasCase(6, 129, 8, logits="extreme"),
    BiasCase(6, 129, 0, torch.bfloat16, logits="lonely"),
    BiasCase(6, 193, 0, logits="tied"),
    BiasCase(6, 193, 8, logits="tied"),
)
"""Shapes that no tile divides, one row, one column more than a tile, extreme logits, ties."""


@dataclass(frozen=True)
class RejectCase:
    """One call of ``reject_sample``: R requests of up to G drafts, V tokens; drafts of a head's law or point masses."""

    rows: int
    gamma: int
    vocab: int
    rank: int = 8
    dtype: torch.dtype = torch.float32
    law: bool = True
    pruned: bool = False
    candidates: int = 0
    cold: bool = False
    shuffled: bool = False
    settings: str = ""
    logits: str = "plain"
    apart: int = 4
    modes: Sequence[int] = (reject_sample.REJECTION, reject_sample.COUPLED, reject_sample.REJECTION, 0)
    seed: int = 0

    def __str__(self) -> str:
        kind = "pruned" if self.pruned else "law" if self.law else "point-mass"
        marks = (f"{self.candidates}-of", self.candidates), ("cold", self.cold), ("shuffled", self.shuffled)
        extra = [x for x in (self.settings, *(word for word, on in marks if on)) if x]
        return "-".join([f"{self.rows}x{self.gamma}x{self.vocab}-{kind}-{str(self.dtype)[6:]}-{self.logits}", *extra])

    def arguments(self, device: Any = "cpu") -> dict[str, Any]:
        """What kernel and reference are given. Target and drafter agree closely, so that drafts survive."""
        g = torch.Generator().manual_seed(2000 + self.seed)
        rows, gamma, vocab = self.rows, self.gamma, self.vocab
        lens = torch.randint(0, gamma + 1, (rows,), generator=g, dtype=torch.int32)
        lens[0] = gamma
        starts = (1 + torch.cumsum(1 + lens, 0) - 1 - lens).to(torch.int32)  # row 0 is nobody's
        mode = torch.tensor([self.modes[i % len(self.modes)] for i in range(rows)], dtype=torch.int32)
        shared = eighths(g, gamma + 1, rows, vocab)
        logits = torch.zeros(2 + int((1 + lens).sum()), vocab)
        for r in range(rows):
            for k in range(int(lens[r]) + 1):
                logits[int(starts[r]) + k] = shared[k, r] + eighths(g, vocab, most=self.apart)
        if self.logits == "lonely":
            alone = torch.randint(0, vocab, (len(logits), 1), generator=g)
            logits = torch.full_like(logits, -torch.inf).scatter_(1, alone, 1.0)
        elif self.logits == "extreme":
            logits = torch.where(torch.rand(logits.shape, generator=g) < 0.5, -1e4, 1e4)
        warmth = torch.tensor([1.0, 0.5, 2.0])[torch.arange(rows) % 3]
        made: dict[str, Any] = {"logits": logits.to(self.dtype), "starts": starts, "lens": lens, "mode": mode}
        drafts, log_q, law, order = self._drafts(g, shared[:gamma], warmth)
        made |= {
            "drafts": drafts,
            "log_q": log_q,
            "law": _moved(law, device),
            "draft_rows": order,
            "uniforms": torch.rand(rows, gamma, generator=g, dtype=torch.float64),
            "keys": keys_of(rows, gamma + 1, Purpose.RESIDUAL, seed=self.seed),
            "settings": _moved(self._settings(g, warmth), device),
        }
        return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in made.items()}

    def _drafts(self, g: torch.Generator, shared: Tensor, warmth: Tensor) -> tuple[Any, Any, Law | None, Any]:
        gamma, rows, vocab = shared.shape
        if not self.law:
            likely = (shared + eighths(g, gamma, rows, vocab, most=4)).argmax(-1)
            return likely.T.contiguous(), None, None, None
        names = torch.randperm(vocab, generator=g)[: vocab - vocab // 4] if self.pruned else torch.arange(vocab)
        order = torch.randperm(rows, generator=g) if self.shuffled else torch.arange(rows)
        place = torch.empty(rows, dtype=torch.int64)  # draft row of each request
        place[order] = torch.arange(rows)
        latent = eighths(g, gamma, rows, self.rank, most=2, dtype=self.dtype) if self.rank else None
        w2 = eighths(g, len(names), self.rank, most=1, dtype=self.dtype) if self.rank else None
        base = shared[:, order][:, :, names].to(self.dtype)
        warmth = torch.where(torch.arange(rows) % 2 == 0, 0.0, warmth) if self.cold else warmth
        ids = None
        if self.candidates:
            ids = base.float().topk(self.candidates).indices.sort().values
            base = base.gather(2, ids)
        tokens, log_q, lse = [], [], []
        for k in range(gamma):
            keys = keys_of(rows, gamma, Purpose.DRAFT, seed=self.seed)[:, k]
            own = None if latent is None else latent[k]
            given = (own, w2, names if self.pruned else None, None if ids is None else ids[k])
            drawn = bias_sample.reference(base[k], warmth[order], keys[order], *given)
            tokens.append(drawn.token[place])
            log_q.append(drawn.log_q[place])
            lse.append(drawn.lse)
        columns = None
        if self.pruned and ids is None:
            columns = torch.full((vocab,), -1, dtype=torch.int32)
            columns[names] = torch.arange(len(names), dtype=torch.int32)
        known = names[ids] if self.pruned and ids is not None else None
        law = Law(base, torch.stack(lse), warmth[order], latent, w2, columns, ids, known)
        return torch.stack(tokens, 1), torch.stack(log_q, 1), law, place.to(torch.int32) if self.shuffled else None

    def _settings(self, g: torch.Generator, warmth: Tensor) -> Settings | None:
        if not self.settings:
            return None
        rows, on = self.rows, torch.arange(self.rows) % 5 != 4
        k, p, m = (torch.zeros(rows, dtype=torch.int32), torch.ones(rows), torch.zeros(rows))
        if self.settings in ("top_k", "all"):
            k = torch.where(on, torch.randint(1, self.vocab // 2, (rows,), generator=g), 0).to(torch.int32)
        if self.settings in ("top_p", "all"):
            p = torch.where(on, torch.rand(rows, generator=g) * 0.7 + 0.25, 1.0)
        if self.settings in ("min_p", "all"):
            m = torch.where(on, torch.rand(rows, generator=g) * 0.2, 0.0)
        return Settings(warmth, k, p, m, masked=self.settings != "temperature")


def _moved(value: Any, device: Any) -> Any:
    """A dataclass of tensors on a device."""
    if value is None:
        return None
    fields = {f: getattr(value, f) for f in value.__dataclass_fields__}
    return type(value)(**{f: v.to(device) if isinstance(v, Tensor) else v for f, v in fields.items()})


REJECT_CASES = (
    RejectCase(1, 1, 17, law=False),
    RejectCase(4, 3, 65, law=False),
    RejectCase(9, 3, 65),
    RejectCase(9, 3, 129, dtype=torch.bfloat16, rank=40),
    RejectCase(18, 2, 40, rank=0),
    RejectCase(14, 3, 33, rank=0, modes=(reject_sample.COUPLED,)),
    RejectCase(8, 3, 90, pruned=True),
    RejectCase(8, 2, 65, shuffled=True, apart=20, modes=(reject_sample.REJECTION,)),
    RejectCase(8, 2, 65, candidates=9, modes=(reject_sample.REJECTION,)),
    RejectCase(8, 2, 90, candidates=40, dtype=torch.bfloat16, rank=40, pruned=True, shuffled=True, apart=20),
    RejectCase(6, 2, 70, candidates=1, rank=0, apart=20, modes=(reject_sample.REJECTION,)),
    RejectCase(8, 2, 65, cold=True, apart=12, modes=(reject_sample.REJECTION,)),
    RejectCase(8, 2, 65, candidates=6, cold=True, apart=20, modes=(reject_sample.REJECTION,), settings="top_k"),
    RejectCase(6, 2, 65, settings="temperature"),
    RejectCase(4, 1, 70, settings="top_k"),
    RejectCase(4, 1, 70, settings="top_p", seed=3),
    RejectCase(4, 1, 70, settings="min_p"),
    RejectCase(4, 1, 90, settings="all", pruned=True, shuffled=True),
    RejectCase(5, 1, 70, dtype=torch.bfloat16, settings="all", law=False, seed=1),
    RejectCase(5, 1, 70, dtype=torch.float16, settings="all", law=False, seed=2),
    RejectCase(6, 2, 65, logits="lonely"),
    RejectCase(6, 2, 65, logits="extreme", law=False),
)
"""Drafts of laws and point masses, pruned vocabularies, candidates, rows that took the argmax, rows in another order,
every warper, extreme logits."""
