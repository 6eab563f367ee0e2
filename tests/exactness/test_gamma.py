"""gamma's choice, guard, probes and early exit in the loop: the laws stay the target's, and nothing anticipates.

The policies here are made to decide otherwise from round to round and from row to row, by all the history there is:
what was drafted and thrown away included.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from dspark.capabilities import GammaCapabilities
from dspark.config import SamplingParams
from dspark.sampling.draws import CounterDraws
from dspark.scheduling.gamma_adaptive import AdaptiveConfig, AdaptiveGamma
from dspark.testing import TableDrafter, TableEstimator, TableNoise, TableTarget, law, target_law, total_variation
from dspark.testing.toys import random_table
from dspark.types import GammaChoice, GammaInput, RoundRecord

from .harness import (
    GAMMA,
    PROMPT,
    Case,
    build,
    cost_table,
    decode,
    engine,
    make_drafter,
    make_estimator,
    make_parts,
    make_scheduler,
    seed_history,
    sps_table,
    target,
)
from .test_coupled import RATES as COUPLED_RATES
from .test_coupled import SLOTS, noise, params_of
from .test_coupled import wanted as coupled_wanted
from .test_joint import CONFIDENCE, RATES, requests, two_target
from .test_joint import wanted as joint_wanted
from .test_non_anticipation import Given


class Restless(AdaptiveGamma):
    """``adaptive`` with guard and early exit so eager that a few rounds meet all of their answers.

    One outcome turns the averages over, every other round with rows that sit out lets one draft, and the difficulty is
    believed from the first outcome on.
    """

    def __init__(self, gamma: int = GAMMA, *, prunes: bool = True, threshold: float = 0.0) -> None:
        settings = AdaptiveConfig(
            threshold=threshold, hysteresis=0.0, switch=0.0, explore_every=2, probe_share=1.0, probe_gamma=gamma,
            prior_strength=0.5, memory=1.5, alarm=1.0,
        )  # fmt: skip
        super().__init__(settings, gamma, prunes=prunes)
        self.answers: list[tuple[str, tuple[int, ...]]] = []

    def choose(self, batch: GammaInput, cost: Any | None) -> GammaChoice:
        self.difficulty.outcomes += 1000 if self.difficulty.outcomes else 0
        self.difficulty._base += 1e3 if self.difficulty.outcomes else 0.0
        choice = super().choose(batch, cost)
        self.answers.append((choice.reason, tuple(choice.gammas.tolist())))
        return choice


class ByHistory:
    """Lengths by a hash of everything that ever happened, tokens that were drafted and rejected included."""

    def __init__(self, gamma: int = GAMMA) -> None:
        self.capabilities = GammaCapabilities(needs_entropy=True)
        self.gamma, self.state = gamma, 1
        self.seen: set[tuple[int, ...]] = set()

    def choose(self, batch: GammaInput, cost: Any | None) -> GammaChoice:
        rows = np.arange(len(batch.requests))
        gammas = ((self.state >> (2 * rows)) % (self.gamma + 1)).astype(np.int64)
        self.seen.add(tuple(gammas.tolist()))
        return GammaChoice(gammas, "hash", verify_all=self.state % 3 == 0)

    def observe(self, record: RoundRecord) -> None:
        if record.draft is not None:
            for token in record.draft.token_ids.flatten().tolist():
                self.state = (self.state * 31 + int(token) + 7) % 65_521
        for done in record.committed:
            entropy = 0 if done.entropy != done.entropy else int(1e6 * done.entropy)
            self.state = (self.state * 31 + sum(done.new_ids) + entropy + 3) % 65_521

    def release(self, slot: int, generation: int) -> None:
        pass


POLICIES = {
    "restless": lambda prunes: Restless(prunes=prunes),
    "guarded": lambda prunes: Restless(prunes=prunes, threshold=0.3),
    "history": lambda prunes: ByHistory(),
}
SCHEDULERS = ("causal", "lookahead", "lagged", "fixed", "threshold")


@cache
def wanted(sampling: str) -> dict[tuple[int, ...], float]:
    return target_law(target().next_logits, PROMPT, params(sampling))


def params(sampling: str) -> SamplingParams:
    return dataclasses.replace(Case("table", "token", "off", sampling).params, max_tokens=TOKENS)


TOKENS = 4


def program(policy: str, drafter: str, scheduler: str, sampling: str, cost: str, seen: set[Any]) -> Any:
    def run(draws: Any) -> tuple[int, ...]:
        prunes = scheduler in ("causal", "lookahead", "lagged")
        made = POLICIES[policy](prunes)
        parts = make_parts(
            draws,
            drafter=make_drafter(drafter),
            estimator=make_estimator("token"),
            scheduler=make_scheduler(scheduler, cost),
            target=target(),
            cost=cost_table(cost),
            gamma_policy=made,
        )
        out = decode(engine(parts), [(PROMPT, params(sampling))])[0]
        seen.update(made.answers if isinstance(made, Restless) else made.seen)
        return out

    return run


@pytest.mark.parametrize(
    ("policy", "scheduler"),
    [
        pytest.param(policy, scheduler, marks=() if (i + j) % 3 == 0 else pytest.mark.slow)
        for i, policy in enumerate(POLICIES)
        for j, scheduler in enumerate(SCHEDULERS)
    ],
)
def test_the_output_law_is_the_targets_whatever_gamma_is_chosen(policy: str, scheduler: str) -> None:
    seen: set[Any] = set()
    found = law(program(policy, "table", scheduler, "T=1", "rising", seen))
    assert total_variation(found, wanted("T=1")) <= 1e-9
    assert len(seen) >= 2, "the policy was to decide this way and that"


@pytest.mark.parametrize(
    ("drafter", "sampling", "cost"),
    [("bad", "top_p", "dip"), ("ngram", "penalties", "rising"), ("table", "min_p", "dip"), ("bad", "T=.7", "rising")],
)
@pytest.mark.parametrize("policy", ["restless", "history"])
def test_other_drafters_samplings_and_costs(policy: str, drafter: str, sampling: str, cost: str) -> None:
    found = law(program(policy, drafter, "causal", sampling, cost, set()))
    assert total_variation(found, wanted(sampling)) <= 1e-9


def joint(make_policy: Any, *, tokens: int = 3, rounds: int = 2) -> tuple[dict[Any, float], set[Any]]:
    """Law of the tokens of two requests: so many rounds of the engine, the rest from the target's table."""
    seen: set[Any] = set()

    def run(draws: Any) -> tuple[tuple[int, ...], ...]:
        made = make_policy()
        parts = make_parts(
            draws,
            drafter=TableDrafter(random_table(2, 2, seed=12, scale=0.7)),
            estimator=TableEstimator(CONFIDENCE),
            scheduler=seed_history(build("scheduling", "causal", vocab_size=2), sps_table(RATES), rows=2, gamma=2),
            target=two_target(),
            cost=sps_table(RATES),
            gamma_policy=made,
        )
        started = engine(parts, slots=2)
        names = [started.submit(prompt, p) for prompt, p in requests(tokens)]
        ids: dict[str, tuple[int, ...]] = dict.fromkeys(names, ())
        for _ in range(rounds):
            for chunk in started.step():
                ids[chunk.request_id] += chunk.ids
        seen.update(made.seen if isinstance(made, ByHistory) else made.answers)
        return tuple(ids[name] for name in names)

    total: dict[Any, float] = {}
    for starts, mass in law(run).items():
        tails = [
            target_law(two_target().next_logits, prompt, dataclasses.replace(p, max_tokens=tokens), output=start)
            if len(start) < tokens
            else {(): 1.0}
            for start, (prompt, p) in zip(starts, requests(tokens), strict=True)
        ]
        for first, p in tails[0].items():
            for second, q in tails[1].items():
                key = (starts[0] + first, starts[1] + second)
                total[key] = total.get(key, 0.0) + mass * p * q
    return total, seen


