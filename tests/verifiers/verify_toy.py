"""A verify call without an engine: requests whose target rows are a table of the drafts so far."""

import numpy as np
import torch

from dspark.types import VerifyInput


def verify_input(scores, drafts, lens, q, draws, *, keys=None, anchors=None, row_starts=None, draft_rows=None):
    lens = np.asarray(lens, dtype=np.int64)
    count = len(lens)
    if row_starts is None:
        row_starts = np.cumsum(lens + 1) - (lens + 1)
    return VerifyInput(
        scores=scores,
        row_starts=np.asarray(row_starts, dtype=np.int64),
        verify_lens=lens,
        draft_ids=torch.as_tensor(drafts, dtype=torch.int64),
        q=q,
        draft_rows=np.arange(count, dtype=np.int64) if draft_rows is None else np.asarray(draft_rows, dtype=np.int64),
        keys=np.arange(100, 100 + count, dtype=np.uint64) if keys is None else np.asarray(keys, dtype=np.uint64),
        anchors=np.full(count, 5, dtype=np.int64) if anchors is None else np.asarray(anchors, dtype=np.int64),
        draws=draws,
    )


def table(vocab, depth, seed, dtype=torch.float64, scale=1.5):
    """next-token logits [V] for each prefix of up to ``depth`` tokens."""
    generator = torch.Generator().manual_seed(seed)
    known = {}

    def look(prefix):
        prefix = tuple(prefix)
        if prefix not in known:
            known[prefix] = (torch.randn(vocab, generator=generator, dtype=torch.float64) * scale).to(dtype)
        return known[prefix]

    def fill(prefix):
        look(prefix)
        if len(prefix) < depth:
            for token in range(vocab):
                fill((*prefix, token))

    fill(())
    return look
