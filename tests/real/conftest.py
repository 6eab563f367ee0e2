"""The real model, loaded once: untouched for transformers, and as a target."""

from __future__ import annotations

from typing import Any

import pytest

PROMPTS, TOKENS = 4, 16


@pytest.fixture(scope="session")
def check() -> Any:
    """Both models, and a comparison of everything that is decoded with them."""
    from benchmarks.checks import Check

    return Check()


@pytest.fixture(scope="session")
def greedy_jobs(check: Any) -> Any:
    """A few prompts and transformers' greedy output."""
    from benchmarks.prompts import OWN, load_prompts

    return check.answered(check.greedy_jobs(load_prompts(PROMPTS, OWN), TOKENS))


@pytest.fixture(scope="session")
def seeded_jobs(check: Any, greedy_jobs: Any) -> Any:
    """The same prompts with seeds, and what plain decoding alone gives."""
    return check.coupled_jobs(greedy_jobs, TOKENS)
