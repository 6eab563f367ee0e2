"""State of the drafter: slots, rollback, gaps, buffering, gamma, vocabularies, dtypes, windows."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dspark.checkpoints import Checkpoint, make_checkpoint, random_tensors, read_config
from dspark.config import build_config
from dspark.drafters.block import length_groups
from dspark.drafters.dspark import DSparkConfig, DSparkDraft
from dspark.errors import CheckpointError, ConfigError, RowFault
from dspark.protocols import Drafter
from dspark.types import Mode
from tests.drafters.golden import ROOT, commit, io, make_drafter, near, propose, request, stub_target

torch.set_num_threads(1)
CASE = "deepspec_dspark_vanilla"


def features(length: int, seed: int = 0, width: int = 64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, width, generator=generator, dtype=torch.float64)


def tokens(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 96, (length,), generator=torch.Generator().manual_seed(100 + seed)).tolist()


def double(case: str = CASE, **config: Any) -> DSparkDraft:
    return make_drafter(case, dtype=torch.float64, **config)


def solo(length: int, seed: int, case: str = CASE, gamma: int | None = None, **config: Any) -> tuple[Tensor, Tensor]:
    """Hidden states and logits of one fresh request: the oracle of everything below."""
    drafter = double(case, **config)
    commit(drafter, features(length - 1, seed), start=0, end=length - 1)
    block, logits = propose(drafter, [request(tokens(length, seed))], gamma)
    return block.hidden[0], logits[0]


def same(block: Any, logits: Tensor, row: int, length: int, seed: int, case: str = CASE, **config: Any) -> None:
    hidden, expected = solo(length, seed, case, logits.shape[1], **config)
    near(block.hidden[row], hidden)
    near(logits[row], expected)


def changed(case: str = CASE, **values: Any) -> Checkpoint:
    """A random checkpoint of a golden config with other values."""
    config = dataclasses.replace(read_config(json.loads((ROOT / case / "config.json").read_text())), **values)
    return make_checkpoint(config.validate("test"), random_tensors(config, seed=5, std=0.3), source="random")


def test_it_is_a_drafter() -> None:
    drafter = double()
    assert isinstance(drafter, Drafter)
    assert (drafter.max_gamma, drafter.default_gamma, drafter.tap_layers) == (4, 4, (1, 3))
    assert drafter.capabilities.needs_taps
    assert drafter.capabilities.max_gamma == 4


@pytest.mark.parametrize("case", [CASE, "deepspec_dspark_rnn", "zlab_dflash", "speculators_dspark_vanilla"])
def test_batch_of_unequal_contexts_equals_solo(case: str) -> None:
    """Rows of 1 to 700 context positions, in scattered slots, attended in groups: each as if alone."""
    drafter, width = double(case), len(make_drafter(case).tap_layers) * 32
    lengths, slots = [9, 2, 700, 31, 650, 300], [5, 0, 3, 9, 1, 2]
    assert len(length_groups(np.array(lengths))) > 1
    rows = []
    for i, (length, slot) in enumerate(zip(lengths, slots, strict=True)):
        commit(drafter, features(length - 1, i, width), start=0, end=length - 1, slot=slot)
        rows.append(request(tokens(length, i), slot=slot))
    block, logits = propose(drafter, rows)
    for i, length in enumerate(lengths):
        alone = double(case)
        commit(alone, features(length - 1, i, width), start=0, end=length - 1)
        one, expected = propose(alone, [request(tokens(length, i))])
        near(block.hidden[i], one.hidden[0])
        near(logits[i], expected[0])
        assert torch.equal(block.token_ids[i], one.token_ids[0])


def test_rounds_that_accept_differently_equal_fresh_contexts() -> None:
    """Case 31: three requests accept 0, 2 and 4 of a round; a block's stale entries never show."""
    drafter = double()
    lengths = [6, 4, 9]
    for slot, length in enumerate(lengths):
        commit(drafter, features(40, slot)[: length - 1], start=0, end=length - 1, slot=slot)
    for _ in range(4):
        rows = [request(tokens(40, slot)[:length], slot=slot) for slot, length in enumerate(lengths)]
        block, logits = propose(drafter, rows)
        for slot, length in enumerate(lengths):
            alone = double()
            commit(alone, features(40, slot)[: length - 1], start=0, end=length - 1)
            one, expected = propose(alone, [request(tokens(40, slot)[:length])])
            near(logits[slot], expected[0])
            near(block.hidden[slot], one.hidden[0])
        for slot, accepted in enumerate((0, 2, 4)):
            start, end = lengths[slot] - 1, lengths[slot] + accepted
            commit(drafter, features(40, slot)[start:end], start=start, end=end, slot=slot)
            lengths[slot] += accepted + 1


