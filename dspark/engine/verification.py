"""After the target's forward: processed logits, and what the verifier of each mode decides about its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dspark.engine.faults import RoundFaults
from dspark.engine.pack import Packed
from dspark.engine.parts import Parts
from dspark.engine.replay import RecordedDraws
from dspark.engine.state import RequestState
from dspark.errors import ComponentError
from dspark.sampling import processors
from dspark.sampling.draft import PointMass
from dspark.sampling.settings import masked
from dspark.sampling.warpers import Warpers, warp
from dspark.types import DraftBlock, DraftDistribution, Mode, TargetOutput, VerifyInput, VerifyResult

LOW_MARGIN = 1e-4
"""In logits: the bound under which float32 sums in another order can decide between two tokens."""


@dataclass(frozen=True, slots=True)
class Verified:
    """Decisions by position in ``packed.decode``: (accepted, next id), and the scores they were made from.

    ``entropies`` are those of the laws that the next ids were decided from, in nats, where the gamma policy reads them.
    ``unwarped`` are the modes whose scores have not passed temperature and masks, as their verifier applies these.
    """

    decisions: dict[int, tuple[int, int]]
    scores: Tensor
    low_margins: int = 0
    entropies: dict[int, float] = field(default_factory=dict)
    unwarped: frozenset[Mode] = frozenset()

    def processed(self, request: RequestState, rows: slice) -> Tensor:
        """Scores of a request's ``rows``, [n, V], through all of its processors and warpers."""
        scores = self.scores[rows]
        return masked(scores, request.params) if request.mode in self.unwarped else scores


def unwarped_modes(parts: Parts) -> frozenset[Mode]:
    """Modes whose verifier applies temperature, top-k, top-p and min-p itself."""
    return frozenset(mode for mode, verifier in parts.verifiers.items() if verifier.capabilities.unwarped)


def process(
    parts: Parts, faults: RoundFaults, packed: Packed, output: TargetOutput
) -> tuple[Tensor, list[RequestState]]:
    """Processed scores [N, V] of every verified row that can be committed, and the requests that still run.

    A row without a finite score is left to the verifier: it is a fault only where a decision reaches it.
    """
    index = {r: i for i, r in enumerate(packed.decode)}
    unwarped = unwarped_modes(parts)

    def run(rows: Sequence[RequestState]) -> Tensor:
        entries = [
            processors.ProcessEntry(r.sampling, int(packed.row_starts[i]), before_end(packed.drafted[i], r.stop_ids))
            for r, i in ((r, index[r]) for r in rows)
        ]
        return processors.process(output.logits, entries, unwarped)

    scores, alive = faults.final_phase("process", "sampling", list(packed.decode), run)
    return (scores if scores is not None else output.logits), alive


def before_end(drafted: tuple[int, ...], stop_ids: frozenset[int]) -> tuple[int, ...]:
    """Drafts up to the first that ends the output. No row after that one is committed, and a processor that allows
    nothing after the end must not be asked."""
    ends = (k for k, token in enumerate(drafted) if token in stop_ids)
    return drafted[: next(ends, len(drafted))]


def verify(
    parts: Parts,
    faults: RoundFaults,
    draws: RecordedDraws,
    packed: Packed,
    scores: Tensor,
    alive: Sequence[RequestState],
    block: DraftBlock | None,
) -> Verified:
    """Ask the verifier of each mode about its rows."""
    index = {r: i for i, r in enumerate(packed.decode)}
    decisions: dict[int, tuple[int, int]] = {}
    for mode in Mode:
        rows = [r for r in alive if r.mode is mode]
        if not rows:
            continue
        calls = 0

        def run(rows: Sequence[RequestState], mode: Mode = mode) -> VerifyResult:
            nonlocal calls
            calls += 1
            if calls > 1:
                draws.repeat()
            return ask(parts, mode, draws, packed, scores, block, [index[r] for r in rows])

        result, done = faults.final_phase("verify", mode.value, rows, run)
        if result is not None:
            accepted, following = result.num_accepted.tolist(), result.next_ids.tolist()
            for request, a, token in zip(done, accepted, following, strict=True):
                decisions[index[request]] = (a, token)
    low = low_margins(packed, scores, decisions) if parts.count_margins else 0
    unwarped = unwarped_modes(parts)
    return Verified(decisions, scores, low, entropies(parts, packed, scores, decisions, unwarped), unwarped)


