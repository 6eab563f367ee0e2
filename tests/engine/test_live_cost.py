"""Cost tables that follow real steps, drafting times, and what an engine is built with by default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from dspark import EngineConfig, SamplingParams
from dspark.capabilities import GammaCapabilities
from dspark.config import build_config
from dspark.engine.build import build_engine
from dspark.engine.draft_cost import drafter_fingerprint, measure_draft, with_draft
from dspark.engine.live_cost import LiveCost
from dspark.errors import ConfigError, CostTableError, UnknownComponentError
from dspark.sampling.draws import CounterDraws
from dspark.scheduling.cost import ContextBucket, CostProfile
from dspark.targets.hf import HFTarget
from dspark.testing import TableEstimator
from dspark.testing.cheats import LengthTable
from dspark.testing.toys import random_table
from dspark.types import BatchView, GammaChoice, RoundRecord
from tests.drafters.toys import FeatureTarget, toy_drafter
from tests.engine.adaptive import make as make_toy
from tests.engine.cases import close_drafter, make_target
from tests.exactness.harness import build, engine, make_parts

POINTS = ((1, 1.0), (4, 1.3), (16, 2.0), (64, 6.0))
PROFILE = CostProfile((ContextBucket(POINTS),), noise=0.02)


def record(tokens: int, target: float, *, draft: float = 0.0, rest: float = 0.0, rows: int = 0) -> RoundRecord:
    batch = BatchView((None,) * rows, 3) if rows else None  # type: ignore[arg-type]
    block: Any = object() if rows else None
    seconds = {"target": target, "draft": draft, "commit": rest}
    return RoundRecord(0, batch, block, None, None, (), tokens, seconds)


def run(live: LiveCost, steps: int, seconds: Any, *, spread: float = 0.0, seed: int = 0, **more: Any) -> Any:
    """Steps of 1, 4, 16 and 64 tokens in turn; the last table, and how many were made."""
    rng = np.random.default_rng(seed)
    last = None
    for i in range(steps):
        tokens = (1, 4, 16, 64)[i % 4]
        took = seconds(tokens) * float(np.exp(rng.normal(0.0, spread)))
        last = live.observe(record(tokens, took, **more), 10) or last
    return last


def measured(tokens: int) -> float:
    return dict(POINTS)[tokens]


def test_noise_alone_never_turns_a_table_over() -> None:
    live = LiveCost(PROFILE)
    assert run(live, 2000, measured, spread=0.08) is None
    assert live.updates == 0


def test_an_outlier_does_not_either() -> None:
    live = LiveCost(PROFILE)
    table = None
    for i in range(200):
        table = live.observe(record(4, 1.3 * (30.0 if i % 10 == 0 else 1.0)), 10) or table
    assert table is None


def test_a_slower_machine_is_learned_in_few_steps() -> None:
    live = LiveCost(PROFILE)
    table = run(live, 48, lambda n: 2.0 * measured(n), spread=0.05)
    assert table is not None
    for tokens, seconds in POINTS:
        assert table.verify_seconds(tokens) == pytest.approx(2.0 * seconds, rel=0.1)


def test_a_point_that_is_off_by_itself_is_learned_by_itself() -> None:
    live = LiveCost(PROFILE)
    table = run(live, 400, lambda n: measured(n) * (1.6 if n == 16 else 1.0), spread=0.03)
    assert table.verify_seconds(16) == pytest.approx(3.2, rel=0.15)
    assert table.verify_seconds(1) == pytest.approx(1.0, rel=0.08)
    assert table.verify_seconds(64) == pytest.approx(6.0, rel=0.08)


def test_drafting_and_the_rest_of_a_step_are_learned() -> None:
    live = LiveCost(PROFILE)
    table = run(live, 64, measured, draft=0.4, rest=0.2, rows=2)
    assert table.draft_seconds(2, 3) == pytest.approx(0.4)
    assert table.glue == pytest.approx(0.2)
    known = LiveCost(CostProfile((ContextBucket(POINTS),), draft=((1, 1, 0.1), (1, 3, 0.2), (2, 3, 0.2))))
    table = run(known, 64, measured, draft=0.4, rows=2)
    assert table.draft_seconds(2, 3) == pytest.approx(0.4)
    assert table.draft_seconds(1, 1) == pytest.approx(0.2), "in proportion"


def test_context_buckets_are_corrected_apart() -> None:
    live = LiveCost(CostProfile((ContextBucket(POINTS, 100), ContextBucket(POINTS))))
    table = None
    for i in range(300):
        context = 50 if i % 2 else 500
        table = live.observe(record(4, 1.3 if i % 2 else 2.6), context) or table
    assert table is not None
    assert table.verify_seconds(4, 50) == pytest.approx(1.3, rel=0.25)
    assert table.verify_seconds(4, 500) == pytest.approx(2.6, rel=0.25)


def test_the_table_is_exchanged_between_rounds_and_frozen_within_one() -> None:
    made = make_toy(0.7)
    made.live_cost = LiveCost(PROFILE)
    seen: list[tuple[Any, Any]] = []
    choose, plan = made.parts.gamma_policy.choose, made.parts.scheduler.plan
    made.parts.gamma_policy.choose = lambda batch, cost: seen.append((cost, None)) or choose(batch, cost)

    def spy(batch: Any, cost: Any) -> Any:
        seen[-1] = (seen[-1][0], cost)
        return plan(batch, cost)

    made.parts.scheduler.plan = spy
    made.submit([1, 2], SamplingParams(max_tokens=200))
    while made.has_work:
        made.step()
    assert made.stats.cost_updates == made.live_cost.updates > 0, "toys are faster than the table says"
    assert all(second is None or first is second for first, second in seen)
    assert len({id(first) for first, _ in seen}) == made.stats.cost_updates + 1


# Drafting times -------------------------------------------------------------------------------------------------------


class Clocked:
    """A drafter that takes 1 ms a request and 2 ms a token of gamma on a clock of its own."""

    def __init__(self, drafter: Any) -> None:
        self.drafter, self.now = drafter, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def propose(self, batch: Any, sampler: Any) -> Any:
        self.now += 1e-3 * len(batch) + 2e-3 * batch.gamma
        return self.drafter.propose(batch, sampler)


def test_drafting_is_timed_by_requests_and_gamma_and_leaves_nothing_behind() -> None:
    drafter = Clocked(close_drafter())
    target = make_target()
    parts = make_parts(
        CounterDraws(), drafter=drafter, estimator=None, scheduler=build("scheduling", "causal"), target=target, gamma=3
    )
    target.allocate(4, 64)
    points = measure_draft(parts, [1, 4], [1, 3, 0], clock=lambda: drafter.now, repeats=3)
    assert {(r, g): t for r, g, t in points} == pytest.approx(
        {(r, g): 1e-3 * r + 2e-3 * g for r in (1, 4) for g in (1, 3)}
    )
    assert sorted(drafter.released) == [(r, 0) for r in range(4)]


def test_a_drafter_that_reads_features_is_given_some() -> None:
    target = FeatureTarget(random_table(4, 3, 3), max_len=64)
    target.allocate(2, 64)
    drafter = toy_drafter(target=target)
    parts = make_parts(
        CounterDraws(), drafter=drafter, estimator=None, scheduler=build("scheduling", "causal"), target=target, gamma=2
    )
    points = measure_draft(parts, [1, 2], [1, 2], repeats=2, context=6)
    assert {(r, g) for r, g, _ in points} == {(1, 1), (2, 1), (1, 2), (2, 2)}
    assert drafter.rows_without_context == 0, "what was timed was drafting"
    assert drafter.buffered_tokens == 0


def test_a_drafter_that_can_not_be_timed_is_planned_without_times() -> None:
    drafter = close_drafter()
    drafter.propose = lambda batch, sampler: 1 / 0  # type: ignore[method-assign]
    target = make_target()
    parts = make_parts(
        CounterDraws(), drafter=drafter, estimator=None, scheduler=build("scheduling", "causal"), target=target, gamma=3
    )
    target.allocate(4, 64)
    assert with_draft(PROFILE, parts, {"drafter": "x"}, slots=4, kept=False) is PROFILE
    assert sorted(drafter.released) == [(r, 0) for r in range(4)]


class Phases:
    """Plain for a while, then drafting, and so on."""

    capabilities = GammaCapabilities()

    def __init__(self, lens: Sequence[int]) -> None:
        self.lens, self.round, self.waiting = list(lens), 0, []

    def choose(self, batch: Any, cost: Any) -> GammaChoice:
        length = self.lens[min(self.round, len(self.lens) - 1)]
        self.round += 1
        return GammaChoice(np.full(len(batch.requests), length), "phases")

    def observe(self, record: RoundRecord) -> None:
        self.waiting.append(self.drafter.buffered_tokens)

    def release(self, slot: int, generation: int) -> None:
        pass


@pytest.mark.parametrize("head", ["markov", "none"])
def test_plain_phases_buffer_features_and_drafting_resumes_as_if_it_had_never_stopped(head: str) -> None:
    """The drafts after a plain phase are those of a drafter that drafted all along: nothing is prefilled again."""
    proposed = []
    for lens in ((0, 0, 0, 0, 0, 2), (2,)):
        target = FeatureTarget(random_table(4, 3, 3, seed=3), max_len=64)
        drafter = toy_drafter(head, target=target)
        policy = Phases(lens)
        policy.drafter = drafter
        parts = make_parts(
            CounterDraws(), drafter=drafter, estimator=TableEstimator([[0.9] * 3] * 2),
            scheduler=LengthTable([0]), target=target, gamma=2, gamma_policy=policy,
        )  # fmt: skip
        made = engine(parts, slots=2, max_len=64)
        for prompt in ([0, 1, 2], [1, 1]):
            made.submit(prompt, SamplingParams(max_tokens=20))
        blocks: list[Any] = []
        propose = drafter.propose
        drafter.propose = lambda batch, sampler, p=propose, b=blocks: b.append(p(batch, sampler)) or b[-1]
        for _ in range(8):
            made.step()
        proposed.append([block.token_ids.tolist() for block in blocks[-2:]])
        if lens[0] == 0:
            assert policy.waiting[4] == 3 + 2 + 2 * 4, "prompts and four plain rounds of two requests"
            assert policy.waiting[-1] <= 4
            assert made.stats.buffered_tokens == 2 * 5
            assert drafter.rows_without_context == 0
    assert proposed[0] == proposed[1]


# What is built by default ---------------------------------------------------------------------------------------------


@pytest.fixture
def built(tiny_model: Any, tmp_path: Any, monkeypatch: Any) -> Any:
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path))

    def build_one(cost: Any = "auto", **settings: Any) -> Any:
        config = build_config(EngineConfig, {"drafter": "ngram", "max_len": 256, "max_slots": 2, **settings})
        return build_engine(config, target=HFTarget(tiny_model), cost=cost)

    return build_one


def policy(made: Any) -> str:
    return made.parts.name("gamma_policy").rpartition("/")[2]


def test_gamma_is_chosen_where_there_is_a_cost_table_and_nobody_set_it(built: Any) -> None:
    made = built()
    assert policy(made) == "adaptive"
    assert made.parts.gamma == 7
    assert made.live_cost is not None
    assert made.parts.cost.draft_seconds(1, 7) > 0.0, "the drafter was timed"
    assert policy(built(gamma=3)) == "static"
    assert policy(built(cost=None)) == "static"
    assert policy(built(scheduler="fixed")) == "static"
    assert policy(built(drafter="none")) == "static"
    assert policy(built(gamma_policy="static")) == "static"
    assert policy(built(gamma=3, gamma_policy="adaptive")) == "adaptive"
    assert built(refine_cost=False).live_cost is None
    explicit = built(scheduler="fixed", gamma_policy="adaptive", gamma_policy_config={"threshold": 0.2})
    assert explicit.parts.cost is not None
    assert explicit.parts.gamma_policy.config.threshold == 0.2
    assert not explicit.parts.gamma_policy._prunes


def test_what_is_wrong_is_refused_by_name(built: Any) -> None:
    with pytest.raises(UnknownComponentError, match="adaptive"):
        built(gamma_policy="adaptiv")
    with pytest.raises(ConfigError, match="threshold"):
        built(gamma_policy="adaptive", gamma_policy_config={"threshold": 3})
    with pytest.raises(ConfigError, match="refine_cost"):
        EngineConfig(refine_cost=1)  # type: ignore[arg-type]


def test_a_profile_of_another_drafter_gives_its_forwards_alone(built: Any, tmp_path: Any) -> None:
    made = built()
    here = made.parts.target.fingerprint()
    mine = drafter_fingerprint(made.parts, made.config)
    buckets = (ContextBucket(((1, 0.5), (8, 0.7))),)
    path = tmp_path / "p.json"
    CostProfile(buckets, here, draft=((1, 7, 9.0),), drafter=mine).save(path)
    assert built(cost=path).parts.cost.draft_seconds(1, 7) == 9.0
    CostProfile(buckets, here, draft=((1, 7, 9.0),), drafter={**mine, "checkpoint": "x"}).save(path)
    other = built(cost=path).parts.cost
    assert 0.0 < other.draft_seconds(1, 7) < 1.0
    assert other.verify_seconds(8) == 0.7
    CostProfile(buckets, {**here, "threads": "99"}).save(path)
    with pytest.raises(CostTableError, match="threads: measured on '99'"):
        built(cost=path)


def test_real_engines_decode_the_same_with_and_without_it(built: Any) -> None:
    prompts = [list(range(2, 12)) * 3, [5, 6, 7, 8] * 6]
    outputs = []
    for settings in ({"gamma_policy": "static"}, {}, {"gamma_policy": "adaptive", "drafter": "ngram", "gamma": 4}):
        made = built(**settings)
        names = [made.submit(p, SamplingParams(max_tokens=60, ignore_eos=True)) for p in prompts]
        names.append(made.submit(prompts[0], SamplingParams(max_tokens=40, temperature=1.0, seed=5, ignore_eos=True)))
        out: dict[str, list[int]] = {}
        for chunk in made.run():
            out.setdefault(chunk.request_id, []).extend(chunk.ids)
        outputs.append([out[n] for n in names])
        assert sum(made.stats.gammas.values()) > 0
        assert made.stats.phase_seconds["gamma"] > 0.0
    assert outputs[0] == outputs[1] == outputs[2]


torch.set_num_threads(1)
