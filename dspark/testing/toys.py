"""Toy components: laws from tables, float64, on CPU. Small enough to enumerate, strict enough to notice faults.

The target reads its own slot cache, so a stale entry, a wrong position or a wrong slot changes its logits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dspark.capabilities import DrafterCapabilities, EstimatorCapabilities, TargetCapabilities
from dspark.errors import CapacityError, ConfigError
from dspark.types import FloatArray, IntArray, TargetOutput, VerifyLayout

if TYPE_CHECKING:
    from torch import Tensor

    from dspark.protocols import DraftSampler
    from dspark.types import BatchView, Committed, DraftBlock, RoundRecord


def random_table(*shape: int, seed: int = 0, scale: float = 1.5) -> Tensor:
    """A table of float64 normal logits that is the same on every machine."""
    return torch.from_numpy(np.random.default_rng(seed).normal(0.0, scale, size=shape))


def law_table(probs: Sequence[float], vocab_size: int | None = None) -> Tensor:
    """Logits [V, V] of a law that ignores its context; probabilities of 0 become -inf."""
    row = torch.tensor([math.log(p) if p > 0 else -math.inf for p in probs], dtype=torch.float64)
    return row.expand(vocab_size or len(probs), -1).clone()


class TableTarget:
    """A target whose logits are a table of its last two tokens, read back from its own cache.

    Args:
        table: [V + 1, V, V] by (token before, token, next), where V stands for "nothing before", or [V, V] by token.
        mix: weight of a term that depends on every token of the prefix and its absolute position, like attention.
        eos_token_ids: ids that end the output.
        ragged: False to run every sequence at the longest query length, and say so (padding is executed).

    Attributes:
        forwards: query lengths of every forward, in order.
        executed: tokens executed by every forward, in order.
    """

    name = "toy-table"
    num_layers = 2
    device = torch.device("cpu")
    dtype = torch.float64

    def __init__(
        self,
        table: Tensor,
        *,
        mix: float = 0.0,
        eos_token_ids: Sequence[int] = (),
        ragged: bool = True,
        max_len: int = 32,
    ) -> None:
        vocab = int(table.shape[-1])
        self.table = table.double() if table.ndim == 3 else table.double().expand(vocab + 1, vocab, vocab)
        if self.table.shape != (vocab + 1, vocab, vocab):
            raise ConfigError(f"TableTarget: expected a table [V + 1, V, V] or [V, V], got {tuple(table.shape)}")
        self.mix = mix
        self.vocab_size = vocab
        self.max_len = max_len
        self.eos_token_ids = tuple(eos_token_ids)
        self.capabilities = TargetCapabilities(ragged=ragged, taps=True)
        self.forwards: list[list[int]] = []
        self.executed: list[int] = []
        self.cache = torch.full((1, max_len), -1, dtype=torch.int64)
        self.cache_version = 0

    def allocate(self, slots: int, max_len: int | None, budget_bytes: int | None = None) -> int:
        """Make the cache, poisoned with -1; returns the max_len taken.

        Raises:
            CapacityError: when ``budget_bytes`` is below 8 bytes a position.
        """
        self.max_len = max_len or self.max_len
        size = 8 * slots * self.max_len
        if budget_bytes is not None and size > budget_bytes:
            raise CapacityError(f"{self.name}: the cache takes {size} bytes, {budget_bytes} are allowed")
        self.cache = torch.full((slots, self.max_len), -1, dtype=torch.int64)
        self.cache_version += 1
        return self.max_len

    def forward(self, layout: VerifyLayout, taps: Sequence[int] = ()) -> TargetOutput:
        """Write the tokens at their positions, then read every row's prefix back from the cache."""
        lens = layout.query_lens
        self.forwards.append(lens.tolist())
        self.executed.append(self.executed_tokens(layout))
        self.cache_version += 1
        slots = torch.from_numpy(np.repeat(np.asarray(layout.slots, dtype=np.int64), lens))
        self.cache[slots, layout.positions] = layout.token_ids
        wanted = torch.from_numpy(np.asarray(layout.logit_rows, dtype=np.int64))
        logits = self._logits(self.cache[slots[wanted]], layout.positions[wanted])
        return TargetOutput(logits, self._taps(layout, taps) if taps else None)

    def copy_prefix(self, source: int, slot: int, length: int) -> bool:
        """Copy tokens between slots; what ``slot`` held behind them stays, stale."""
        self.cache[slot, :length] = self.cache[source, :length]
        self.cache_version += 1
        return True

    def _logits(self, prefix: Tensor, positions: Tensor) -> Tensor:
        """Logits [N, V] after position ``positions`` [N] of cache rows ``prefix`` [N, max_len]."""
        rows = torch.arange(len(positions))
        token = prefix[rows, positions]
        before = torch.where(positions > 0, prefix[rows, (positions - 1).clamp(min=0)], self.vocab_size)
        logits = self.table[before, token]
        if self.mix:
            places = torch.arange(prefix.shape[1])
            weights = torch.where(places <= positions[:, None], (places + 1) * (prefix + 1), 0).sum(1)
            phase = weights[:, None].double() + 1.7 * torch.arange(self.vocab_size)
            logits = logits + self.mix * torch.cos(phase)
        return logits

    def _taps(self, layout: VerifyLayout, taps: Sequence[int]) -> Tensor:
        """[B, m * V]: one-hot tokens, scaled by layer id + 2 so that layers differ."""
        hot = torch.nn.functional.one_hot(layout.token_ids, self.vocab_size).double()
        return torch.cat([hot * (layer + 2) for layer in taps], dim=1)

    def next_logits(self, ids: Sequence[int]) -> Tensor:
        """Logits [V] after ``ids``, without cache, engine or counters: what an oracle decodes from."""
        prefix = torch.tensor([list(ids)], dtype=torch.int64)
        return self._logits(prefix, torch.tensor([len(ids) - 1]))[0].clone()

    def executed_tokens(self, layout: VerifyLayout) -> int:
        """Tokens run, padding included."""
        lens = layout.query_lens
        return int(lens.sum()) if self.capabilities.ragged else int(lens.max()) * len(lens)

    def fingerprint(self) -> Mapping[str, str]:
        """Identity for cost tables."""
        return {"model": self.name, "device": "cpu", "dtype": "float64"}


