"""``ngram`` and ``none``: what is proposed, from which history, at what bookkeeping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.config import SamplingParams, build_config
from dspark.drafters import ngram, none
from dspark.drafters.ngram import MATCH_CAP, NgramConfig, NgramDrafter
from dspark.errors import ConfigError
from dspark.protocols import BuildContext, Drafter
from dspark.sampling.draft import RoundSampler
from dspark.sampling.draws import CounterDraws
from dspark.tokens import TokenView
from dspark.types import BatchView, DraftBlock, Mode, RequestView

PARAMS = SamplingParams()
VOCAB = 256


def view(
    ids: list[int], *, slot: int = 0, generation: int = 0, max_draft: int = 100, length: int | None = None
) -> RequestView:
    tokens = TokenView(ids, length)
    return RequestView("r", slot, generation, tokens, 1, 0, max_draft, PARAMS, Mode.GREEDY, 0)


def draft(drafter: NgramDrafter, *requests: RequestView, gamma: int = 4) -> DraftBlock:
    batch = BatchView(requests, gamma)
    return drafter.propose(batch, RoundSampler(batch, CounterDraws(), VOCAB))


def one(ids: list[int], *, gamma: int = 4, **config: int) -> list[int]:
    """The draft after ``ids`` by a fresh drafter, cut at its length."""
    block = draft(NgramDrafter(NgramConfig(**config)), view(ids), gamma=gamma)
    return block.token_ids[0, : int(block.lens[0])].tolist()


def reference(ids: Sequence[int], gamma: int, min_n: int, max_n: int) -> list[int]:
    """The definition: longest suffix first, then the latest earlier place; copy, over the copy where the text ends."""
    for n in range(min(max_n, len(ids) - 1), min_n - 1, -1):
        suffix = list(ids[-n:])
        for end in range(len(ids) - 1, n - 1, -1):
            if list(ids[end - n : end]) == suffix:
                text = list(ids)
                for k in range(gamma):
                    text.append(text[end + k])
                return text[len(ids) :]
    return []


# ---- what is proposed


def test_copies_what_followed_the_suffix() -> None:
    assert one([1, 2, 3, 4, 5, 6, 7, 1, 2, 3], gamma=4) == [4, 5, 6, 7]


def test_the_longest_suffix_wins_over_a_later_shorter_one() -> None:
    ids = [1, 2, 3, 4, 9, 9, 2, 3, 5, 8, 1, 2, 3]
    assert one(ids, gamma=1, min_n=2, max_n=3) == [4]
    assert one(ids, gamma=1, min_n=2, max_n=2) == [5]


def test_ties_go_to_the_most_recent_occurrence() -> None:
    assert one([1, 2, 7, 1, 2, 8, 1, 2], gamma=1) == [8]


def test_min_n_is_a_floor() -> None:
    ids = [1, 2, 3, 9, 3]
    assert one(ids, gamma=1, min_n=1) == [9]
    assert one(ids, gamma=1, min_n=2) == []


def test_the_suffix_does_not_match_itself() -> None:
    assert one([1, 2, 3, 4, 5], min_n=1) == []
    assert one([1], min_n=1) == []


def test_a_copy_that_reaches_the_end_goes_on_in_its_period() -> None:
    assert one([7, 5, 6, 5, 6], gamma=5) == [5, 6, 5, 6, 5]
    assert one([3, 4, 4], gamma=3, min_n=1) == [4, 4, 4]


def test_rows_are_independent_and_padding_is_a_valid_id() -> None:
    drafter = NgramDrafter(NgramConfig())
    match, miss = [1, 2, 3, 1, 2], [5, 6, 7]
    block = draft(drafter, view(miss, slot=3), view(match, slot=1), view(match, slot=2, max_draft=2))
    assert block.lens.tolist() == [0, 4, 2]
    assert block.token_ids.dtype == torch.int64
    assert block.token_ids.shape == (3, 4)
    assert block.token_ids[1].tolist() == [3, 1, 2, 3]
    assert block.token_ids[2, :2].tolist() == [3, 1]
    assert (block.token_ids >= 0).all()


def test_q_is_a_point_mass_at_the_draft() -> None:
    block = draft(NgramDrafter(NgramConfig()), view([1, 2, 3, 1, 2]), gamma=2)
    law = block.q.probs(np.array([0, 0]), np.array([0, 1]))
    assert law.shape == (2, VOCAB)
    assert law.argmax(dim=1).tolist() == [3, 1]
    assert law.sum(dim=1).tolist() == [1.0, 1.0]
    assert block.q.token_probs().tolist() == [[1.0, 1.0]]


def test_nothing_is_drafted_beyond_max_draft_or_gamma() -> None:
    ids = [1, 2, 3, 1, 2]
    drafter = NgramDrafter(NgramConfig(gamma=9))
    assert drafter.default_gamma == 9
    assert draft(drafter, view(ids, max_draft=0)).lens.tolist() == [0]
    assert draft(drafter, view(ids), gamma=0).token_ids.shape == (1, 0)
    assert draft(drafter, view(ids), gamma=12).lens.tolist() == [12]
    assert draft(drafter, gamma=3).token_ids.shape == (0, 3)


@given(
    ids=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    gamma=st.integers(1, 9),
    bounds=st.tuples(st.integers(1, 5), st.integers(1, 5)).map(sorted),
)
def test_equals_the_definition(ids: list[int], gamma: int, bounds: list[int]) -> None:
    assert one(ids, gamma=gamma, min_n=bounds[0], max_n=bounds[1]) == reference(ids, gamma, *bounds)


# ---- incremental index


@settings(max_examples=60)
@given(
    rounds=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=12),
    skip=st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_an_index_that_lags_catches_up(rounds: list[list[int]], skip: list[bool]) -> None:
    """Rounds commit several tokens, and some rounds do not ask this drafter at all."""
    drafter, ids = NgramDrafter(NgramConfig(min_n=1, max_n=3)), [0]
    for committed, skipped in zip(rounds, skip, strict=False):
        ids += committed
        if skipped:
            continue
        block = draft(drafter, view(ids, slot=4, generation=2), gamma=5)
        assert block.token_ids[0, : int(block.lens[0])].tolist() == reference(ids, 5, 1, 3)


def test_each_token_is_indexed_once() -> None:
    """The work of a round is that of its new tokens, whatever the length of the text before it."""

    class Counting(list[int]):
        reads = 0

        def __getitem__(self, index: Any) -> Any:
            got = super().__getitem__(index)
            Counting.reads += len(got) if isinstance(got, list) else 1
            return got

    ids = Counting(range(5000))
    drafter = NgramDrafter(NgramConfig(min_n=2, max_n=4))
    draft(drafter, view(ids))
    first = Counting.reads
    for step in range(10):
        ids.append(step)
        draft(drafter, view(ids))
    assert first >= 5000
    assert Counting.reads - first <= 10 * (2 * MATCH_CAP + 50)


def test_tokens_beyond_the_view_are_not_read() -> None:
    drafter = NgramDrafter(NgramConfig(min_n=1))
    ids = [1, 2, 3, 1, 9, 9]
    assert draft(drafter, view(ids, length=4), gamma=2).token_ids[0].tolist() == [2, 3]


def test_a_new_request_in_a_slot_starts_empty() -> None:
    drafter = NgramDrafter(NgramConfig(min_n=1))
    draft(drafter, view([1, 2, 3, 1], slot=0, generation=0))
    assert draft(drafter, view([4, 5, 1], slot=0, generation=1)).lens.tolist() == [0]
    # the late release of the former request must not touch it
    drafter.release(0, 0)
    assert 0 in drafter._indexes
    drafter.release(0, 1)
    assert not drafter._indexes
    drafter.release(0, 1)
    assert draft(drafter, view([4, 5, 1, 4], slot=0, generation=2)).token_ids[0, :2].tolist() == [5, 1]


def test_requests_do_not_see_each_other() -> None:
    drafter = NgramDrafter(NgramConfig(min_n=1))
    alone = draft(drafter, view([1, 2, 9, 1], slot=0)).token_ids[0].tolist()
    both = draft(drafter, view([1, 5, 5, 1], slot=1), view([1, 2, 9, 1], slot=0)).token_ids
    assert both[1].tolist() == alone
    assert both[0, :2].tolist() == [5, 5]


# ---- features, contract, configuration


def test_match_length_is_measured_beyond_max_n_and_capped() -> None:
    drafter = NgramDrafter(NgramConfig(min_n=1, max_n=3))
    run = list(range(10, 20))
    long = list(range(100, 100 + 2 * MATCH_CAP))
    block = draft(
        drafter,
        view([1, 2, 3], slot=0),
        view([*run, 0, *run], slot=1),
        view([1, 5, 2, 5], slot=2),
        view([*long, 0, *long], slot=3),
    )
    assert block.features["match_length"].tolist() == [0, 10, 1, MATCH_CAP]
    assert block.features["match_length"].dtype == np.int64


def test_it_is_a_drafter_that_needs_no_cache() -> None:
    drafter = ngram.build(build_config(NgramConfig, {"max_n": 3}), BuildContext())
    assert isinstance(drafter, Drafter)
    assert drafter.capabilities == ngram.CAPABILITIES
    assert drafter.capabilities.point_mass
    assert not drafter.capabilities.needs_taps
    assert drafter.tap_layers == ()
    # num_cached is 0: the prompt has not been read yet
    request = view([1, 2, 3, 1, 2])
    assert request.num_cached == 0
    assert draft(drafter, request).lens.tolist() == [4]
    drafter.commit([])


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"min_n": 0}, "min_n"),
        ({"min_n": 3, "max_n": 2}, "exceeds"),
        ({"max_n": MATCH_CAP + 1}, "max_n"),
        ({"gamma": 0}, "gamma"),
        ({"gamma": 2.5}, "gamma"),
        ({"min_n": True}, "min_n"),
        ({"max_m": 2}, "did you mean 'max_n'"),
    ],
)
def test_bad_settings_are_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build_config(NgramConfig, values)


def test_none_never_drafts() -> None:
    drafter = none.build(build_config(none.NoneConfig, {}), BuildContext())
    assert isinstance(drafter, Drafter)
    assert drafter.max_gamma == 0
    assert drafter.default_gamma == 0
    batch = BatchView((view([1, 1, 1]), view([2, 2], slot=1)), 4)
    block = drafter.propose(batch, RoundSampler(batch, CounterDraws(), VOCAB))
    assert block.token_ids.shape == (2, 0)
    assert block.token_ids.dtype == torch.int64
    assert block.lens.tolist() == [0, 0]
    drafter.commit([])
    drafter.release(0, 0)
    with pytest.raises(ConfigError, match="unknown setting"):
        build_config(none.NoneConfig, {"gamma": 1})
