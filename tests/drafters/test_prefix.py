"""Drafters' state follows a prefix that is not read again: they draft as if they had seen all of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dspark.config import EngineConfig, SamplingParams
from dspark.drafters.draft_model import ModelDraft
from dspark.engine.build import build_engine
from dspark.engine.engine import Engine
from dspark.protocols import PrefixDrafter
from dspark.sampling.draws import CounterDraws
from dspark.testing import law, target_law, total_variation
from dspark.testing.suites.target import layout
from dspark.testing.toys import random_table
from dspark.testing.watch import DraftSpy
from tests.drafters import test_dspark_state as block
from tests.drafters import test_eagle3_state as eagle
from tests.drafters.eagle import commit_text, toy_eagle
from tests.drafters.golden import ROOT, commit, near, propose, request
from tests.drafters.stepwise import toy_model
from tests.drafters.toys import FeatureTarget, toy_drafter
from tests.exactness.harness import SAMPLING, decode, engine, make_estimator, make_parts, make_scheduler

torch.set_num_threads(1)
V, GAMMA = 6, 3
KINDS = ("markov", "rnn", "none", "windowed", "deepspec", "speculators", "model")


def make_target(vocab: int = V) -> FeatureTarget:
    return FeatureTarget(random_table(vocab + 1, vocab, vocab, seed=3, scale=1.0), mix=0.5, max_len=64)


def make_drafter(kind: str, target: Any, vocab: int = V, gamma: int = GAMMA) -> Any:
    if kind == "model":
        return ModelDraft(toy_model(vocab, max_len=64), target, slots=4, gamma=gamma)
    if kind in ("deepspec", "speculators"):
        return toy_eagle(kind, target, vocab=vocab, gamma=gamma)
    settings = {"context_window": 4} if kind == "windowed" else {}
    head = "markov" if kind == "windowed" else kind
    return toy_drafter(head, target, vocab=vocab, gamma=gamma, **settings)


def make(kind: str, *, draws: Any = None, vocab: int = V, gamma: int = GAMMA, slots: int = 3, **config: Any) -> Engine:
    target = make_target(vocab)
    parts = make_parts(
        draws if draws is not None else CounterDraws(),
        drafter=DraftSpy(make_drafter(kind, target, vocab, gamma)),
        estimator=make_estimator("constant", vocab, gamma),
        scheduler=make_scheduler("fixed", gamma=gamma),
        target=target,
        gamma=gamma,
    )
    return engine(parts, slots=slots, **{"prefix_min_tokens": 3, "max_len": 64, **config})


def texts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, V, size=length).tolist() for _ in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_requests_that_read_everything(kind: str) -> None:
    """Turns of two conversations in turn, a text that parts from one, and several that begin alike at once."""
    params = SamplingParams(max_tokens=9)
    kept, fresh = make(kind), make(kind, prefix_cache=False)
    assert isinstance(kept.parts.drafter, PrefixDrafter)
    one, two = texts(2, 7)
    tails = texts(4, 2, seed=1)
    for turn in range(3):
        requests = [[(one, params)], [(two, params)], [([*one[:6], *tails[turn]], params)]]
        for batch in requests:
            assert decode(kept, batch) == decode(fresh, batch)
        one, two = ([*text, *decode(fresh, [(text, params)])[0], 1] for text in (one, two))
    together = [([*one[:8], *tail], params) for tail in tails]
    assert decode(kept, together) == decode(fresh, together)
    assert kept.stats.prefix_hits >= 9
    seen, wanted = kept.parts.drafter.drafts(), fresh.parts.drafter.drafts()
    assert seen.keys() <= wanted.keys()
    assert {h: seen[h] for h in seen} == {h: wanted[h] for h in seen}
    assert sum(map(len, seen.values())) > 30
    inner = kept.parts.drafter.inner
    assert getattr(inner, "rows_without_context", 0) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_rejection_draws_the_same_whether_a_prompt_was_read_before_or_not(kind: str) -> None:
    """One request key: the rounds are the same, so the tokens are."""
    params = replace(SAMPLING["T=1"], max_tokens=12, request_key=5)
    (prompt,) = texts(1, 8, seed=2)
    made = make(kind)
    first = decode(made, [(prompt, params)])
    rounds = made.stats.acceptance.rounds
    assert decode(made, [(prompt, params)]) == first
    assert made.stats.acceptance.rounds == 2 * rounds
    assert made.stats.cached_tokens >= (2 if kind == "windowed" else len(prompt) - 3)


@pytest.mark.parametrize("kind", ["markov", "deepspec", "model"])
@pytest.mark.parametrize("slots", [1, 2])
def test_the_output_law_is_the_targets(kind: str, slots: int) -> None:
    """By enumeration: a request in whose slot, or beside which, the beginning of its prompt has been read."""
    prompt, params = (0, 1, 2, 0, 1), replace(SAMPLING["T=1"], max_tokens=3, request_key=1)

    def program(draws: Any) -> tuple[int, ...]:
        made = make(kind, draws=draws, vocab=3, gamma=2, slots=slots, prefix_min_tokens=1)
        other = (*prompt[:4], 2)
        made.submit(other, SamplingParams(max_tokens=4))
        while (slots == 1 and made.has_work) or made.stats.steps < 2:
            made.step()
        name = made.submit(prompt, params)
        out = [i for chunk in made.run() if chunk.request_id == name for i in chunk.ids]
        assert made.stats.cached_tokens >= 2
        return tuple(out)

    wanted = target_law(make_target(3).next_logits, prompt, params)
    assert total_variation(law(program), wanted) <= 1e-9


@pytest.mark.parametrize("case", ["deepspec_dspark_rnn", "deepspec_eagle3"])
def test_golden_drafters_on_the_real_target(case: str) -> None:
    from dspark.targets.hf import HFTarget

    target = HFTarget.from_pretrained(str(ROOT / "target_qwen3_tiny"), dtype="float32", device="cpu")
    prompt = [58, 83, 35, 87, 12, 64, 56, 33, 6, 41, 15, 14, 84, 37, 41, 89, 14, 3, 3, 1]
    outs, drafts, executed = [], [], []
    for kept in (True, False):
        settings = {"max_slots": 3, "max_len": 96, "scheduler": "fixed", "prefix_cache": kept}
        made = build_engine(EngineConfig(drafter=str(ROOT / case), **settings), target=target)
        spy = made.parts.drafter = DraftSpy(made.parts.drafter)
        ids, got = list(prompt), []
        for turn in range(3):
            (out,) = decode(made, [(ids, SamplingParams(max_tokens=12, ignore_eos=True))])
            got.append(out)
            ids = [*ids, *out, 7 + turn, 9]
        got += decode(made, [([*prompt, i, 5], SamplingParams(max_tokens=6, ignore_eos=True)) for i in range(3)])
        outs.append(got)
        drafts.append(spy.drafts())
        executed.append(made.stats.executed_tokens)
        assert made.stats.prefix_hits == (5 if kept else 0)
        assert getattr(spy.inner, "rows_without_context", 0) == 0
    assert outs[0] == outs[1]
    assert drafts[0] == drafts[1]
    assert executed[1] - executed[0] > 100


# states, in float64 ---------------------------------------------------------------------------------------------------


def mixed(make_features: Callable[..., torch.Tensor], cut: int, length: int, **kwargs: Any) -> torch.Tensor:
    """Features that are one text's up to ``cut`` and another's from there on."""
    first, second = make_features(length, 0, **kwargs), make_features(length, 1, **kwargs)
    return torch.cat([first[:cut], second[cut:]])


@pytest.mark.parametrize("slot", [0, 3], ids=["in place", "by copy"])
@pytest.mark.parametrize("waiting", [False, True])
def test_a_block_drafter_goes_on_from_another_context(slot: int, waiting: bool) -> None:
    """Of which part may be projected, and part wait; the rest of the other is not seen."""
    drafter, before, cut, length = block.double(), block.features(24, 0), 14, 20
    commit(drafter, before[:9], start=0, end=9)
    propose(drafter, [request(block.tokens(10))])
    commit(drafter, before[9:18], start=9, end=18)
    if not waiting:
        propose(drafter, [request(block.tokens(19))])
    assert drafter.adopt(slot, 2, 0, 1, cut) == cut
    drafter.release(slot, 1)  # of who was in the slot before
    features = mixed(block.features, cut, length)
    commit(drafter, features[cut : length - 1], start=cut, end=length - 1, slot=slot, generation=2)
    text = block.tokens(length)
    got, logits = propose(drafter, [request(text, slot=slot, generation=2)])
    alone = block.double()
    commit(alone, features[: length - 1], start=0, end=length - 1)
    one, expected = propose(alone, [request(text)])
    near(got.hidden[0], one.hidden[0])
    near(logits[0], expected[0])
    if slot:  # the other goes on as if nothing had been
        commit(drafter, before[18:21], start=18, end=21)
        got, logits = propose(drafter, [request(block.tokens(22))])
        whole = block.double()
        commit(whole, before[:21], start=0, end=21)
        near(logits[0], propose(whole, [request(block.tokens(22))])[1][0])


def test_a_copied_context_leaves_nothing_of_the_one_before() -> None:
    drafter = block.double()
    commit(drafter, block.features(12, 0), start=0, end=12)
    propose(drafter, [request(block.tokens(13))])
    commit(drafter, block.features(30, 1), start=0, end=30, slot=1)
    propose(drafter, [request(block.tokens(31), slot=1)])
    drafter.adopt(1, 2, 0, 1, 8)
    for tensor in (*drafter.backbone.cache.keys, *drafter.backbone.cache.values):
        assert torch.equal(tensor[1, :, :8], tensor[0, :, :8])
        assert not tensor[1, :, 8:].any()


def test_what_left_the_window_unseen_is_not_passed_off_as_known() -> None:
    drafter = block.double(context_window=5)
    commit(drafter, block.features(30, 0), start=0, end=30)
    propose(drafter, [request(block.tokens(31))])  # 0..24 were never projected
    for slot, (length, kept) in enumerate([(30, 30), (27, 22), (4, 0)], start=1):
        assert drafter.adopt(slot, 1, 0, 1, length) == kept
        features = mixed(block.features, length, length + 3)
        commit(drafter, features[kept:], start=kept, end=length + 3, slot=slot)
        alone = block.double(context_window=5)
        commit(alone, features, start=0, end=length + 3)
        text = block.tokens(length + 4)
        got, expected = (propose(d, [request(text, slot=s)])[1][0] for d, s in ((drafter, slot), (alone, 0)))
        near(got, expected)


def test_nothing_is_known_of_who_is_not_there() -> None:
    drafter = block.double()
    assert drafter.adopt(1, 1, 0, 1, 4) == 0
    commit(drafter, block.features(6, 0), start=0, end=6)
    assert drafter.adopt(1, 1, 0, 2, 4) == 0, "another generation"
    commit(drafter, block.features(6, 0), start=0, end=6, slot=1)
    got = propose(drafter, [request(block.tokens(7), slot=1)])[1][0]
    near(got, block.solo(7, 0)[1])


@pytest.mark.parametrize("case", eagle.CASES)
@pytest.mark.parametrize("slot", [0, 2], ids=["in place", "by copy"])
def test_eagle_reads_the_last_feature_again_since_it_holds_the_next_token(case: str, slot: int) -> None:
    drafter, cut, length = eagle.double(case), 12, 18
    before, first = eagle.features(case, 30, 0), eagle.tokens(30, 0)
    commit_text(drafter, first[:17], before[:16], start=0)
    propose(drafter, [request(first[:17])], eagle.GAMMA)
    assert drafter.adopt(slot, 2, 0, 1, cut) == cut - 1
    text = [*first[:cut], *eagle.tokens(30, 1)[cut:length]]
    features = mixed(lambda n, seed: eagle.features(case, n, seed), cut, length)
    commit_text(drafter, text, features[cut - 1 : length - 1], start=cut - 1, slot=slot, generation=2)
    got, logits = propose(drafter, [request(text, slot=slot, generation=2)], eagle.GAMMA)
    alone = eagle.double(case)
    commit_text(alone, text, features[: length - 1], start=0)
    one, expected = propose(alone, [request(text)], eagle.GAMMA)
    near(logits[0], expected[0])
    near(got.hidden[0], one.hidden[0])


def test_a_draft_model_does_not_read_a_prefix_again_unless_its_slots_were_used() -> None:
    made = make("model", slots=2)
    model = made.parts.drafter.inner.model
    (prompt,) = texts(1, 12)

    def read(prompt: Sequence[int]) -> int:
        first = len(model.executed)
        decode(made, [(prompt, SamplingParams(max_tokens=1 + GAMMA))])
        return sum(model.executed[first:])

    whole = read(prompt)
    again = read([*prompt[:9], 1, 1, 1])
    assert again <= whole - 8
    with torch.inference_mode():
        model.forward(layout(model, [(0, 0, prompt)]))  # somebody else's
    assert read([*prompt[:9], 2, 2, 2]) >= whole - 3