def test_anchor_feature_is_never_visible() -> None:
    """The position of the anchor holds the block's first slot: what its feature would be changes nothing."""
    drafter = double()
    commit(drafter, features(8), start=0, end=8)
    before, _ = propose(drafter, [request(tokens(9))])
    drafter.backbone.remember(features(8, 3), np.zeros(8, dtype=np.int64), np.arange(8, 16))
    after, _ = propose(drafter, [request(tokens(9))])
    assert torch.equal(before.hidden, after.hidden)


def test_a_longer_context_than_the_anchor_is_rolled_back() -> None:
    """Features beyond the anchor (of a branch given up) are stale, and replaced when their positions come again."""
    drafter = double()
    commit(drafter, features(12, 1), start=0, end=12)
    propose(drafter, [request(tokens(13, 1))])
    commit(drafter, features(12, 2)[5:9], start=5, end=9)
    block, logits = propose(drafter, [request(tokens(13, 1)[:10])])
    alone = double()
    mixed = torch.cat((features(12, 1)[:5], features(12, 2)[5:9]))
    commit(alone, mixed, start=0, end=9)
    one, expected = propose(alone, [request(tokens(13, 1)[:10])])
    near(block.hidden, one.hidden)
    near(logits, expected)


def test_rollback_of_what_still_waits() -> None:
    drafter = double()
    commit(drafter, features(6, 1), start=0, end=6)
    commit(drafter, features(4, 9), start=6, end=10)
    commit(drafter, features(9, 1)[4:8], start=4, end=8)
    assert drafter.buffered_tokens == 8
    block, logits = propose(drafter, [request(tokens(9, 1))])
    same(block, logits, 0, 9, 1)


def test_a_reused_slot_starts_empty() -> None:
    """Neither the old request's context nor its head state nor its non-finite values reach the next one."""
    for case in (CASE, "deepspec_dspark_rnn"):
        width = len(make_drafter(case).tap_layers) * 32
        drafter = double(case)
        commit(drafter, torch.full((30, width), torch.nan, dtype=torch.float64), start=0, end=30)
        with pytest.raises(RowFault, match=r"not finite from layers.0 on"):
            propose(drafter, [request(tokens(31, 7))])
        drafter.release(0, 1)
        commit(drafter, features(8, 2, width), start=0, end=8, generation=2)
        commit(drafter, features(40, 3, width), start=0, end=40, slot=1)
        rows = [request(tokens(9, 2), generation=2), request(tokens(41, 3), slot=1)]
        block, logits = propose(drafter, rows)  # the longer neighbour has the first row's slot read beyond its length
        alone = double(case)
        commit(alone, features(8, 2, width), start=0, end=8)
        one, expected = propose(alone, [request(tokens(9, 2))])
        near(logits[:1], expected)
        near(block.hidden[:1], one.hidden)


def test_release_of_an_older_generation_changes_nothing() -> None:
    drafter = double()
    commit(drafter, features(8, 2), start=0, end=8, generation=5)
    drafter.release(0, 4)
    block, logits = propose(drafter, [request(tokens(9, 2), generation=5)])
    assert block.lens.tolist() == [4]
    same(block, logits, 0, 9, 2)


