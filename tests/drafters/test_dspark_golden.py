"""Golden rounds: what other projects' code computes with the same weights, features and tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from dspark.confidence.linear import LinearConfidence
from dspark.drafters.block import block_positions, visible
from dspark.drafters.dspark import DSparkDraft
from tests.drafters.golden import (
    assert_close,
    commit,
    context_keys,
    io,
    make_drafter,
    propose,
    request,
    stub_target,
)

torch.set_num_threads(1)
DEEPSPEC = ("deepspec_dspark_vanilla", "deepspec_dspark_gated", "deepspec_dspark_rnn", "deepspec_dflash")
SPECULATORS = (
    "speculators_dspark_vanilla",
    "speculators_dspark_gated",
    "speculators_dspark_rnn_bonus_anchor",
    "speculators_dspark_vanilla_legacy_layout",
    "speculators_dflash",
)


def drafter_of(case: str) -> DSparkDraft:
    target = stub_target(input_embeddings=None, lm_head=None) if case.startswith("deepspec") else stub_target()
    return make_drafter(case, target)


def confidence(drafter: DSparkDraft, hidden: Tensor, markov: Tensor | None) -> Tensor:
    weights = drafter.confidence_weights
    return LinearConfidence(weights["weight"], weights["bias"]).logits(hidden, markov)


@pytest.mark.parametrize("case", [*DEEPSPEC, "deepspec_dspark_gemma4"])
def test_deepspec_rounds(case: str) -> None:
    """Six rounds (two of Gemma 4): cache length, positions, hidden, base and corrected logits, ids, confidence, KV."""
    drafter, data = drafter_of(case), io(case)
    output = data.get("infer.output_ids")
    cached = 0
    for i in range(6 if output is not None else 2):
        at = f"infer.round{i}."
        start, new = int(data[at + "start"]), data[at + "target_hidden"][0]
        assert cached + len(new) == start
        inputs = data[at + "draft_input_ids"]
        ids = output[0, : start + 1].tolist() if output is not None else [0] * start + [int(inputs[0, 0])]
        assert ids[-1] == int(inputs[0, 0])
        if output is not None:
            assert cached == int(data[at + "cache_len_before"])
            assert start == int(data[at + "cache_len_after"])
        block_at = block_positions(torch.tensor([start]), drafter.layout.size(4))[0]
        assert torch.equal(torch.cat((torch.arange(cached, start), block_at)), data[at + "position_ids"][0])
        assert torch.equal(drafter.layout.inputs(inputs[:, 0], 4), inputs)

        commit(drafter, new, start=cached, end=start)
        block, corrected = propose(drafter, [request(ids)])
        assert_close(at + "hidden", block.hidden, data[at + "block_hidden"])
        assert_close(at + "base", drafter.backbone.logits(block.hidden), data[at + "base_logits"])
        assert_close(at + "corrected", corrected, data[at + "corrected_logits"])
        assert torch.equal(block.token_ids, data[at + "draft_tokens"])
        if at + "confidence_logits" in data:
            got = confidence(drafter, block.hidden, block.features.get("markov"))
            assert_close(at + "confidence", got, data[at + "confidence_logits"])
        for layer in range(2):
            if f"{at}draft_cache.{layer}.key" in data:
                keys, values = context_keys(drafter, layer, 0, start)
                assert_close(f"{at}key {layer}", keys, data[f"{at}draft_cache.{layer}.key"])
                assert_close(f"{at}value {layer}", values, data[f"{at}draft_cache.{layer}.value"])
        cached = start


@pytest.mark.parametrize("case", [*DEEPSPEC, "deepspec_dspark_gemma4", *SPECULATORS, "specforge_dspark_gated_swa"])
def test_fused_weights_come_apart_again(case: str) -> None:
    """What the modules hold, by canonical name, is what the file holds, bit for bit."""
    drafter = make_drafter(case)
    stored = drafter.checkpoint.tensors
    held = drafter.backbone.canonical()
    if drafter.head.__class__.__name__ != "NoHead":
        held |= {f"markov_head.{name}": t for name, t in drafter.head.canonical().items()}
    assert set(stored) - set(held) <= {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    assert set(held) - set(stored) <= {"embed_tokens.weight", "lm_head.weight"}
    assert all(torch.equal(held[name], stored[name]) for name in set(held) & set(stored))


def test_zlab_rounds() -> None:
    """All 22 rounds of z-lab's own generation: mask-only layout, the target's embedding and head."""
    drafter, data = make_drafter("zlab_dflash"), io("zlab_dflash")
    assert drafter.borrowed == ("embedding", "head")
    output, cached = data["infer.output_ids"][0].tolist(), 0
    for i in range(22):
        at = f"infer.round{i}."
        start = int(data[at + "start"])
        assert cached == int(data[at + "cache_len_before"])
        commit(drafter, data[at + "target_hidden"][0], start=cached, end=start)
        assert torch.equal(
            torch.cat((torch.arange(cached, start), block_positions(torch.tensor([start]), 5)[0])),
            data[at + "position_ids"][0],
        )
        block, logits = propose(drafter, [request(output[: start + 1])])
        whole = drafter.backbone(
            drafter.layout.inputs(torch.tensor([output[start]]), 4), np.array([0]), np.array([start])
        )
        assert_close(at + "all slots", whole, data[at + "block_hidden"])
        assert_close(at + "hidden", block.hidden, data[at + "block_hidden"][:, 1:])
        assert_close(at + "logits", logits, data[at + "draft_logits"])
        assert torch.equal(block.token_ids, data[at + "draft_tokens"])
        cached = start


@pytest.mark.parametrize("case", [*SPECULATORS, "specforge_dspark_gated_swa"])
def test_single_block(case: str) -> None:
    """One block in inference form: sliding windows of both conventions, pruned vocabularies, both layouts."""
    drafter, data = make_drafter(case), io(case)
    context = data["single.context_hidden"][0]
    start = len(context)
    commit(drafter, context, start=0, end=start)
    block, corrected = propose(drafter, [request([0] * start + data["single.anchor_token"].tolist())])
    skip = drafter.layout.skip
    assert_close("hidden", block.hidden, data["single.hidden"][:, skip:])
    base = data["single.base_logits"][:, skip:]
    assert_close("base", drafter.backbone.logits(block.hidden), base)
    assert_close("corrected", corrected, data["single.corrected_logits"])
    assert torch.equal(block.token_ids, data["single.draft_tokens"])
    if "single.confidence_logits" in data:
        got = confidence(drafter, block.hidden, block.features.get("markov"))
        assert_close("confidence", got, data["single.confidence_logits"])


def test_specforge_masks() -> None:
    """Sliding layers measure their window from the query and are causal; full layers are bidirectional."""
    drafter, data = make_drafter("specforge_dspark_gated_swa"), io("specforge_dspark_gated_swa")
    for layer, name in zip(drafter.checkpoint.config.layers, ("sliding", "full"), strict=True):
        seen = visible(layer, torch.tensor([11]), 4, 0, 15, None)
        assert torch.equal(seen.expand(1, 4, 15), data[f"single.mask_{name}"][0].bool()), name


@pytest.mark.parametrize("case", [*DEEPSPEC, "deepspec_dspark_gemma4", "specforge_dspark_gated_swa"])
def test_training_blocks_as_one_batch(case: str) -> None:
    """Every kept training block is a row with its own context length; all rows run as one batch."""
    drafter, data = drafter_of(case), io(case)
    keep = data["train.block_keep_mask"].nonzero()
    anchors = data["train.anchor_positions"][keep[:, 0], keep[:, 1]]
    ids, features = data["train.input_ids"], data["train.target_hidden_states"]
    slots = np.arange(len(keep))
    for slot, (row, at) in enumerate(zip(keep[:, 0].tolist(), anchors.tolist(), strict=True)):
        drafter.backbone.remember(features[row, :at], np.full(at, slot), np.arange(at))
    first = ids[keep[:, 0], anchors]
    hidden = drafter.hidden(first, slots, anchors.numpy(), 4)
    targets = data["train.target_ids"][keep[:, 0], keep[:, 1]]
    prev = torch.cat((first[:, None], targets[:, :-1]), dim=1)
    logits = drafter.backbone.logits(hidden) + drafter.head.block(prev, hidden)
    assert_close("draft logits", logits, data["train.draft_logits"][keep[:, 0], keep[:, 1]])
    if "train.hidden" in data:
        assert_close("hidden", hidden, data["train.hidden"][keep[:, 0], keep[:, 1]])
        assert torch.equal(prev, data["train.prev_token_ids"][keep[:, 0], keep[:, 1]])
    if "train.confidence_pred" in data:
        embed = getattr(drafter.head, "embed", None)
        got = confidence(drafter, hidden, None if embed is None else embed(prev))
        assert_close("confidence", got, data["train.confidence_pred"][keep[:, 0], keep[:, 1]])


@pytest.mark.parametrize("case", SPECULATORS)
def test_packed_batch(case: str) -> None:
    """speculators' packed rows: documents apart, windows from the anchor, its own alignment of previous tokens."""
    drafter, data = make_drafter(case), io(case)
    anchors = data["anchors"][data["anchor_valid"]]
    documents, positions = data["batch.document_ids"][0], data["batch.position_ids"][0]
    ids, features = data["batch.input_ids"][0], data["batch.hidden_states"][0]
    at = positions[anchors].numpy()
    for slot, anchor in enumerate(anchors.tolist()):
        rows = ((documents == documents[anchor]) & (torch.arange(len(ids)) < anchor)).nonzero().flatten()
        drafter.backbone.remember(features[rows], np.full(len(rows), slot), positions[rows].numpy())
    size, slots = drafter.checkpoint.config.block_size, np.arange(len(anchors))
    inputs = drafter.layout.inputs(ids[anchors], size - drafter.layout.skip)
    hidden = drafter.backbone(inputs, slots, at)
    assert_close("hidden", hidden.flatten(0, 1), data["hidden"][0])
    base = drafter.backbone.logits(hidden)
    assert_close("base", base.flatten(0, 1), data["base_logits"][0])
    if "prev_token_ids" in data:
        prev = data["prev_token_ids"]
        bias = drafter.head.block(prev, hidden)
        assert_close("bias", bias, data["markov_bias"])
        assert_close("corrected", (base + bias).flatten(0, 1), data["corrected_logits"][0])
        assert_close("confidence", confidence(drafter, hidden, drafter.head.embed(prev)), data["confidence_logits"])
