"""``constant`` and ``online``: what they report, what they learn, and what they can't see."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dspark.confidence import constant, online
from dspark.confidence.constant import ConstantConfig, ConstantEstimator
from dspark.confidence.online import OnlineConfig, OnlineEstimator
from dspark.config import SamplingParams, build_config
from dspark.errors import ConfigError
from dspark.protocols import BuildContext, ConfidenceEstimator
from dspark.sampling.draft import RoundSampler
from dspark.sampling.draws import CounterDraws
from dspark.tokens import TokenView
from dspark.types import BatchView, Committed, DraftBlock, Mode, RequestView, RoundRecord

VOCAB = 16
PLAIN: dict[str, Any] = {"request_strength": None, "explore_every": 0}


def view(slot: int = 0, generation: int = 0, mode: Mode = Mode.REJECTION) -> RequestView:
    return RequestView("r", slot, generation, TokenView([1, 2]), 1, 1, 99, SamplingParams(), mode, 0)


def round_of(
    requests: Sequence[RequestView], gamma: int, *, match: Sequence[int] | None = None, token: int = 3
) -> tuple[BatchView, DraftBlock]:
    batch = BatchView(tuple(requests), gamma)
    ids = torch.full((len(batch), gamma), token, dtype=torch.int64)
    features = {} if match is None else {"match_length": np.asarray(match, dtype=np.int64)}
    lens = np.full(len(batch), gamma, dtype=np.int64)
    return batch, RoundSampler(batch, CounterDraws(), VOCAB).point_mass(ids, lens, features=features)


def record(
    batch: BatchView | None, draft: DraftBlock | None, outcomes: Sequence[tuple[int, int, str | None]]
) -> RoundRecord:
    """A finished round: (offered, accepted, finish reason) of each row."""
    requests = () if batch is None else batch.requests
    done = tuple(
        Committed(r, row, (1,), offered, accepted, 2, None, reason)
        for row, (r, (offered, accepted, reason)) in enumerate(zip(requests, outcomes, strict=True))
    )
    return RoundRecord(0, batch, draft, None, None, done, 1, {})


def observe(estimator: OnlineEstimator, offered: int, accepted: int, gamma: int = 4, times: int = 1, **kw: Any) -> None:
    for _ in range(times):
        batch, draft = round_of([view(**kw)], gamma)
        estimator.observe(record(batch, draft, [(offered, accepted, None)]))


def ask(estimator: Any, gamma: int = 4, **kw: Any) -> Any:
    return estimator.estimate(*round_of([view(**kw)], gamma))[0]


# ---- constant


def test_constant_repeats_its_last_value() -> None:
    estimator = ConstantEstimator(ConstantConfig(probs=(0.9, 0.5)))
    probs = estimator.estimate(*round_of([view(0), view(1)], 4))
    assert probs.dtype == np.float64
    assert probs.tolist() == [[0.9, 0.5, 0.5, 0.5]] * 2
    assert estimator.estimate(*round_of([view(0)], 1)).tolist() == [[0.9]]
    assert estimator.estimate(*round_of([], 3)).shape == (0, 3)
    assert estimator.estimate(*round_of([view(0)], 0)).shape == (1, 0)


def test_constant_takes_one_number_and_a_list() -> None:
    assert build_config(ConstantConfig, {"probs": 0.25}).probs == (0.25,)
    assert build_config(ConstantConfig, {"probs": [1, 0]}).probs == (1.0, 0.0)


@pytest.mark.parametrize("probs", [[], 1.5, [0.5, -0.1], [float("nan")], "0.5", True, [None]])
def test_constant_refuses(probs: Any) -> None:
    with pytest.raises(ConfigError, match=r"ConstantConfig\.probs"):
        build_config(ConstantConfig, {"probs": probs})


def test_constant_learns_nothing() -> None:
    estimator = constant.build(ConstantConfig(), BuildContext())
    assert isinstance(estimator, ConfidenceEstimator)
    before = ask(estimator)
    observe(estimator, 4, 0, times=5)  # type: ignore[arg-type]
    estimator.release(0, 0)
    assert ask(estimator).tolist() == before.tolist()
    assert not estimator.capabilities.anticipates
    assert not estimator.capabilities.shared_state


# ---- online: what counts


def test_online_starts_at_its_prior() -> None:
    estimator = online.build(build_config(OnlineConfig, {"prior_mean": 0.6}), BuildContext())
    assert isinstance(estimator, ConfidenceEstimator)
    assert ask(estimator) == pytest.approx([0.6] * 4)
    assert estimator.capabilities.shared_state
    assert not estimator.capabilities.anticipates


def test_positions_up_to_the_first_rejection_count_and_no_others() -> None:
    """Offered 3, accepted 1: position 1 won, position 2 lost, 3 was not decided, 4 was not offered."""
    estimator = OnlineEstimator(OnlineConfig(prior_mean=0.5, prior_strength=1e-6, **PLAIN))
    observe(estimator, 3, 1)
    assert ask(estimator) == pytest.approx([1.0, 0.0, 0.5, 0.5], abs=1e-4)
    observe(estimator, 3, 3)
    assert ask(estimator)[0] == pytest.approx(1.0, abs=1e-4)
    assert ask(estimator)[2] == pytest.approx(1.0, abs=1e-4)
    assert ask(estimator)[3] == pytest.approx(0.5, abs=1e-4)


def test_nothing_offered_teaches_nothing() -> None:
    estimator = OnlineEstimator(OnlineConfig(**PLAIN))
    before = ask(estimator)
    observe(estimator, 0, 0, times=50)
    assert ask(estimator).tolist() == before.tolist()


def test_rates_divide_by_times_offered_when_widths_differ() -> None:
    """Widths 1, 3 and 5, all accepted but the last of each wide one: position 1 is seen three times, 5 once."""
    estimator = OnlineEstimator(OnlineConfig(prior_mean=0.5, prior_strength=1e-6, memory=1e12, **PLAIN))
    for width, accepted in ((1, 1), (3, 2), (5, 4)):
        observe(estimator, width, accepted, gamma=width)
    got = ask(estimator, gamma=6)
    assert got == pytest.approx([1.0, 1.0, 0.5, 1.0, 0.0, 0.5], abs=1e-4)


def test_beta_prior_weighs_as_stated() -> None:
    estimator = OnlineEstimator(OnlineConfig(prior_mean=0.5, prior_strength=4.0, memory=1e12, **PLAIN))
    observe(estimator, 1, 1, gamma=1, times=4)
    mode = (4 + 4 * 0.5) / (4 + 4)
    assert ask(estimator, gamma=1) == pytest.approx([(4 + 4 * mode) / (4 + 4)])


def test_accepted_beyond_the_cut_still_counts() -> None:
    """A stop inside the accepted run ends the request; what the verifier accepted is evidence all the same."""
    estimator = OnlineEstimator(OnlineConfig(prior_strength=1e-6, **PLAIN))
    batch, draft = round_of([view()], 4)
    estimator.observe(record(batch, draft, [(4, 4, "stop")]))
    assert ask(estimator) == pytest.approx([1.0] * 4, abs=1e-4)


def test_plain_steps_prefill_and_failed_rows_teach_nothing() -> None:
    estimator = OnlineEstimator(OnlineConfig(prior_mean=0.5, **PLAIN))
    batch, draft = round_of([view()], 4)
    estimator.observe(record(None, None, []))
    estimator.observe(record(batch, draft, [(4, 0, "error")]))
    prefill = Committed(view(3), -1, (), 0, 0, 5)
    estimator.observe(RoundRecord(0, batch, draft, None, None, (prefill,), 1, {}))
    assert ask(estimator).tolist() == [0.5] * 4


def test_modes_are_kept_apart() -> None:
    estimator = OnlineEstimator(OnlineConfig(prior_mean=0.5, prior_strength=1e-3, **PLAIN))
    observe(estimator, 1, 1, times=9, mode=Mode.GREEDY)
    observe(estimator, 1, 0, times=9, mode=Mode.COUPLED)
    assert ask(estimator, mode=Mode.GREEDY)[0] > 0.99
    assert ask(estimator, mode=Mode.COUPLED)[0] < 0.01
    assert ask(estimator, mode=Mode.REJECTION)[0] == 0.5


def test_old_outcomes_are_forgotten() -> None:
    estimator = OnlineEstimator(OnlineConfig(memory=20.0, prior_strength=0.1, **PLAIN))
    observe(estimator, 1, 1, gamma=1, times=200)
    assert ask(estimator, gamma=1)[0] > 0.98
    observe(estimator, 1, 0, gamma=1, times=20)
    # 20 outcomes later the old ones weigh 1/e of all
    assert ask(estimator, gamma=1)[0] == pytest.approx(np.exp(-1), abs=0.03)


def test_memory_counts_outcomes_not_rounds() -> None:
    estimator = OnlineEstimator(OnlineConfig(memory=20.0, prior_strength=0.1, **PLAIN))
    batch, draft = round_of([view(slot=i) for i in range(10)], 1)
    for accepted, rounds in ((1, 30), (0, 2)):
        for _ in range(rounds):
            estimator.observe(record(batch, draft, [(1, accepted, None)] * 10))
    assert ask(estimator, gamma=1)[0] == pytest.approx(np.exp(-1), abs=0.12)


def test_many_rows_of_one_round_weigh_as_many_rounds_of_one() -> None:
    config = OnlineConfig(memory=1e9, **PLAIN)
    together, apart = OnlineEstimator(config), OnlineEstimator(config)
    outcomes = [(4, 4, None), (4, 1, None), (2, 2, None), (3, 0, None)]
    batch, draft = round_of([view(slot=i) for i in range(4)], 4)
    together.observe(record(batch, draft, outcomes))
    for offered, accepted, _ in outcomes:
        observe(apart, offered, accepted)
    assert ask(together) == pytest.approx(ask(apart), abs=1e-6)


def test_it_recovers_the_rates_of_a_simulated_drafter() -> None:
    rng = np.random.default_rng(0)
    truth = np.array([0.9, 0.7, 0.5])
    estimator = OnlineEstimator(OnlineConfig(memory=1e5, **PLAIN))
    for _ in range(4000):
        wins = rng.random(3) < truth
        observe(estimator, 3, int(np.cumprod(wins).sum()), gamma=3)
    assert ask(estimator, gamma=3) == pytest.approx(truth, abs=0.03)


# ---- online: match lengths and requests


def test_match_lengths_have_buckets() -> None:
    estimator = OnlineEstimator(OnlineConfig(match_edges=(2, 4), prior_strength=1e-3, **PLAIN))
    for length, accepted in ((1, 0), (2, 1), (3, 1), (4, 2), (30, 2)):
        batch, draft = round_of([view()], 2, match=[length])
        estimator.observe(record(batch, draft, [(2, accepted, None)]))
    got = estimator.estimate(*round_of([view(slot=i) for i in range(5)], 2, match=[1, 2, 3, 4, 99]))
    assert got[:, 0] == pytest.approx([0, 1, 1, 1, 1], abs=1e-2)
    assert got[1:, 1] == pytest.approx([0, 0, 1, 1], abs=1e-2)


def test_a_bucket_that_was_never_seen_starts_at_its_modes_average() -> None:
    estimator = OnlineEstimator(OnlineConfig(match_edges=(4,), prior_mean=0.9, prior_strength=1.0, **PLAIN))
    for _ in range(200):
        batch, draft = round_of([view()], 1, match=[2])
        estimator.observe(record(batch, draft, [(1, 0, None)]))
    low, high = estimator.estimate(*round_of([view(0), view(1)], 1, match=[2, 9]))
    assert low[0] <= high[0] < 0.05


def test_match_lengths_may_be_a_tensor() -> None:
    estimator = OnlineEstimator(OnlineConfig(**PLAIN))
    batch, draft = round_of([view()], 2)
    block = DraftBlock(draft.token_ids, draft.lens, draft.q, features={"match_length": torch.tensor([3])})
    estimator.observe(record(batch, block, [(2, 2, None)]))
    same = estimator.estimate(*round_of([view()], 2, match=[3]))
    assert estimator.estimate(batch, block).tolist() == same.tolist()


def test_a_request_departs_from_the_average_and_keeps_its_buckets() -> None:
    config = OnlineConfig(match_edges=(4,), request_strength=2.0, explore_every=0, memory=1e4, request_memory=1e4)
    estimator, rng = OnlineEstimator(config), np.random.default_rng(1)
    rates = {(0, 2): 0.8, (0, 9): 0.9, (1, 2): 0.2, (1, 9): 0.6}
    for _ in range(1500):
        lengths = [int(rng.choice([2, 9])), int(rng.choice([2, 9]))]
        batch, draft = round_of([view(0), view(1)], 1, match=lengths)
        wins = [int(rng.random() < rates[slot, length]) for slot, length in enumerate(lengths)]
        estimator.observe(record(batch, draft, [(1, w, None) for w in wins]))
    got = {
        (slot, length): float(estimator.estimate(*round_of([view(slot)], 1, match=[length]))[0, 0])
        for slot, length in rates
    }
    assert got[0, 2] > got[1, 2] + 0.2
    assert got[0, 9] > got[1, 9] + 0.1
    assert got[0, 9] > got[0, 2] + 0.05
    assert got[1, 9] > got[1, 2] + 0.05
    stranger = float(estimator.estimate(*round_of([view(5)], 1, match=[2]))[0, 0])
    assert got[1, 2] < stranger < got[0, 2]


def test_release_forgets_the_request_and_keeps_the_averages() -> None:
    config = OnlineConfig(request_strength=1.0, explore_every=0)
    estimator = OnlineEstimator(config)
    observe(estimator, 4, 4, times=20, slot=1)
    observe(estimator, 4, 0, times=20, slot=0)
    shared = ask(estimator, slot=7)
    own = ask(estimator, slot=0)
    assert own[0] < shared[0] - 0.1
    estimator.release(0, 3)  # another generation: not this request
    assert ask(estimator, slot=0).tolist() == own.tolist()
    estimator.release(0, 0)
    assert ask(estimator, slot=0).tolist() == shared.tolist()
    estimator.release(99, 0)


def test_the_next_request_of_a_slot_starts_clean() -> None:
    estimator = OnlineEstimator(OnlineConfig(request_strength=1.0, explore_every=0))
    observe(estimator, 4, 0, times=20, slot=0, generation=0)
    observe(estimator, 4, 4, times=20, slot=1, generation=0)
    assert ask(estimator, slot=0, generation=1).tolist() == ask(estimator, slot=9).tolist()


# ---- online: frozen, blind to drafts, exploring


@given(tokens=st.lists(st.integers(0, VOCAB - 1), min_size=2, max_size=2), rounds=st.integers(0, 5))
def test_draft_tokens_are_never_read(tokens: list[int], rounds: int) -> None:
    estimator = OnlineEstimator(OnlineConfig(explore_every=2))
    for i in range(rounds):
        observe(estimator, 4, i % 5)
    a, b = (estimator.estimate(*round_of([view()], 4, match=[3], token=t)) for t in tokens)
    assert a.tolist() == b.tolist()


def test_estimates_are_frozen_within_a_round_and_writes_are_the_observers() -> None:
    estimator = OnlineEstimator(OnlineConfig(explore_every=3))
    observe(estimator, 4, 2, times=4)
    twin = copy.deepcopy(estimator)
    first = ask(estimator)
    for gamma in (2, 7, 4):
        ask(estimator, gamma=gamma, slot=3)
    first[:] = 0.0  # what was handed out is the caller's
    assert ask(estimator).tolist() == ask(twin).tolist()
    observe(estimator, 4, 0)
    assert ask(estimator, slot=8).tolist() != ask(twin, slot=8).tolist()


def test_exploration_follows_the_number_of_rounds_alone() -> None:
    """Two histories with opposite outcomes explore in the same rounds, with the same rows."""
    lucky, unlucky = (OnlineEstimator(OnlineConfig(explore_every=3, request_strength=None)) for _ in range(2))
    explored = []
    for index in range(18):
        batch, draft = round_of([view(slot=i) for i in range(4)], 3)
        rows = [[r for r in range(4) if (e.estimate(batch, draft)[r] == 1.0).all()] for e in (lucky, unlucky)]
        assert rows[0] == rows[1]
        explored += [(index, *rows[0])] if rows[0] else []
        # never all accepted, so that a learned c stays below 1
        lucky.observe(record(batch, draft, [(3, 2, None)] * 4))
        unlucky.observe(record(batch, draft, [(3, 0, None)] * 4))
    assert explored == [(2, 0), (5, 1), (8, 2), (11, 3), (14, 0), (17, 1)]


def test_plain_steps_do_not_use_up_exploration() -> None:
    estimator = OnlineEstimator(OnlineConfig(explore_every=2))
    observe(estimator, 2, 1)
    for _ in range(7):
        estimator.observe(record(None, None, []))
    assert estimator.explorer(1) == 0


@pytest.mark.parametrize(("explore_every", "recovers"), [(8, True), (0, False)])
def test_positions_that_are_no_longer_offered_recover_by_exploring(explore_every: int, recovers: bool) -> None:
    """A drafter that was useless and turned good, under a scheduler that offers only what looks likely."""
    config = OnlineConfig(explore_every=explore_every, memory=60.0, request_strength=None)
    estimator = OnlineEstimator(config)
    observe(estimator, 3, 0, gamma=3, times=200)
    assert ask(estimator, gamma=3)[0] < 0.05
    for _ in range(3000):
        batch, draft = round_of([view()], 3)
        survival = np.cumprod(estimator.estimate(batch, draft)[0])
        offered = int((survival > 0.4).sum())
        estimator.observe(record(batch, draft, [(offered, offered, None)]))
    probs = ask(estimator, gamma=3)
    assert bool((probs > 0.8).all()) is recovers


@given(
    history=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 3)), max_size=25),
    strength=st.sampled_from([None, 0.5, 16.0]),
)
def test_always_a_probability(history: list[tuple[int, int, int]], strength: float | None) -> None:
    estimator = OnlineEstimator(OnlineConfig(request_strength=strength, request_memory=3.0, explore_every=4))
    for offered, accepted, slot in history:
        observe(estimator, offered, min(offered, accepted), slot=slot)
        got = estimator.estimate(*round_of([view(0), view(3)], 6))
        assert got.shape == (2, 6)
        assert ((got >= 0) & (got <= 1)).all()


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"prior_mean": 1.2}, "prior_mean"),
        ({"prior_strength": 0}, "prior_strength"),
        ({"memory": 0.5}, "memory"),
        ({"request_strength": -1}, "request_strength"),
        ({"request_memory": float("nan")}, "request_memory"),
        ({"explore_every": -1}, "explore_every"),
        ({"explore_every": 2.0}, "explore_every"),
        ({"match_edges": [3, 3]}, "match_edges"),
        ({"match_edges": [1.5]}, "match_edges"),
        ({"explore": 3}, "did you mean 'explore_every'"),
    ],
)
def test_online_refuses(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build_config(OnlineConfig, values)