def test_a_request_never_drafts_from_its_predecessors_context() -> None:
    """A slot given out again before its release: nothing is known of the new request until its features come."""
    drafter = double()
    commit(drafter, features(8, 2), start=0, end=8)
    block, _ = propose(drafter, [request(tokens(9, 2), generation=2)])
    assert block.lens.tolist() == [0]


def test_a_fault_names_its_rows_alone() -> None:
    drafter = double()
    for slot in range(3):
        commit(drafter, features(8, slot), start=0, end=8, slot=slot)
    bad = torch.full((8, 64), torch.inf, dtype=torch.float64)
    commit(drafter, bad, start=0, end=8, slot=1, generation=2)
    rows = [request(tokens(9, s), slot=s, generation=2 if s == 1 else 1) for s in range(3)]
    with pytest.raises(RowFault) as err:
        propose(drafter, rows)
    assert err.value.rows == (1,)
    block, logits = propose(drafter, [rows[0], rows[2]])
    same(block, logits, 0, 9, 0)


def test_rows_without_their_context_draft_nothing() -> None:
    """A step without taps leaves a gap; a request that never came has none. Lengths are decided before any draw."""
    drafter = double()
    commit(drafter, features(8, 0), start=0, end=8)
    commit(drafter, features(5, 1), start=0, end=5, slot=1)
    commit(drafter, None, start=5, end=8, slot=1)
    rows = [request(tokens(9, 0)), request(tokens(9, 1), slot=1), request(tokens(9, 2), slot=2)]
    block, logits = propose(drafter, rows)
    assert block.lens.tolist() == [4, 0, 0]
    assert drafter.rows_without_context == 2
    same(block, logits, 0, 9, 0)
    commit(drafter, features(9, 1)[8:], start=8, end=9, slot=1)
    block, _ = propose(drafter, [request(tokens(10, 1), slot=1)])
    assert block.lens.tolist() == [0], "the gap stays"
    commit(drafter, features(9, 1), start=0, end=9, slot=1)
    block, logits = propose(drafter, [request(tokens(10, 1), slot=1)])
    assert block.lens.tolist() == [4]
    same(block, logits, 0, 10, 1)


def test_plain_rounds_buffer_and_resume() -> None:
    """Features of rounds that did not draft wait, are counted, and are projected in one go."""
    drafter = double()
    for position in range(20):
        commit(drafter, features(20, 3)[position : position + 1], start=position, end=position + 1)
    assert drafter.buffered_tokens == 20
    assert drafter.backbone.cache.capacity == 0
    block, logits = propose(drafter, [request(tokens(21, 3))])
    assert drafter.buffered_tokens == 0
    same(block, logits, 0, 21, 3)


def test_long_prompts_do_not_wait_without_bound() -> None:
    drafter = double()
    for start in range(0, 3000, 500):
        commit(drafter, features(3000, 4)[start : start + 500], start=start, end=start + 500)
        assert drafter.buffered_tokens <= 1500
    block, logits = propose(drafter, [request(tokens(3001, 4))])
    same(block, logits, 0, 3001, 4)


@pytest.mark.parametrize("case", [CASE, "deepspec_dspark_rnn", "zlab_dflash"])
def test_every_gamma_up_to_the_trained_block(case: str) -> None:
    """A shorter block has fewer masks; token k still comes from its own slot, and nothing is left of the longer one."""
    width = len(make_drafter(case).tap_layers) * 32
    drafter = double(case)
    commit(drafter, features(8, 1, width), start=0, end=8)
    for gamma in (4, 1, 3, 2, 0, 4):
        block, logits = propose(drafter, [request(tokens(9, 1))], gamma)
        assert block.token_ids.shape == (1, gamma)
        assert block.lens.tolist() == [gamma]
        alone = double(case)
        commit(alone, features(8, 1, width), start=0, end=8)
        one, expected = propose(alone, [request(tokens(9, 1))], gamma)
        near(logits, expected.to(logits))
        if gamma:
            assert block.hidden.shape == (1, gamma, 32)
            assert torch.equal(block.token_ids, one.token_ids)


