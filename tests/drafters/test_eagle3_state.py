"""State of the EAGLE-3 drafter: slots, rollback, gaps, buffering, windows. A fresh drafter is the oracle."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.checkpoints import LayerConfig, load_checkpoint, make_checkpoint, random_tensors
from dspark.drafters.eagle3 import Eagle3Config, Eagle3Draft
from dspark.drafters.probe_text import write_text
from dspark.errors import CheckpointError, ConfigError, RowFault
from dspark.protocols import Drafter
from dspark.types import Committed
from tests.drafters.eagle import commit_text, make_eagle
from tests.drafters.golden import ROOT, io, near, propose, request, stub_target

torch.set_num_threads(1)
CASES = ("deepspec_eagle3", "speculators_eagle3")
GAMMA = 3
every = pytest.mark.parametrize("case", CASES)


def width(case: str) -> int:
    return 160 if case.startswith("deepspec") else 96


def features(case: str, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, width(case), generator=generator, dtype=torch.float64)


def tokens(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(100 + seed)).tolist()


def double(case: str, **config: Any) -> Eagle3Draft:
    return make_eagle(case, dtype=torch.float64, **config)


def same(block: Any, logits: Tensor, row: int, case: str, length: int, seed: int) -> None:
    """The row drafts what a fresh drafter drafts for its text and features."""
    alone = double(case)
    commit_text(alone, tokens(60, seed)[:length], features(case, 60, seed)[: length - 1], start=0)
    one, expected = propose(alone, [request(tokens(60, seed)[:length])], logits.shape[1])
    near(logits[row], expected[0])
    near(block.hidden[row], one.hidden[0])
    assert torch.equal(block.token_ids[row], one.token_ids[0])


@every
def test_it_is_a_drafter(case: str) -> None:
    drafter = double(case)
    assert isinstance(drafter, Drafter)
    assert (drafter.max_gamma, drafter.default_gamma) == (None, 3)
    assert drafter.tap_layers == ((0, 1, 2, 3, 4) if case.startswith("deepspec") else (1, 2, 3))
    assert drafter.capabilities.needs_taps


@every
def test_batch_of_unequal_contexts_equals_solo(case: str) -> None:
    """Rows of 2 to 58 positions in scattered slots, one call: each as if alone."""
    drafter = double(case)
    lengths, slots = [9, 2, 58, 31, 3], [5, 0, 3, 9, 1]
    rows = []
    for i, (length, slot) in enumerate(zip(lengths, slots, strict=True)):
        commit_text(drafter, tokens(60, i)[:length], features(case, 60, i)[: length - 1], start=0, slot=slot)
        rows.append(request(tokens(60, i)[:length], slot=slot))
    block, logits = propose(drafter, rows, GAMMA)
    for i, length in enumerate(lengths):
        same(block, logits, i, case, length, i)


@every
def test_rounds_that_accept_differently_equal_fresh_contexts(case: str) -> None:
    """Case 31: three requests accept 0, 1 and 3 of a round; what steps wrote over features' places never shows."""
    drafter, lengths = double(case), [6, 4, 9]
    for slot, length in enumerate(lengths):
        commit_text(drafter, tokens(60, slot)[:length], features(case, 60, slot)[: length - 1], start=0, slot=slot)
    for _ in range(4):
        rows = [request(tokens(60, slot)[:length], slot=slot) for slot, length in enumerate(lengths)]
        block, logits = propose(drafter, rows, GAMMA)
        for slot, length in enumerate(lengths):
            same(block, logits, slot, case, length, slot)
        for slot, accepted in enumerate((0, 1, 3)):
            start, end = lengths[slot] - 1, lengths[slot] + accepted + 1
            taps = features(case, 60, slot)[start : end - 1]
            commit_text(drafter, tokens(60, slot)[:end], taps, start=start, slot=slot)
            lengths[slot] = end


