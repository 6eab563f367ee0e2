"""EAGLE-3 against what other projects' code computes: every recorded round, and whole generations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dspark.config import EngineConfig, SamplingParams
from dspark.drafters.layers import rms_norm
from dspark.engine.build import build_engine
from tests.drafters.eagle import commit_text, make_eagle
from tests.drafters.golden import ROOT, assert_close, io, propose, request, stub_target

torch.set_num_threads(1)
DEEPSPEC, SPECULATORS = "deepspec_eagle3", "speculators_eagle3"


def test_deepspec_rounds() -> None:
    """Cache length, entries' tokens and positions, hidden states before the norm, logits, ids, keys and values."""
    data = io(DEEPSPEC)
    drafter = make_eagle(DEEPSPEC, stub_target(input_embeddings=None, lm_head=None))
    core, outputs = drafter.core, list[Tensor]()
    core.register_forward_hook(lambda module, args, out: outputs.append(out))
    text, cached = data["infer.output_ids"][0].tolist(), 0
    for i in range(4):
        extend, at = f"infer.extend{i}.", f"infer.round{i}."
        start = int(data[at + "start"])
        assert cached == int(data[extend + "cache_len_before"])
        assert start == int(data[at + "cache_len_before"])
        assert data[extend + "position_ids"][0].tolist() == list(range(cached, start))
        assert data[extend + "input_ids"][0].tolist() == text[cached + 1 : start + 1]
        commit_text(drafter, text[: start + 1], data[extend + "target_hidden"][0], start=cached)
        outputs.clear()
        block, logits = propose(drafter, [request(text[: start + 1])], 3)
        raw = torch.stack(outputs, dim=1)
        assert_close(extend + "last_hidden", raw[:, :1], data[extend + "last_hidden"])
        assert_close(at + "hidden", raw, data[at + "step_hidden"])
        assert_close(at + "normed", block.hidden, rms_norm(data[at + "step_hidden"], core.norm, 1e-6))
        assert_close(at + "logits", logits, data[at + "step_logits"])
        assert [text[start], *block.token_ids[0].tolist()] == data[at + "verify_input_ids"][0].tolist()
        keys, values = core.cache.read(0, np.array([0]), 0, start)
        if extend + "draft_cache.0.key" in data:
            assert_close(extend + "key", keys, data[extend + "draft_cache.0.key"])
            assert_close(extend + "value", values, data[extend + "draft_cache.0.value"])
        cached = start


def test_deepspec_generation() -> None:
    """All 16 rounds of DeepSpec's own generation, through the engine: tokens and accepted lengths."""
    from dspark.targets.hf import HFTarget

    data = io(DEEPSPEC)
    target = HFTarget.from_pretrained(str(ROOT / "target_qwen3_tiny"), dtype="float32", device="cpu")
    config = EngineConfig(drafter=str(ROOT / DEEPSPEC), scheduler="fixed", gamma=3, max_slots=1, max_len=96)
    engine = build_engine(config, target=target)
    assert engine.parts.name("drafter") == "dspark/eagle3"
    prompt, text = data["infer.prompt_ids"][0].tolist(), data["infer.output_ids"][0].tolist()
    engine.submit(prompt, SamplingParams(temperature=0.0, max_tokens=len(text) - len(prompt)))
    chunks = list(engine.run())
    assert prompt + [t for c in chunks for t in c.ids] == text
    # The anchor of DeepSpec's first round comes from its prefill, as ours does from the first step.
    lengths = [len(c.ids) for c in chunks[1:]]
    assert lengths[:-1] == data["infer.acceptance_lengths"].tolist()[: len(lengths) - 1]
    assert engine.parts.drafter.rows_without_context == 0
    engine.close()
    assert engine.parts.drafter.buffered_tokens == 0


@pytest.mark.parametrize("together", [True, False])
def test_speculators_steps(together: bool) -> None:
    """Three steps with the true tokens from every position of a packed batch: pruned vocabulary, norms everywhere."""
    data = io(SPECULATORS)
    drafter = make_eagle(SPECULATORS, stub_target(input_embeddings=None, lm_head=None))
    core = drafter.core
    documents, ids, features = data["batch.document_ids"][0], data["batch.input_ids"][0], data["batch.hidden_states"][0]
    rows: list[tuple[int, int, int]] = []  # (first row of the document, row, slot)
    for document in sorted(set(documents.tolist()) - {-1}):
        where = (documents == document).nonzero().flatten().tolist()
        # the k-th step needs the token k places on, inside the document
        rows += [(where[0], row, 0) for row in where[:-2]]
    rows = [(first, row, slot) for slot, (first, row, _) in enumerate(rows)]
    groups = [rows] if together else [[row] for row in rows]
    for group in groups:
        slots = np.array([slot for _, _, slot in group])
        for first, row, slot in group:
            core.text[slot] = ([-1, *ids[first : row + 1].tolist()], ())  # the batch is shifted: x_{i+1} beside g_i
            count = row + 1 - first
            core.remember(features[first : row + 1], np.full(count, slot), np.arange(count))
        hidden = torch.stack([core.last[slot][1] for slot in slots.tolist()])
        at = torch.tensor([row for _, row, _ in group])
        positions = np.array([row - first for first, row, _ in group])
        for k in range(3):
            out = core(hidden, ids[at + k], slots, positions + k)
            hidden = core.normed(out)
            logits = core.logits(hidden)
            assert_close(f"step {k} hidden", hidden, data[f"step{k}.lm_head_input"][0, at])
            assert_close(f"step {k} logits", logits, data[f"step{k}.logits"][0, at])
            assert torch.equal(logits.argmax(-1), data[f"step{k}.argmax_draft_ids"][0, at])


def test_speculators_drafts_are_the_steps_with_drafted_tokens() -> None:
    """The drafter's own loop feeds back what the teacher-forced steps feed, with drafted ids mapped to the target's."""
    data = io(SPECULATORS)
    drafter = make_eagle(SPECULATORS)
    assert drafter.token_map is not None
    text = [5, *data["batch.input_ids"][0, :6].tolist()]
    commit_text(drafter, text, data["batch.hidden_states"][0, :6], start=0)
    block, logits = propose(drafter, [request(text)], 3)
    assert drafter.default_gamma == 3
    assert_close("first", logits[0, 0], data["step0.logits"][0, 5])
    core = drafter.core
    hidden, token = core.last[0][1][None], torch.tensor([text[-1]])
    for k in range(3):
        hidden = core.normed(core(hidden, token, np.array([0]), np.array([5 + k])))
        assert_close(f"step {k}", logits[0, k], core.logits(hidden)[0])
        token = drafter.token_map[logits[0, k].argmax()][None]
        assert int(token) == int(block.token_ids[0, k])


@pytest.mark.parametrize("case", [DEEPSPEC, SPECULATORS])
def test_fused_weights_come_apart_again(case: str) -> None:
    drafter = make_eagle(case)
    stored: Any = drafter.checkpoint.tensors
    held = drafter.core.canonical()
    assert set(held) == set(stored)
    assert all(torch.equal(held[name], stored[name]) for name in held)