def test_gamma_beyond_the_trained_block_is_refused_with_both_numbers() -> None:
    """Case 27."""
    five = changed(block_size=5)
    with pytest.raises(ConfigError, match=r"gamma 7 .*block of 5 .*at most 5"):
        make_drafter(five, gamma=7)
    drafter = make_drafter(five, gamma=3)
    commit(drafter, features(8).float(), start=0, end=8)
    assert propose(drafter, [request(tokens(9))], 3)[0].lens.tolist() == [3]
    with pytest.raises(ConfigError, match=r"gamma 7 .*block of 5 .*at most 5"):
        propose(drafter, [request(tokens(9))], 7)
    with pytest.raises(ConfigError, match=r"gamma 5 .*block of 5 \(mask-only\) drafts at most 4"):
        make_drafter("zlab_dflash", gamma=5)


def test_layouts_load_as_what_they_are() -> None:
    """Case 33: the same weights under both layouts give other inputs, other slots, other drafts."""
    data = io("zlab_dflash")
    outputs = {}
    for flag in (False, True):
        drafter = make_drafter("zlab_dflash", sample_from_anchor=flag)
        assert drafter.max_gamma == (5 if flag else 4)
        commit(drafter, data["infer.round0.target_hidden"][0], start=0, end=9)
        block, _ = propose(drafter, [request(data["infer.output_ids"][0, :10].tolist())], 4)
        outputs[flag] = block.token_ids[0].tolist()
    assert outputs[False] == data["infer.round0.draft_tokens"][0].tolist()
    assert outputs[True] != outputs[False]


def test_candidates_bias_and_keep_exactly_the_top() -> None:
    """q is cut to the candidates, whose logits are those of the whole head; all else is impossible."""
    full, cut = double(), double(candidates=8)
    for drafter in (full, cut):
        commit(drafter, features(8, 1), start=0, end=8)
    rows = [request(tokens(9, 1), mode=Mode.REJECTION)]
    block, logits = propose(cut, rows)
    base = full.backbone.logits(block.hidden)
    prev = torch.cat((torch.tensor([[rows[0].anchor]]), block.token_ids[:, :-1]), dim=1)
    expected = base + full.head.block(prev, block.hidden)
    for k in range(4):
        kept = base[0, k].topk(8).indices
        near(logits[0, k], expected[0, k, kept.sort().values])
        law = block.q.probs(np.array([0]), np.array([k]))[0]
        assert set(law.nonzero().flatten().tolist()) == set(kept.tolist())
        assert float(law.sum()) == pytest.approx(1.0, abs=1e-12)
    assert double(candidates=97).candidates is None


@pytest.mark.parametrize("mode", [Mode.REJECTION, Mode.COUPLED, Mode.GREEDY])
def test_candidates_of_a_pruned_vocabulary(mode: Mode) -> None:
    """Candidates are draft ids; tokens and q are target ids."""
    case = "speculators_dspark_vanilla"
    full, cut = (make_drafter(case, dtype=torch.float64, candidates=n) for n in (None, 6))
    assert full.token_map is not None
    made = []
    for drafter in (full, cut):
        commit(drafter, features(8, 1), start=0, end=8)
        made.append(propose(drafter, [request(tokens(9, 1), mode=mode)])[0])
    base = full.backbone.logits(made[1].hidden)[0]
    for k in range(made[1].token_ids.shape[1]):
        kept = set(full.token_map[base[k].topk(6).indices].tolist())
        assert int(made[1].token_ids[0, k]) in kept
        law = made[1].q.probs(np.array([0]), np.array([k]))[0]
        assert set(law.nonzero().flatten().tolist()) <= kept
        assert len(law.nonzero()) == (1 if mode is Mode.GREEDY else 6)


