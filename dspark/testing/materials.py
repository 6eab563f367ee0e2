"""Inputs that suites give to components: requests, batches, drafted blocks whose laws are known, schedule inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dspark.config import SamplingParams
from dspark.testing.toys import random_table
from dspark.tokens import TokenView
from dspark.types import BatchView, Committed, DraftBlock, IntArray, Mode, RequestView, RoundRecord

if TYPE_CHECKING:
    from torch import Tensor


def make_request(
    ids: Sequence[int],
    *,
    slot: int = 0,
    generation: int = 1,
    mode: Mode = Mode.REJECTION,
    max_draft: int = 8,
    key: int | None = None,
    params: SamplingParams | None = None,
) -> RequestView:
    """A request in the middle of decoding: all but its anchor is cached."""
    tokens = list(ids)
    temperature = 0.0 if mode is Mode.GREEDY else 1.0
    return RequestView(
        request_id=f"r{slot}.{generation}",
        slot=slot,
        generation=generation,
        ids=TokenView(tokens),
        prompt_len=max(1, len(tokens) - 1),
        num_cached=len(tokens) - 1,
        max_draft=max_draft,
        params=params or SamplingParams(temperature=temperature, max_tokens=64),
        mode=mode,
        key=slot + 1 if key is None else key,
    )


def make_batch(rng: np.random.Generator, rows: int, gamma: int, vocab: int, **request: Any) -> BatchView:
    """Requests of random histories of different lengths, in slots 0..rows - 1."""
    made = [
        make_request(rng.integers(0, vocab, size=int(rng.integers(3, 9))).tolist(), slot=r, **request)
        for r in range(rows)
    ]
    return BatchView(tuple(made), gamma)


def subset(batch: BatchView, rows: Sequence[int]) -> BatchView:
    """Some rows of a batch, in that order."""
    return BatchView(tuple(batch.requests[r] for r in rows), batch.gamma)


class GivenLaw:
    """q as a table: laws [R, gamma, V] of drafted ``token_ids`` [R, gamma]."""

    def __init__(self, laws: Tensor, token_ids: Tensor) -> None:
        self.laws, self.token_ids = laws, token_ids

    def token_probs(self) -> Tensor:
        """q(x_k), [R, gamma]."""
        return self.laws.gather(2, self.token_ids.unsqueeze(2)).squeeze(2)

    def probs(self, rows: IntArray, positions: IntArray) -> Tensor:
        """Laws at n pairs, [n, V]."""
        return self.laws[torch.as_tensor(np.asarray(rows)), torch.as_tensor(np.asarray(positions))]


class BlockMaker:
    """Blocks of a drafter from tables: every law, hidden state and feature at k is a function of x_{<k} and history.

    Args:
        vocab: V.
        hidden_size, rank: widths of hidden states and of ``features["markov"]``.
        seed: of the tables.
    """

    def __init__(self, vocab: int, *, hidden_size: int = 6, rank: int = 4, seed: int = 0) -> None:
        self.vocab = vocab
        self.laws = torch.softmax(random_table(vocab, vocab, vocab, seed=seed, scale=2.0), dim=-1)
        self.hidden = random_table(vocab, vocab, hidden_size, seed=seed + 1)
        self.markov = random_table(vocab, rank, seed=seed + 2)

    def block(self, batch: BatchView, token_ids: Tensor, lens: IntArray | None = None) -> DraftBlock:
        """The block whose draws fell on ``token_ids`` [R, gamma]."""
        rows, gamma = token_ids.shape
        anchors = torch.tensor([[r.anchor] for r in batch.requests], dtype=torch.int64).reshape(rows, 1)
        prev = torch.cat([anchors, token_ids[:, :-1]], dim=1)
        before = torch.cat([anchors, prev[:, :-1]], dim=1)
        q = GivenLaw(self.laws[before, prev], token_ids)
        features = {
            "markov": self.markov[prev],
            "match_length": np.array([len(r.ids) % 6 for r in batch.requests], dtype=np.int64),
        }
        if lens is None:
            lens = np.full(rows, gamma, dtype=np.int64)
        return DraftBlock(token_ids.clone(), lens, q, hidden=self.hidden[before, prev], features=features)


def random_tokens(rng: np.random.Generator, rows: int, gamma: int, vocab: int) -> Tensor:
    """[rows, gamma] int64."""
    return torch.from_numpy(rng.integers(0, vocab, size=(rows, gamma)))


def make_record(
    batch: BatchView | None, draft: DraftBlock | None, accepted: Sequence[int], *, index: int = 0, failed: int = -1
) -> RoundRecord:
    """A finished round in which row r was offered all it drafted and ``accepted[r]`` were accepted; ``failed`` is a row
    that ended with an error. Without a batch: a plain step."""
    committed: list[Committed] = []
    for r, request in enumerate(batch.requests if batch is not None else ()):
        offered = int(draft.lens[r]) if draft is not None else 0
        taken = min(int(accepted[r]), offered)
        ids = tuple(int(t) for t in draft.token_ids[r, :taken]) if draft is not None else ()
        committed.append(
            Committed(
                request=request,
                row=r,
                new_ids=() if r == failed else (*ids, 0),
                offered=offered,
                accepted=taken,
                num_cached=len(request.ids) + taken,
                finish_reason="error" if r == failed else None,
            )
        )
    return RoundRecord(
        index=index,
        batch=batch,
        draft=draft,
        confidence=None,
        plan=None,
        committed=tuple(committed),
        executed_tokens=1,
        seconds={"draft": 1e-3, "target": 1e-2},
    )


def regenerated(batch: BatchView, generation: int) -> BatchView:
    """The same slots with new requests in them."""
    return BatchView(
        tuple(
            dataclasses.replace(r, generation=generation, request_id=f"r{r.slot}.{generation}") for r in batch.requests
        ),
        batch.gamma,
    )
