"""A drafter under training computes what the inference drafter computes, in both layouts and under every mask."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dspark.training.blocks import make_blocks
from dspark.training.samples import Sample
from tests.drafters.golden import assert_close, commit, make_drafter, propose, request
from tests.training.golden import trainable

torch.set_num_threads(1)
CASES = (
    "deepspec_dspark_vanilla",
    "deepspec_dspark_gated",
    "deepspec_dspark_rnn",
    "deepspec_dflash",
    "deepspec_dspark_gemma4",
    "speculators_dspark_vanilla",
    "speculators_dspark_rnn_bonus_anchor",
    "speculators_dspark_vanilla_legacy_layout",
    "speculators_dflash",
    "specforge_dspark_gated_swa",
    "zlab_dflash",
)


@pytest.mark.parametrize("case", CASES)
def test_hidden_states_and_logits_are_those_of_inference(case: str) -> None:
    """Blocks of two packed sequences, one after another anchor, against one block at a time over a cache."""
    drafter, training = make_drafter(case), trainable(case)
    gamma, width = drafter.max_gamma, drafter.backbone.fc.shape[1]
    generator = torch.Generator().manual_seed(0)
    lengths, anchors = (23, 17), (np.array([3, 9, 20]), np.array([5, 14]))
    samples = [Sample(np.arange(n) * 7 % 90, np.ones(n, dtype=bool)) for n in lengths]
    taps = [torch.randn(n, width, generator=generator) for n in lengths]
    blocks = make_blocks(samples, anchors, gamma)
    with torch.no_grad():
        hidden = training.hidden(torch.cat(taps), blocks)
        corrected = training.corrected(hidden, blocks.prev)
        scores = training.confidence(hidden, blocks.prev)
    row = 0
    for slot, (sample, at, features) in enumerate(zip(samples, anchors, taps, strict=True)):
        done = 0
        for anchor in at.tolist():
            commit(drafter, features[done:anchor], start=done, end=anchor, slot=slot)
            done = anchor
            ids = sample.ids[: anchor + 1].tolist()
            block, logits = propose(drafter, [request(ids, slot=slot)])
            assert_close("hidden", hidden[row], block.hidden[0])
            # The first position has the same previous token in both; later ones only where the draft was the truth.
            assert_close("logits", corrected[row, 0], logits[0, 0])
            for k in range(gamma):
                if block.token_ids[0, :k].tolist() != blocks.labels[row, :k].tolist():
                    break
                assert_close("logits", corrected[row, k], logits[0, k])
            if scores is not None:
                weights = drafter.confidence_weights
                features_0 = hidden[row, 0]
                if weights["weight"].shape[1] > len(features_0):
                    features_0 = torch.cat([features_0, drafter.head.embed(blocks.prev[row, 0])])
                assert_close("confidence", scores[row, :1], features_0 @ weights["weight"].T + weights["bias"])
            row += 1
    assert row == len(blocks)