class TableDrafter:
    """Draws x_k from a table of the token before it, through the engine's sampler: q is what was sampled from.

    Args:
        table: draft logits [V, Vd] by the previous target token.
        gamma: default block size.
        token_map: draft id -> target id, for a pruned vocabulary.
        argmax: propose the most likely token instead, declared as a point mass.

    Attributes:
        committed: what ``commit`` was told, as (slot, generation, new ids).
        last_block: the block proposed last.
    """

    tap_layers: tuple[int, ...] = ()
    max_gamma: int | None = None

    def __init__(self, table: Tensor, *, gamma: int = 2, token_map: Tensor | None = None, argmax: bool = False) -> None:
        self.table = table.double()
        self.default_gamma = gamma
        self.token_map = token_map
        self.argmax = argmax
        self.capabilities = DrafterCapabilities(point_mass=argmax)
        self.committed: list[tuple[int, int, tuple[int, ...]]] = []
        self.released: list[tuple[int, int]] = []
        self.last_block: DraftBlock | None = None

    def propose(self, batch: BatchView, sampler: DraftSampler) -> DraftBlock:
        """Draft as many tokens a row as may be verified; the others mean nothing and are drawn from one token."""
        lens = np.array([min(batch.gamma, r.max_draft) for r in batch.requests], dtype=np.int64)
        prev = torch.tensor([r.anchor for r in batch.requests], dtype=torch.int64)
        columns: list[Tensor] = []
        for offset in range(batch.gamma):
            logits = self.table[prev]
            if self.argmax:
                prev = logits.argmax(dim=1)
                prev = prev if self.token_map is None else self.token_map[prev]
            else:
                beyond = torch.from_numpy(lens <= offset)
                prev = sampler.sample(_point(logits, beyond), offset, self.token_map)
            columns.append(prev)
        if self.argmax:
            self.last_block = sampler.point_mass(torch.stack(columns, dim=1), lens)
        else:
            self.last_block = sampler.finish(lens)
        return self.last_block

    def commit(self, committed: Sequence[Committed]) -> None:
        """Remember what was committed."""
        self.committed += [(c.request.slot, c.request.generation, c.new_ids) for c in committed]

    def release(self, slot: int, generation: int) -> None:
        """Remember who left."""
        self.released.append((slot, generation))