@pytest.mark.parametrize("policy", ["restless", "history"])
def test_the_joint_law_of_two_requests_with_gammas_of_their_own(policy: str) -> None:
    found, seen = joint(lambda: POLICIES[policy](True))
    assert total_variation(found, joint_wanted()) <= 1e-9
    assert len(seen) >= 2
    if policy == "history":
        assert any(len(set(gammas)) == 2 for gammas in seen), "rows were to draft differently"


@pytest.mark.parametrize("policy", ["restless", "history"])
def test_coupled_tokens_do_not_depend_on_it(policy: str) -> None:
    tables = 600
    parts = make_parts(
        TableNoise(noise()),
        drafter=make_drafter("table"),
        estimator=make_estimator("online"),
        scheduler=make_scheduler("lookahead", rows=SLOTS),
        target=target(),
        cost=sps_table(COUPLED_RATES),
        gamma_policy=POLICIES[policy](True),
    )
    found = decode(
        engine(parts, slots=60, step_tokens=4 * SLOTS), [(PROMPT, params_of("T=1", seed)) for seed in range(tables)]
    )
    assert found == coupled_wanted("T=1", tables)


# Non-anticipation, on the lengths that enter packing


V, WIDE = 4, 4
SMOOTH = tuple(1.0 / (4.0 + 0.8 * n) for n in range(1, 64))


