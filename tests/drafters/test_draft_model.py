"""The draft-model drafter: its slots, its tokenizer, and real (toy) transformers models in the engine."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dspark.config import EngineConfig, SamplingParams, build_config
from dspark.drafters import draft_model
from dspark.drafters.draft_model import DraftModelConfig, ModelDraft, build
from dspark.engine.build import build_engine
from dspark.errors import ConfigError, RowFault
from dspark.protocols import BuildContext, Drafter
from dspark.sampling.draft import RoundSampler
from dspark.sampling.draws import CounterDraws
from dspark.types import BatchView, DraftBlock, RequestView, TargetOutput, VerifyLayout
from tests.drafters.golden import Recorder as LogitsRecorder
from tests.drafters.golden import near, request
from tests.drafters.stepwise import toy_model
from tests.drafters.toys import FeatureTarget
from tests.targets.toys import toy_model as transformers_toy

torch.set_num_threads(1)
V, GAMMA = 5, 3


def drafter_of(model: Any = None, *, slots: int = 4, max_len: int = 64, vocab: int = V) -> ModelDraft:
    shown = SimpleNamespace(name="target", max_len=max_len, vocab_size=vocab)
    return ModelDraft(model if model is not None else toy_model(V), shown, slots=slots, gamma=GAMMA)


def propose(
    drafter: ModelDraft, rows: Sequence[RequestView], gamma: int = GAMMA, vocab: int = V
) -> tuple[DraftBlock, torch.Tensor]:
    batch = BatchView(tuple(rows), gamma)
    sampler = LogitsRecorder(RoundSampler(batch, CounterDraws(), vocab), [])
    block = drafter.propose(batch, sampler)
    return block, torch.stack(sampler.logits, dim=1) if sampler.logits else torch.empty(0)


def text(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, V, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def same(block: DraftBlock, logits: torch.Tensor, row: int, ids: Sequence[int]) -> None:
    """The row drafts what a fresh drafter drafts for its text."""
    one, expected = propose(drafter_of(), [request(ids)])
    near(logits[row], expected[0])
    assert torch.equal(block.token_ids[row], one.token_ids[0])


def test_it_is_a_drafter() -> None:
    drafter = drafter_of()
    assert isinstance(drafter, Drafter)
    assert (drafter.max_gamma, drafter.default_gamma, drafter.tap_layers) == (None, GAMMA, ())
    assert not drafter.capabilities.needs_taps
    assert not drafter.capabilities.point_mass


def test_drafts_are_the_models_own_continuation() -> None:
    model = toy_model(V)
    block, logits = propose(drafter_of(model), [request(text(9))])
    ids = text(9)
    for k in range(GAMMA):
        near(logits[0, k], model.next_logits(ids))
        ids.append(int(model.next_logits(ids).argmax()))
    assert block.token_ids[0].tolist() == ids[9:]


def test_only_what_is_new_is_read() -> None:
    """After 0, 2 and all drafts accepted: the anchor, or the last draft and the anchor; rollback copies nothing."""
    model = toy_model(V)
    drafter, ids = drafter_of(model), text(7)
    read = []
    for accepted in (0, 2, GAMMA, 1):
        model.forwards.clear()
        block, logits = propose(drafter, [request(ids)])
        same(block, logits, 0, ids)
        read.append([lens for (lens,) in model.forwards])
        drafts = block.token_ids[0].tolist()
        wrong = (drafts[min(accepted, GAMMA - 1)] + 1) % V  # the target's own token: never what was drafted there
        ids = [*ids, *drafts[:accepted], wrong]
    assert read == [[7, 1, 1], [1, 1, 1], [1, 1, 1], [2, 1, 1]]


def test_rows_that_accept_differently_in_scattered_slots() -> None:
    """Case 31: packed together, each drafts as if alone, in every round."""
    drafter = drafter_of(slots=6)
    texts = {5: text(6, 1), 0: text(1, 2), 3: text(20, 3)}
    for _ in range(4):
        block, logits = propose(drafter, [request(ids, slot=slot) for slot, ids in texts.items()])
        for row, (slot, accepted) in enumerate(zip(texts, (0, 1, GAMMA), strict=True)):
            same(block, logits, row, texts[slot])
            drafts = block.token_ids[row].tolist()
            texts[slot] = [*texts[slot], *drafts[:accepted], (drafts[min(accepted, GAMMA - 1)] + 1) % V]


def test_rounds_without_drafts_are_caught_up() -> None:
    """After the first draft was rejected the text went on for a while, and not as it was drafted."""
    drafter, ids = drafter_of(), text(5, 4)
    block, _ = propose(drafter, [request(ids)])
    ids += [(int(token) + 1) % V for token in block.token_ids[0]] + text(20, 5)
    block, logits = propose(drafter, [request(ids)])
    same(block, logits, 0, ids)


def test_long_texts_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_model, "CHUNK", 8)
    model = toy_model(V)
    drafter = drafter_of(model)
    block, logits = propose(drafter, [request(text(30, 5)), request(text(3, 6), slot=1)])
    assert model.forwards == [[8], [8], [8], [6, 3], [1, 1], [1, 1]]
    same(block, logits, 0, text(30, 5))
    same(block, logits, 1, text(3, 6))


def test_a_reused_slot_starts_empty() -> None:
    """By generation, whether the old request was released or not; an older generation's release changes nothing."""
    for release in (True, False):
        drafter = drafter_of()
        propose(drafter, [request(text(20, 1))])
        if release:
            drafter.release(0, 1)
        block, logits = propose(drafter, [request([*text(20, 1)[:6], 0, 1], generation=2)])
        same(block, logits, 0, [*text(20, 1)[:6], 0, 1])
        model = drafter.model
        drafter.release(0, 1)
        model.forwards.clear()
        propose(drafter, [request([*text(20, 1)[:6], 0, 1], generation=2)])
        assert model.forwards[0] == [1], "it is still known"