def _point(logits: Tensor, rows: Tensor) -> Tensor:
    """Keep only the first token of ``rows``: certain draws cost an enumerator no branch."""
    logits = logits.clone()
    logits[rows, 1:] = -math.inf
    logits[rows, 0] = 0.0
    return logits


def bad_draft_table(target: TableTarget, *, seed: int = 7) -> Tensor:
    """Draft logits [V, V] whose mass lies where the target's, averaged over contexts, does not."""
    mean = torch.softmax(target.table, dim=-1).mean(dim=0)
    worst = mean.argmin(dim=1)
    table = random_table(target.vocab_size, target.vocab_size, seed=seed, scale=0.1)
    table[torch.arange(target.vocab_size), worst] += 7.0
    return table


class TableEstimator:
    """c_k from a table of (k, x_{k-1}): a function of x_{<k}, as adverse as the table.

    Args:
        table: [gamma, V]; entry (k - 1, v) is c_k where x_{k-1} = v (the anchor for k = 1).
        reads_ahead: take x_k itself in the place of x_{k-1}: biased with ``rejection``, and declared so.
    """

    def __init__(self, table: FloatArray | Sequence[Sequence[float]], *, reads_ahead: bool = False) -> None:
        self.table = np.asarray(table, dtype=np.float64)
        self.reads_ahead = reads_ahead
        self.capabilities = EstimatorCapabilities(anticipates=reads_ahead)
        self.records: list[RoundRecord] = []

    def estimate(self, batch: BatchView, draft: DraftBlock) -> FloatArray:
        """[R, gamma]."""
        drafts = draft.token_ids.cpu().numpy()
        anchors = np.array([[r.anchor] for r in batch.requests], dtype=np.int64)
        seen: IntArray = drafts if self.reads_ahead else np.concatenate([anchors, drafts[:, :-1]], axis=1)
        return np.asarray(self.table[np.arange(drafts.shape[1])[None, :], np.clip(seen, 0, self.table.shape[1] - 1)])

    def observe(self, record: RoundRecord) -> None:
        """Keep the record for tests to look at."""
        self.records.append(record)

    def release(self, slot: int, generation: int) -> None:
        """Nothing is kept by request."""


class CountingProcessor:
    """A stateful logits processor: counts the tokens it was fed and lowers each by ``step`` per occurrence.

    With step = frequency penalty it equals that penalty, if and only if rejected tokens never reach it.
    """

    def __init__(self, step: float = 1.0, counts: Mapping[int, int] | None = None) -> None:
        self.step = step
        self.counts = dict(counts or {})
        self.fed = sum(self.counts.values())

    def fork(self) -> CountingProcessor:
        """An independent copy."""
        return CountingProcessor(self.step, self.counts)

    def advance(self, token_id: int) -> None:
        """Count one token."""
        self.counts[token_id] = self.counts.get(token_id, 0) + 1
        self.fed += 1

    def process(self, logits: Any) -> Any:
        """Subtract step * count, [V] -> [V]."""
        out = logits.clone()
        for token, count in self.counts.items():
            out[token] -= self.step * count
        return out


class AutomatonProcessor:
    """A finite-state grammar as a logits processor: ``allowed[state]`` maps legal tokens to the next state."""

    def __init__(self, allowed: Sequence[Mapping[int, int]], state: int = 0) -> None:
        self.allowed = allowed
        self.state = state

    def fork(self) -> AutomatonProcessor:
        """A copy in the same state."""
        return AutomatonProcessor(self.allowed, self.state)

    def advance(self, token_id: int) -> None:
        """Follow the edge; an illegal token (a draft that will be rejected) leads to a state that allows anything."""
        if 0 <= self.state < len(self.allowed):
            self.state = self.allowed[self.state].get(token_id, -1)

    def process(self, logits: Any) -> Any:
        """Mask what the state does not allow."""
        if not 0 <= self.state < len(self.allowed):
            return logits
        out = torch.full_like(logits, -math.inf)
        legal = torch.tensor(sorted(self.allowed[self.state]), dtype=torch.int64)
        out[legal] = logits[legal]
        return out