def test_context_window() -> None:
    """A window hides what lies further back: the same drafts as without it, if the features there are cut away."""
    windowed = double(context_window=5)
    commit(windowed, features(30, 1), start=0, end=30)
    block, _ = propose(windowed, [request(tokens(31, 1))])
    other = double(context_window=5)
    far = features(30, 1)
    far[:25] = features(25, 8)
    commit(other, far, start=0, end=30)
    assert torch.equal(propose(other, [request(tokens(31, 1))])[0].hidden, block.hidden)
    far[25] = features(1, 9)[0]
    third = double(context_window=5)
    commit(third, far, start=0, end=30)
    assert not torch.equal(propose(third, [request(tokens(31, 1))])[0].hidden, block.hidden)
    long = double(context_window=64)
    commit(long, features(30, 1), start=0, end=30)
    block, logits = propose(long, [request(tokens(31, 1))])
    same(block, logits, 0, 31, 1)


@pytest.mark.parametrize(("draft", "pruned"), [(12, False), (10, False), (6, True)])
def test_draft_vocabularies(draft: int, pruned: bool) -> None:
    """Case 36: padded, equal and pruned; only target ids are ever drafted, and q lives on exactly the known ones."""
    vocab = 10
    config = read_config(json.loads((ROOT / "speculators_dspark_vanilla" / "config.json").read_text()))
    rows = draft if not pruned else vocab
    config = dataclasses.replace(config, vocab_size=rows, draft_vocab_size=draft, mask_token_id=9)
    tensors = random_tensors(config, seed=2, std=0.5)
    tensors["embed_tokens.weight"] = torch.randn(rows, 32)
    tensors["lm_head.weight"] = torch.randn(draft, 32)
    known = set(range(min(draft, vocab)))
    if pruned:
        ids = torch.tensor([1, 2, 4, 5, 7, 9])
        tensors["d2t"] = ids - torch.arange(6)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
        known = set(ids.tolist())
    checkpoint = make_checkpoint(config.validate("test"), tensors, source="toy")
    drafter = make_drafter(checkpoint, stub_target(vocab), dtype=torch.float64)
    assert (drafter.token_map is not None) == pruned
    commit(drafter, features(8), start=0, end=8)
    block, _ = propose(drafter, [request([3] * 9, mode=Mode.REJECTION)], vocab_size=vocab)
    assert set(block.token_ids.flatten().tolist()) <= known
    for k in range(4):
        law = block.q.probs(np.array([0]), np.array([k]))[0]
        assert set(law.nonzero().flatten().tolist()) == known
        assert float(law[block.token_ids[0, k]]) == pytest.approx(float(block.q.token_probs()[0, k]), abs=1e-12)