def test_rows_that_the_model_cannot_read_draft_nothing() -> None:
    """Longer than its slots, or with an id that it has not; the neighbour is not touched."""
    drafter = drafter_of(max_len=12, vocab=V + 1)
    rows = [request(text(11), slot=0), request(text(9, 2), slot=1), request([1, V, 2], slot=2)]
    block, logits = propose(drafter, rows, vocab=V + 1)
    assert block.lens.tolist() == [0, GAMMA, 0]
    assert drafter.rows_left_out == 2
    same(block, logits, 1, text(9, 2))
    law = block.q.probs(np.array([1]), np.array([0]))
    assert law.shape == (1, V + 1)


def test_no_more_steps_than_can_be_verified() -> None:
    import dataclasses

    model = toy_model(V)
    drafter = drafter_of(model)
    rows = [dataclasses.replace(request(text(6, s), slot=s), max_draft=most) for s, most in enumerate((1, 2))]
    block, _ = propose(drafter, rows)
    assert block.lens.tolist() == [1, 2]
    assert model.forwards == [[6, 6], [1, 1]]


def test_a_fault_names_its_rows_and_leaves_the_slots_right() -> None:
    class Bad(FeatureTarget):
        broken = True

        def forward(self, layout: VerifyLayout, taps: Any = ()) -> TargetOutput:
            out = super().forward(layout, taps)
            if self.broken and len(self.forwards) == 2:
                out.logits[1] = torch.nan
            return out

    model = toy_model(V)
    drafter = drafter_of(Bad(model.table, mix=model.mix))
    rows = [request(text(6, s), slot=s) for s in range(3)]
    with pytest.raises(RowFault) as err:
        propose(drafter, rows)
    assert err.value.rows == (1,)
    block, logits = propose(drafter, [rows[0], rows[2]])
    same(block, logits, 0, text(6, 0))
    same(block, logits, 1, text(6, 2))


# tokenizers -----------------------------------------------------------------------------------------------------------


def named(name: str, vocab: int, tokens: dict[str, int] | None = None) -> Any:
    tokenizer = None if tokens is None else SimpleNamespace(get_vocab=lambda: tokens)
    made = toy_model(vocab)
    made.name, made.tokenizer = name, tokenizer
    return made


@pytest.mark.parametrize(
    ("model", "target", "words"),
    [
        (
            named("small", 6, {"a": 0, "b": 1}),
            named("large", 6, {"a": 0, "c": 1}),
            r"'small' can't draft for 'large': their tokenizers differ in 2 tokens; 'b' is id 1 of the one and None of",
        ),
        (named("small", 6, {"a": 1, "b": 0}), named("large", 6, {"a": 0, "b": 1}), "differ in 2 tokens; 'b' is id 0"),
        (named("small", 6), named("large", 7), "vocabularies have 6 and 7 ids, and there are no two tokenizers"),
        (named("small", 6, {"a": 0}), named("large", 7), "no two tokenizers to compare"),
        (named("small", 6, {"a": 0}), named("large", 7, {"a": 0}), None),
        (named("small", 6), named("large", 6), None),
    ],
    ids=["another token", "another order", "other sizes", "one tokenizer", "padding", "equal sizes"],
)
def test_another_tokenizer_is_refused_by_name(model: Any, target: Any, words: str | None) -> None:
    config = DraftModelConfig(model=model)
    if words is None:
        assert build(config, BuildContext(target=target)).model is model
        return
    with pytest.raises(ConfigError, match=words):
        build(config, BuildContext(target=target))