def entropies(
    parts: Parts, packed: Packed, scores: Tensor, decisions: dict[int, tuple[int, int]], unwarped: frozenset[Mode]
) -> dict[int, float]:
    """Entropy of the law that each next id was decided from; nothing where no gamma policy wants it."""
    policy = parts.gamma_policy
    wanted = policy is not None and policy.capabilities.needs_entropy and getattr(policy, "wants_entropy", True)
    if not wanted or not decisions:
        return {}
    rows = [int(packed.row_starts[i]) + accepted for i, (accepted, _) in decisions.items()]
    late = unwarped - {Mode.GREEDY}
    if late:
        picked = scores[torch.tensor(rows, device=scores.device)]
        owners = [packed.decode[i] for i in decisions]
        scores = warp(picked, Warpers.of([r.params if r.mode in late else None for r in owners]))
        rows = list(range(len(rows)))
    if scores.device.type == "cpu":  # a row at a time stays in a core's second-level cache
        found = torch.stack([entropy(scores[row]) for row in rows])
    else:
        found = entropy(scores[torch.tensor(rows, device=scores.device)])
    return dict(zip(decisions, found.tolist(), strict=True))


def entropy(scores: Tensor) -> Tensor:
    """H = log sum e^z - sum z e^z / sum e^z of scores [.., V], z = score - maximum; [..], in nats."""
    z = scores - scores.amax(dim=-1, keepdim=True)
    z.clamp_(min=-80.0)  # masked tokens weigh nothing, and 0 * -inf is no number
    weights = z.exp()
    total = weights.sum(dim=-1)
    return total.log() - weights.mul_(z).sum(dim=-1) / total


def low_margins(packed: Packed, scores: Tensor, decisions: dict[int, tuple[int, int]]) -> int:
    """Greedy tokens that another forward shape could flip: their two best scores lie under ``LOW_MARGIN`` apart."""
    rows = [
        int(packed.row_starts[i]) + k
        for i, (accepted, _) in decisions.items()
        if packed.decode[i].mode is Mode.GREEDY
        for k in range(accepted + 1)
    ]
    if not rows:
        return 0
    best = scores[torch.tensor(rows, device=scores.device)].float().topk(2, dim=-1).values
    return int((best[:, 0] - best[:, 1] < LOW_MARGIN).sum())


def ask(
    parts: Parts,
    mode: Mode,
    draws: RecordedDraws,
    packed: Packed,
    scores: Tensor,
    block: DraftBlock | None,
    rows: Sequence[int],
) -> VerifyResult:
    """One verifier call, and a check of what it answered."""
    picked = np.array(rows, dtype=np.int64)
    lens = packed.verify_lens[picked]
    draft_rows = packed.draft_rows[picked]
    if block is None:
        ids = torch.empty((len(rows), 0), dtype=torch.int64, device=scores.device)
        q: DraftDistribution = PointMass(ids, parts.target.vocab_size)
        draft_rows = np.arange(len(rows), dtype=np.int64)
    else:
        ids = block.token_ids[torch.from_numpy(draft_rows).to(block.token_ids.device)]
        q = block.q
    requests = [packed.decode[i] for i in rows]
    result = parts.verifiers[mode].verify(
        VerifyInput(
            scores=scores,
            row_starts=packed.row_starts[picked],
            verify_lens=lens,
            draft_ids=ids,
            q=q,
            draft_rows=draft_rows,
            keys=np.array([r.key for r in requests], dtype=np.uint64),
            anchors=np.array([len(r.ids) - 1 for r in requests], dtype=np.int64),
            draws=draws,
            unwarped=tuple(r.params for r in requests) if parts.verifiers[mode].capabilities.unwarped else None,
        )
    )
    accepted = result.num_accepted
    if accepted.shape != lens.shape or (accepted < 0).any() or (accepted > lens).any():
        raise ComponentError(f"num_accepted {accepted.tolist()} outside 0..{lens.tolist()}")
    if ((result.next_ids < 0) | (result.next_ids >= parts.target.vocab_size)).any():
        raise ComponentError(f"next_ids {result.next_ids.tolist()} outside the vocabulary")
    return result
