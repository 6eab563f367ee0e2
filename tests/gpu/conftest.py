"""Tests on a GPU: ``make test-gpu``. Without one they are skipped, and say so."""

from __future__ import annotations

from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA or HIP device is at hand")
    return torch.device("cuda")


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a kernel is given holds NaN, and places that are none, until it writes there."""
    plain = torch.empty

    def poisoned(*size: Any, **options: Any) -> torch.Tensor:
        made = plain(*size, **options)
        return made.fill_(float("nan") if made.is_floating_point() else torch.iinfo(made.dtype).max // 2)

    monkeypatch.setattr(torch, "empty", poisoned)
