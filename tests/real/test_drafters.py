"""Token identity on a real model with block drafters of random weights: every head, both layouts, pruned or not.

With random weights hardly anything is accepted, so nearly every round is rolled back. The pruned vocabularies hold few
tokens, those of the expected outputs among them, so that some drafts are accepted.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.checks import Block, Job, neighbours
from benchmarks.draft import shipped

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

GAMMA = 5
DRAFTERS: dict[str, dict[str, Any]] = {
    "markov": {"head": "markov"},
    "gated, pruned": {"head": "gated", "pruned": True},
    "rnn, pruned, candidates": {"head": "rnn", "pruned": True, "candidates": 16},
    "none": {"head": "none"},
    "dflash, pruned": {"head": "none", "pruned": True, "anchor_first": False},
}
SCHEDULERS = {
    "markov": ("lookahead",),
    "gated, pruned": ("global", "causal"),
    "rnn, pruned, candidates": ("threshold", "fixed"),
    "none": ("lagged",),
    "dflash, pruned": ("causal", "fixed"),
}


@pytest.fixture(scope="module", params=DRAFTERS)
def drafter(request: Any, check: Any, greedy_jobs: list[Job], seeded_jobs: list[Job]) -> tuple[str, dict[str, Any]]:
    """Its name, and ``drafter_config``."""
    own = DRAFTERS[request.param]
    wanted = {token for job in (*greedy_jobs, *seeded_jobs) for token in job.expected or ()}
    ids = sorted(wanted | set(range(100, 100 + 40))) if own.get("pruned") else None
    made = shipped(own["head"], check.target, ids, anchor_first=own.get("anchor_first", True), gamma=GAMMA)
    return request.param, {"checkpoint": made, "candidates": own.get("candidates")}


def assert_identical(block: Block) -> None:
    assert block.faults == 0, str(block)
    assert block.identical + block.rounding == block.outputs > 0


def test_greedy_is_generate(check: Any, greedy_jobs: list[Job], drafter: tuple[str, dict[str, Any]]) -> None:
    """Alone, and prompts of unequal lengths in two slots: one joins as another leaves."""
    name, config = drafter
    alone = check.run(f"{name}, alone", greedy_jobs[:1], 1, "dspark", drafter_config=config)
    assert len({len(job.prompt) for job in greedy_jobs[:3]}) > 1
    batched = check.run(f"{name}, batch", greedy_jobs[:3], 2, "dspark", drafter_config=config)
    for block in (alone, batched):
        assert_identical(block)
        assert block.verified > 0


def test_seeded_is_plain_decoding(
    check: Any, seeded_jobs: list[Job], greedy_jobs: list[Job], drafter: tuple[str, dict[str, Any]]
) -> None:
    """What the drafter ``none`` gives for the same seed: alone, and among greedy and unseeded requests."""
    name, config = drafter
    accepted = 0
    for scheduler in SCHEDULERS[name]:
        alone = check.run(f"{name}, {scheduler}, alone", seeded_jobs[:1], 1, "dspark", scheduler, config)
        mixed = neighbours(seeded_jobs[:2], greedy_jobs[:2], unseeded=scheduler != "global")
        batched = check.run(f"{name}, {scheduler}, batch", mixed, 4, "dspark", scheduler, config)
        for block in (alone, batched):
            assert_identical(block)
            accepted += block.accepted
    if "pruned" in name:
        assert accepted > 0
