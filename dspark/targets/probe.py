"""A load-time check that packed forwards over the slot cache give what the model itself gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dspark.errors import TargetError
from dspark.types import VerifyLayout

if TYPE_CHECKING:
    from dspark.targets.hf import HFTarget

# (slot, start, length) of each sequence. The second forward rolls slot 0 back by two tokens, so that stale entries are
# overwritten, while slot 2 has several pending tokens and slot 1 goes on with one.
_FORWARDS = (((0, 0, 6), (2, 0, 3), (1, 0, 4)), ((2, 3, 3), (0, 4, 4), (1, 4, 1)))
_LENGTHS = (8, 5, 6)

# Largest difference of logits, as a share of their spread, that rounding alone explains.
# (transformers softmaxes and rotates in float32 even for float64 models.)
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 5e-4, torch.float16: 0.05, torch.bfloat16: 0.15}


def probe_target(target: HFTarget) -> float:
    """Compare two ragged packed forwards, a rollback between them, with plain forwards of the same model.

    Returns:
        The largest difference of logits, as a share of their spread.

    Raises:
        TargetError: if they differ by more than rounding, naming the sequence.
    """
    if target.model_limit < max(_LENGTHS):
        return 0.0
    truth = _texts(target.vocab_size)
    stale = [ids[:] for ids in truth]
    for position in (4, 5):  # what slot 0 reads first and rolls back
        stale[0][position] = (truth[0][position] + 1) % target.vocab_size
    target.allocate(3, max(_LENGTHS))
    worst, where = 0.0, ""
    for step, (sequences, texts) in enumerate(zip(_FORWARDS, (stale, truth), strict=True)):
        layout = pack(sequences, texts, target.device)
        packed = target.forward(layout).logits
        for row, (slot, start, length) in zip(layout.cu_query_lens, sequences, strict=False):
            plain = target.plain_logits(texts[slot][: start + length])[start:]
            error = _relative_error(packed[row : row + length], plain)
            if not error <= worst:
                worst, where = error, f"forward {step + 1}, slot {slot}, positions {start}..{start + length - 1}"
    target.release_cache()
    tolerance = _TOLERANCE.get(target.dtype, 0.15)
    if not worst <= tolerance:
        raise TargetError(
            f"target {target.name!r} ({type(target.model).__name__}) does not give its own logits when packed: off by "
            f"{worst:.2g} of their spread at {where} (tolerance {tolerance:g}). It can't be decoded exactly"
        )
    return worst


def pack(
    sequences: Sequence[tuple[int, int, int]], texts: Sequence[Sequence[int]], device: torch.device
) -> VerifyLayout:
    """A layout of (slot, start, length) sequences that read ``texts[slot]``; all logits wanted."""
    ids = [token for slot, start, length in sequences for token in texts[slot][start : start + length]]
    positions = [start + i for _, start, length in sequences for i in range(length)]
    lengths = [length for _, _, length in sequences]
    return VerifyLayout(
        token_ids=torch.tensor(ids, dtype=torch.long, device=device),
        positions=torch.tensor(positions, dtype=torch.long, device=device),
        slots=np.array([s for s, _, _ in sequences], dtype=np.int64),
        starts=np.array([s for _, s, _ in sequences], dtype=np.int64),
        cu_query_lens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        logit_rows=np.arange(len(ids), dtype=np.int64),
    )


def _texts(vocab_size: int) -> list[list[int]]:
    return [[(7 + 31 * slot + 13 * i * i) % vocab_size for i in range(n)] for slot, n in enumerate(_LENGTHS)]


def _relative_error(packed: Tensor, plain: Tensor) -> float:
    spread = float((plain.double() - plain.double().mean(-1, keepdim=True)).abs().amax())
    difference = float((packed.double() - plain.double()).abs().amax())
    return difference / spread if spread > 0 else difference