class Swapped(TableDrafter):
    """A drafter whose drafts of the round under test are what the test says."""

    tokens: Any = None

    def propose(self, batch: Any, sampler: Any) -> Any:
        if self.tokens is None:
            return super().propose(batch, sampler)
        lens = np.array([min(batch.gamma, r.max_draft) for r in batch.requests], dtype=np.int64)
        ids = torch.from_numpy(self.tokens[: len(lens), : batch.gamma].copy())
        return sampler.point_mass(ids, lens)


def packed_lengths(policy: Any, probs: Any, tokens: Any, *, warm: int) -> tuple[list[int], list[int]]:
    """Lengths of a round after ``warm`` rounds of history, for given drafts and confidences; and who drafted."""
    made_target = TableTarget(random_table(V, V, seed=61), max_len=64)
    drafter, estimator = Swapped(random_table(V, V, seed=62), gamma=WIDE), Given(np.full((3, WIDE), 0.8))
    parts = make_parts(
        CounterDraws(),
        drafter=drafter,
        estimator=estimator,
        scheduler=build("scheduling", "causal", V, WIDE),
        target=made_target,
        cost=sps_table(SMOOTH),
        gamma=WIDE,
        gamma_policy=policy,
    )
    made = engine(parts, slots=3, max_len=64, seed=4)
    for r in range(3):
        made.submit([1] * (1 + r), SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True))
    for _ in range(warm):
        estimator.probs = np.full((3, WIDE), 0.8)
        _trim(estimator, drafter)
        made.step()
    estimator.probs, drafter.tokens = probs, tokens
    _trim(estimator, drafter)
    before = len(made_target.forwards)
    made.step()
    return [n - 1 for n in made_target.forwards[before]], list(map(int, policy.last))


def _trim(estimator: Any, drafter: Any) -> None:
    """Confidences for as many rows and positions as draft."""
    whole = estimator.probs

    def estimate(batch: Any, draft: Any) -> Any:
        return whole[[r.slot for r in batch.requests], : draft.token_ids.shape[1]].copy()

    estimator.estimate = estimate


class Last(ByHistory):
    last: Any = ()

    def choose(self, batch: GammaInput, cost: Any | None) -> GammaChoice:
        choice = super().choose(batch, cost)
        self.last = choice.gammas
        return dataclasses.replace(choice, verify_all=False)


class LastRestless(Restless):
    last: Any = ()

    def choose(self, batch: GammaInput, cost: Any | None) -> GammaChoice:
        choice = super().choose(batch, cost)
        self.last = choice.gammas
        return choice


@pytest.mark.parametrize("make_policy", [lambda: Last(WIDE), lambda: LastRestless(WIDE)], ids=["history", "restless"])
def test_no_drafted_token_decides_who_drafts_or_how_much_is_packed(make_policy: Any) -> None:
    """Changing drafts and confidences beyond l_r + 1 changes no length, and drafts change no gamma at all."""
    rng = np.random.default_rng(3)
    lengths: set[tuple[int, ...]] = set()
    for trial in range(25):
        warm = 1 + trial % 4
        probs, tokens = rng.choice([0.1, 0.6, 0.9, 1.0], size=(3, WIDE)), rng.integers(0, V, size=(3, WIDE))
        lens, gammas = packed_lengths(make_policy(), probs, tokens, warm=warm)
        lengths.add(tuple(lens))
        assert all(n <= g for n, g in zip(lens, gammas, strict=True))
        rows = np.array([[k > n for k in range(WIDE)] for n in lens])
        for fill in (0.0, 1.0, rng.random((3, WIDE))):
            other = np.where(np.arange(WIDE) >= np.array(lens)[:, None], rng.integers(0, V, size=(3, WIDE)), tokens)
            again = packed_lengths(make_policy(), np.where(rows, fill, probs), other, warm=warm)
            assert again == (lens, gammas)
    assert len(lengths) > 5