@every
def test_a_branch_that_was_given_up_is_overwritten(case: str) -> None:
    """Other tokens and features from position 5 on: rollback is a length."""
    drafter = double(case)
    commit_text(drafter, tokens(60, 1)[:13], features(case, 12, 1), start=0)
    propose(drafter, [request(tokens(60, 1)[:13])], GAMMA)
    text = tokens(60, 1)[:6] + tokens(60, 2)[6:10]
    taps = torch.cat((features(case, 12, 1)[:5], features(case, 12, 2)[5:9]))
    commit_text(drafter, text, taps[5:], start=5)
    block, logits = propose(drafter, [request(text)], GAMMA)
    alone = double(case)
    commit_text(alone, text, taps, start=0)
    one, expected = propose(alone, [request(text)], GAMMA)
    near(logits, expected)
    near(block.hidden, one.hidden)


@every
def test_plain_rounds_buffer_and_resume(case: str) -> None:
    """Features of rounds that did not draft wait, are counted, and are projected in one go."""
    drafter = double(case)
    for position in range(20):
        taps = features(case, 60, 3)[position : position + 1]
        commit_text(drafter, tokens(60, 3)[: position + 2], taps, start=position)
    assert drafter.buffered_tokens == 20
    assert drafter.core.cache.capacity == 0
    block, logits = propose(drafter, [request(tokens(60, 3)[:21])], GAMMA)
    assert drafter.buffered_tokens == 0
    same(block, logits, 0, case, 21, 3)


def test_long_prompts_do_not_wait_without_bound() -> None:
    """Chunks of a prompt whose tokens are all known; the anchor comes with the last."""
    case, text = CASES[0], tokens(2001, 4)
    drafter, whole = double(case), double(case)
    view = request(text)
    for start in range(0, 2000, 500):
        part = dataclasses.replace(view, num_cached=start)
        drafter.commit([Committed(part, -1, (), 0, 0, start + 500, features(case, 2000, 4)[start : start + 500])])
        assert drafter.buffered_tokens <= 1500
    commit_text(whole, text, features(case, 2000, 4), start=0)
    near(propose(drafter, [view], GAMMA)[1], propose(whole, [view], GAMMA)[1])


@every
def test_rows_without_their_context_draft_nothing(case: str) -> None:
    """A gap, a request that never came, a first token alone: no draft, and the neighbour's is its own."""
    drafter = double(case)
    commit_text(drafter, tokens(60, 0)[:9], features(case, 60, 0)[:8], start=0)
    commit_text(drafter, tokens(60, 1)[:6], features(case, 60, 1)[:5], start=0, slot=1)
    commit_text(drafter, tokens(60, 1)[:9], None, start=5, slot=1)
    rows = [
        request(tokens(60, 1)[:9], slot=1),
        request(tokens(60, 0)[:9]),
        request(tokens(60, 2)[:9], slot=2),
        request([7], slot=3),
    ]
    block, logits = propose(drafter, rows, GAMMA)
    assert block.lens.tolist() == [0, GAMMA, 0, 0]
    assert drafter.rows_without_context == 3
    same(block, logits, 1, case, 9, 0)
    assert not block.hidden[[0, 2, 3]].any()
    commit_text(drafter, tokens(60, 1)[:10], features(case, 60, 1)[8:9], start=8, slot=1)
    assert propose(drafter, [request(tokens(60, 1)[:10], slot=1)], GAMMA)[0].lens.tolist() == [0], "the gap stays"
    commit_text(drafter, tokens(60, 1)[:10], features(case, 60, 1)[:9], start=0, slot=1)
    block, logits = propose(drafter, [request(tokens(60, 1)[:10], slot=1)], GAMMA)
    same(block, logits, 0, case, 10, 1)