def test_padded_target_vocabulary_with_a_map_beyond_it() -> None:
    """Draft ids that map to padding of a longer vocabulary are dropped with their head and W2 rows."""
    drafter = make_drafter("speculators_dspark_vanilla", stub_target(90), dtype=torch.float64)
    assert drafter.token_map is not None
    assert int(drafter.token_map.max()) < 90
    assert len(drafter.token_map) == len(drafter.backbone.head) == len(drafter.head.w2) < 66


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_layers": 3}, "it taps layer 3, the target has 3 layers"),
        ({"num_layers": 7}, "trained on a target with 6 layers, this one has 7"),
        ({"vocab_size": 98}, "it knows 97 token ids, the target has 98"),
    ],
)
def test_a_target_that_does_not_fit(change: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        make_drafter(CASE, stub_target(**change))


def test_nothing_to_borrow_and_mask_id_beyond_what_is_borrowed() -> None:
    with pytest.raises(CheckpointError, match=r"no embed_tokens.weight, and target_qwen3_tiny offers none"):
        make_drafter("zlab_dflash", stub_target(input_embeddings=None))
    short = stub_target().input_embeddings
    short.weight = short.weight[:96]
    with pytest.raises(CheckpointError, match="mask_token_id 96 has no row in 96 embeddings"):
        make_drafter("zlab_dflash", stub_target(input_embeddings=short))


def test_float16_overflow_names_the_first_layer() -> None:
    """Case 38: in weights when they are loaded, in activations when they appear; bfloat16 and float32 run."""
    checkpoint = changed()
    big = dict(checkpoint.tensors)
    big["layers.1.mlp.up_proj.weight"] = big["layers.1.mlp.up_proj.weight"] * 1e6
    loud = dataclasses.replace(checkpoint, tensors=big)
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.up_proj.weight overflows in torch.float16"):
        make_drafter(loud, dtype=torch.float16)
    hot = dict(checkpoint.tensors)
    for name in ("gate", "up", "down"):
        hot[f"layers.1.mlp.{name}_proj.weight"] = hot[f"layers.1.mlp.{name}_proj.weight"] * 300
    warm = dataclasses.replace(checkpoint, tensors=hot)
    drafter = make_drafter(warm, dtype=torch.float16)
    commit(drafter, features(8).half(), start=0, end=8)
    with pytest.raises(RowFault, match=r"not finite from layers.1 on, in torch.float16; use bfloat16 or float32"):
        propose(drafter, [request(tokens(9))])
    for dtype in (torch.bfloat16, torch.float32):
        drafter = make_drafter(loud, dtype=dtype)
        commit(drafter, features(8).to(dtype), start=0, end=8)
        assert propose(drafter, [request(tokens(9))])[0].lens.tolist() == [4]


def test_non_finite_weights_are_refused() -> None:
    checkpoint = changed()
    bad = dict(checkpoint.tensors)
    bad["fc.weight"] = bad["fc.weight"].clone()
    bad["fc.weight"][0, 0] = torch.nan
    with pytest.raises(CheckpointError, match=r"fc.weight holds non-finite values"):
        make_drafter(dataclasses.replace(checkpoint, tensors=bad))


@pytest.mark.parametrize("last_tap", ["raw", "normed"])
def test_tap_at_the_last_layer(last_tap: str) -> None:
    """Case 39: z-lab's last tap is Hugging Face's normed state, so the target's final norm is applied to that part."""

    class Base(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = lambda x: x * 0.5 + 1.0

    checkpoint = changed("zlab_dflash", target_layer_ids=(1, 5), last_tap=last_tap)
    model = type("Model", (), {"base_model": Base(), "config": None})()
    drafter = make_drafter(checkpoint, stub_target(model=model), dtype=torch.float64)
    commit(drafter, features(8), start=0, end=8)
    block, _ = propose(drafter, [request(tokens(9))])
    given = features(8)
    if last_tap == "normed":
        given[:, 32:] = given[:, 32:] * 0.5 + 1.0
    plain = make_drafter(changed("zlab_dflash", target_layer_ids=(1, 4)), dtype=torch.float64)
    commit(plain, given, start=0, end=8)
    near(block.hidden, propose(plain, [request(tokens(9))])[0].hidden)
    if last_tap == "normed":
        with pytest.raises(CheckpointError, match="shows no final norm"):
            make_drafter(checkpoint)


def test_config_is_checked() -> None:
    for values, words in (
        ({"dtype": "int8"}, "expected one of float16"),
        ({"candidates": 0}, "candidates"),
        ({"context_window": -1}, "context_window"),
        ({"windwo": 1}, "unknown setting 'windwo'"),
    ):
        with pytest.raises(ConfigError, match=words):
            build_config(DSparkConfig, {"checkpoint": CASE, **values})
    with pytest.raises(ConfigError, match="name a folder or a Hub id"):
        DSparkConfig()
