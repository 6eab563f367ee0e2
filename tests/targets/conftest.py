"""Fixtures of the targets' tests: devices, and one thread for tiny models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


def _devices() -> list[str]:
    found = ["cpu"]
    if torch.cuda.is_available():
        found.append("cuda")
    if torch.backends.mps.is_available():
        found.append("mps")
    return found


@pytest.fixture(params=_devices())
def device(request: pytest.FixtureRequest) -> str:
    """Every device of this machine."""
    return str(request.param)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products are slower on many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
