"""The verification computes what its part needs: references of greedy prompts are generated once, and few for seeds."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import verify
from benchmarks.checks import NEIGHBOURS, Check
from benchmarks.prompts import OWN, load_prompts
from dspark.config import SamplingParams


class Counted:
    """``generate`` of a check's reference, counted."""

    def __init__(self, check: Check) -> None:
        self.generate = check.reference.generate
        self.asked: list[tuple[int, int]] = []
        check.reference.generate = self  # type: ignore[method-assign, assignment]

    def __call__(self, prompt: Any, tokens: int) -> list[int]:
        self.asked.append((len(prompt), tokens))
        return self.generate(prompt, tokens)


@pytest.fixture
def check(tiny_model: Any, tiny_tokenizer: Any, tmp_path: Path) -> Check:
    tiny_model.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    return Check(str(tmp_path))


def test_only_neighbours_are_generated_for_the_seeded_part(check: Check) -> None:
    counted = Counted(check)
    jobs = check.greedy_jobs(load_prompts(9, OWN), 12)
    options = Namespace(coupled_prompts=1, coupled_tokens=3, concurrency=[4], alone=1)
    verify.run_part("coupled", check, jobs, options)
    assert [tokens for _, tokens in counted.asked] == [3] * NEIGHBOURS
    assert check.faults == 0
    assert sum(block.identical for block in check.blocks) > 0


def test_what_was_generated_is_not_generated_again(check: Check) -> None:
    counted = Counted(check)
    jobs = check.greedy_jobs(load_prompts(3, OWN), 12)
    long = [job.expected or [] for job in check.answered(jobs)]
    assert len(counted.asked) == 3
    shorter = [replace(job, params=SamplingParams(max_tokens=5)) for job in jobs]
    assert [job.expected for job in check.answered(shorter)] == [output[:5] for output in long]
    assert len(counted.asked) == 3
    (longer,) = check.answered([replace(jobs[0], params=SamplingParams(max_tokens=14))])
    assert (longer.expected or [])[:12] == long[0]
    assert len(counted.asked) == 4