def test_a_context_that_was_shortened_below_its_last_feature_waits_for_it() -> None:
    """The feature before the anchor is gone with what replaced it: nothing is drafted from a later one."""
    case = CASES[0]
    drafter = double(case)
    commit_text(drafter, tokens(60)[:13], features(case, 12), start=0)
    propose(drafter, [request(tokens(60)[:13])], GAMMA)
    block, _ = propose(drafter, [request(tokens(60)[:9])], GAMMA)
    assert block.lens.tolist() == [0]


@every
def test_a_reused_slot_starts_empty(case: str) -> None:
    """Neither the old request's context nor its non-finite values reach the next one."""
    drafter = double(case)
    bad = torch.full((30, width(case)), torch.nan, dtype=torch.float64)
    commit_text(drafter, tokens(60, 7)[:31], bad, start=0)
    commit_text(drafter, tokens(60, 1)[:9], features(case, 60, 1)[:8], start=0, slot=1)
    rows = [request(tokens(60, 1)[:9], slot=1), request(tokens(60, 7)[:31])]
    with pytest.raises(RowFault) as err:
        propose(drafter, rows, GAMMA)
    assert err.value.rows == (1,)
    drafter.release(0, 1)
    assert 0 not in drafter.core.last
    commit_text(drafter, tokens(60, 2)[:9], features(case, 60, 2)[:8], start=0, generation=2)
    commit_text(drafter, tokens(60, 3)[:41], features(case, 60, 3)[:40], start=0, slot=1, generation=2)
    rows = [request(tokens(60, 2)[:9], generation=2), request(tokens(60, 3)[:41], slot=1, generation=2)]
    block, logits = propose(drafter, rows, GAMMA)
    same(block, logits, 0, case, 9, 2)
    same(block, logits, 1, case, 41, 3)


def test_generations() -> None:
    """An older one's release changes nothing; a slot given out again knows nothing of its predecessor."""
    case = CASES[0]
    drafter = double(case)
    commit_text(drafter, tokens(60, 2)[:9], features(case, 60, 2)[:8], start=0, generation=5)
    assert propose(drafter, [request(tokens(60, 2)[:9], generation=6)], GAMMA)[0].lens.tolist() == [0]
    drafter.release(0, 4)
    block, logits = propose(drafter, [request(tokens(60, 2)[:9], generation=5)], GAMMA)
    same(block, logits, 0, case, 9, 2)


def test_no_more_steps_than_can_be_verified() -> None:
    """``max_draft`` is known before anything is drawn; the longest row's steps are taken, and none more."""
    case = CASES[0]
    drafter, calls = double(case), list[int]()
    drafter.core.register_forward_hook(lambda module, args, out: calls.append(len(out)))
    rows = []
    for slot, most in enumerate((1, 2)):
        commit_text(drafter, tokens(60, slot)[:9], features(case, 60, slot)[:8], start=0, slot=slot)
        rows.append(dataclasses.replace(request(tokens(60, slot)[:9], slot=slot), max_draft=most))
    block, _ = propose(drafter, rows, 5)
    assert block.lens.tolist() == [1, 2]
    assert calls == [2, 2]
    assert block.token_ids.shape == (2, 5)
    assert block.hidden.shape == (2, 5, 32)
    assert propose(drafter, rows, 0)[0].lens.tolist() == [0, 0]


def test_gamma_may_go_beyond_the_trained_steps() -> None:
    case = CASES[0]
    drafter = double(case)
    commit_text(drafter, tokens(60)[:9], features(case, 60)[:8], start=0)
    block, logits = propose(drafter, [request(tokens(60)[:9])], 9)
    assert block.lens.tolist() == [9]
    same(block, logits, 0, case, 9, 0)


