"""Token identity on a real model in float32: a small part of ``python -m benchmarks.verify``."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from benchmarks.checks import SCHEDULES, Block, Job, fill, neighbours
from benchmarks.margins import BOUND

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]


def assert_identical(block: Block) -> None:
    assert block.faults == 0, str(block)
    assert block.identical + block.rounding == block.outputs > 0


@pytest.mark.parametrize("concurrency", [1, 2, 6])
@pytest.mark.parametrize("drafter", ["none", "ngram", "recall"])
def test_greedy_is_generate(check: Any, greedy_jobs: list[Job], drafter: str, concurrency: int) -> None:
    """Two slots: requests join as others leave. Six: prompts twice in one batch."""
    block = check.run(f"{drafter}, {concurrency}", fill(greedy_jobs, concurrency), concurrency, drafter)
    assert_identical(block)
    if drafter == "recall":
        assert 0 < block.accepted < block.verified


def test_seeded_plain_decoding_is_transformers_processors(check: Any, seeded_jobs: list[Job]) -> None:
    block = next(b for b in check.blocks if "against transformers' processors" in b.name)
    assert block.outputs == len(seeded_jobs)
    assert_identical(block)


@pytest.mark.parametrize("scheduler", SCHEDULES)
def test_seeded_is_the_same_under_every_schedule(
    check: Any, seeded_jobs: list[Job], greedy_jobs: list[Job], scheduler: str
) -> None:
    """Alone, and in a batch with greedy and unseeded requests."""
    alone = check.run(f"{scheduler}, alone", seeded_jobs[:2], 1, "recall", scheduler)
    mixed = neighbours(seeded_jobs, greedy_jobs, unseeded=scheduler != "global")
    batched = check.run(f"{scheduler}, batched", mixed, 6, "recall", scheduler)
    assert_identical(alone)
    assert_identical(batched)
    if scheduler == "off":
        assert batched.verified == 0
    else:
        assert 0 < batched.accepted < batched.verified


def test_another_seed_is_noticed(check: Any, seeded_jobs: list[Job]) -> None:
    """The comparison can fail: what one seed decides is not excused as another's."""
    job = seeded_jobs[0]
    assert job.expected
    other = dataclasses.replace(job.params, seed=12345)
    assert max(check.reference.margins(job.prompt, job.expected, job.params)) < BOUND
    assert max(check.reference.margins(job.prompt, job.expected, other)) > BOUND