def test_config_is_checked() -> None:
    for values, words in (
        ({}, "name a hub id or a folder"),
        ({"model": "x", "gamma": 0}, "gamma"),
        ({"model": "x", "modle": 1}, "unknown setting 'modle'"),
    ):
        with pytest.raises(ConfigError, match=words):
            build_config(DraftModelConfig, values)


# transformers models --------------------------------------------------------------------------------------------------

PROMPTS = [[5, 17, 3, 3, 40, 21], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]


def decode(target: Any, drafter: str, params: SamplingParams, **drafter_config: Any) -> tuple[list[Any], Any]:
    config = EngineConfig(
        drafter=drafter,
        drafter_config=drafter_config,
        scheduler="fixed",
        max_slots=3,
        max_len=64,
        target_config={"model": target, "probe": False},
    )
    engine = build_engine(config)
    names = [engine.submit(p, params) for p in PROMPTS]
    out: dict[str, list[int]] = {name: [] for name in names}
    for chunk in engine.run():
        assert chunk.error is None
        out[chunk.request_id] += chunk.ids
    return [out[name] for name in names], engine


@pytest.fixture(scope="module")
def target() -> Any:
    return transformers_toy("llama", dtype=torch.float64)


@pytest.mark.parametrize("kind", ["qwen3", "mistral"])
def test_the_output_is_plain_decodings(target: Any, kind: str) -> None:
    """A smaller model of another family, with a window or without: greedy and seeded tokens are the target's."""
    small = transformers_toy(kind, dtype=torch.float64, seed=3)
    for params in (SamplingParams(temperature=0.0, max_tokens=16), SamplingParams(seed=5, max_tokens=16)):
        plain, _ = decode(target, "none", params)
        tokens, engine = decode(target, "draft-model", params, model=small)
        assert tokens == plain
        assert engine.parts.name("drafter") == "dspark/draft-model"
        assert engine.parts.estimator.__class__.__name__ == "OnlineEstimator"
        assert sum(engine.stats.acceptance.offered) > 0
        assert engine.parts.drafter.rows_left_out == 0


def test_an_equal_model_is_always_accepted(target: Any) -> None:
    tokens, engine = decode(target, "draft-model", SamplingParams(temperature=0.0, max_tokens=16), model=target)
    assert engine.stats.acceptance.accepted == engine.stats.acceptance.offered
    assert tokens == decode(target, "none", SamplingParams(temperature=0.0, max_tokens=16))[0]
    report = engine.parts.drafter.probe(engine.parts.target)
    assert (report.first_hits, report.warnings) == (1.0, ())


def test_a_loaded_folder_is_drafted_with(target: Any, tmp_path: Any) -> None:
    """By folder, in the target's dtype, with as long slots as its own limit allows."""
    small = transformers_toy("llama", dtype=torch.float32, seed=3)
    small.config.max_position_embeddings = 40
    small.save_pretrained(tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=50)
    tokens, engine = decode(target, "draft-model", params, model=str(tmp_path))
    drafter = engine.parts.drafter
    assert tokens == decode(target, "none", params)[0]
    assert drafter.model.dtype == torch.float64
    assert drafter.model.max_len == 40
    assert drafter.rows_left_out > 0, "what grew beyond 40 tokens went on without drafts"


def test_untrained_models_are_named(target: Any) -> None:
    other = copy.deepcopy(target)
    with torch.no_grad():
        other.lm_head.weight.neg_()
    with pytest.warns(UserWarning, match="predicts this target no better than chance"):
        decode(target, "draft-model", SamplingParams(temperature=0.0, max_tokens=2), model=other)


def test_a_differing_vocabulary_is_refused_when_the_engine_is_built(target: Any) -> None:
    small = transformers_toy("llama", dtype=torch.float64, vocab_size=90)
    with pytest.raises(ConfigError, match=r"draft-model: .* can't draft for .*: their vocabularies have 90 and"):
        decode(target, "draft-model", SamplingParams(max_tokens=2), model=small)