@pytest.mark.parametrize("window", [1, 4])
def test_a_sliding_window_is_measured_from_the_entry(window: int) -> None:
    """A window of W sees the entry and W - 1 before it: what lies further back may be anything."""
    loaded = load_checkpoint(ROOT / CASES[0])
    layer = LayerConfig(num_kv_heads=2, head_dim=12, window=window, causal=True)
    config = dataclasses.replace(loaded.config, layers=(layer,))
    made = make_checkpoint(config, random_tensors(config, seed=3, std=0.3))
    outputs = []
    for seed in (5, 6):
        drafter = make_eagle(made, dtype=torch.float64)
        taps = features(CASES[0], 8, 1)
        taps[: 8 - window] = features(CASES[0], 8, seed)[: 8 - window]
        commit_text(drafter, tokens(60)[:9], taps, start=0)
        outputs.append(propose(drafter, [request(tokens(60)[:9])], GAMMA)[1])
    near(outputs[0], outputs[1])
    full = make_eagle(dataclasses.replace(made, config=loaded.config), dtype=torch.float64)
    commit_text(full, tokens(60)[:9], taps, start=0)
    other = propose(full, [request(tokens(60)[:9])], GAMMA)[1]
    assert float((other - outputs[1]).abs().max()) > 1e-3


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(CheckpointError, match="it taps layer 4, the target has 4 layers"):
        make_eagle(CASES[0], stub_target(num_layers=4))
    loaded = load_checkpoint(ROOT / CASES[0])
    hot = dict(loaded.tensors) | {"fc.weight": loaded.tensors["fc.weight"] * 1e7}
    with pytest.raises(CheckpointError, match=r"fc.weight overflows in torch.float16"):
        make_eagle(dataclasses.replace(loaded, tensors=hot), dtype=torch.float16)
    with pytest.raises(CheckpointError, match="is a dspark drafter: use drafter 'dspark'"):
        make_eagle(ROOT / "deepspec_dspark_vanilla")
    with pytest.raises(ConfigError, match=r"Eagle3Config.checkpoint: name a folder"):
        Eagle3Config()
    with pytest.raises(ConfigError, match=r"Eagle3Config.dtype: expected one of"):
        Eagle3Config("x", dtype="int8")


def test_the_probe_scores_first_drafts_and_leaves_live_slots_alone() -> None:
    """Its hits are those of drafting at every place of the text; noise is told from a trained drafter."""
    from dspark.targets.hf import HFTarget

    target = HFTarget.from_pretrained(str(ROOT / "target_qwen3_tiny"), dtype="float32", device="cpu")
    target.allocate(1, 64)
    drafter = make_eagle(CASES[0], target)
    commit_text(drafter, tokens(60)[:9], features(CASES[0], 60)[:8].float(), start=0)
    before, _ = propose(drafter, [request(tokens(60)[:9])], GAMMA)
    prompt = io(CASES[0])["infer.prompt_ids"][0].tolist()
    report = drafter.probe(target, prompt)
    assert report.warnings == ()
    assert report.score > report.chance + 0.5
    assert len(report.alternatives) == 2
    after, _ = propose(drafter, [request(tokens(60)[:9])], GAMMA)
    assert torch.equal(before.hidden, after.hidden)
    text = write_text(target, prompt, [drafter.tap_layers])
    ids, taps, hits, scores = text.ids.tolist(), text.taps(drafter.tap_layers), [], []
    for at in range(text.first, len(ids) - 1):
        commit_text(drafter, ids[: at + 1], taps[:at], start=0)
        block, logits = propose(drafter, [request(ids[: at + 1])], 1)
        hits.append(int(block.token_ids[0, 0]) == ids[at + 1])
        scores.append(float(logits[0, 0].log_softmax(-1)[ids[at + 1]]))
    assert report.first_hits == pytest.approx(sum(hits) / len(hits), abs=1e-6)
    assert report.score == pytest.approx(sum(scores) / len(scores), abs=1e-5)
    loaded = load_checkpoint(ROOT / CASES[0])
    noise = dict(loaded.tensors) | {"lm_head.weight": -loaded.tensors["lm_head.weight"]}
    report = make_eagle(dataclasses.replace(loaded, tensors=noise), target).probe(target, prompt)
    assert "no better than chance" in report.warnings[0]
