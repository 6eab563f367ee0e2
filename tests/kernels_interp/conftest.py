"""Triton's interpreter, for this process alone: the kernels run on the host, and nothing is compiled.

It must be on before triton is imported, and compiling for a GPU needs it off, so these tests have a process of their
own: ``make test-kernels``.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError("tests/kernels_interp needs a process of its own: make test-kernels")
os.environ["TRITON_INTERPRET"] = "1"

import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a kernel is given holds NaN, and places that are none, until it writes there."""
    plain = torch.empty

    def poisoned(*size: Any, **options: Any) -> torch.Tensor:
        made = plain(*size, **options)
        return made.fill_(float("nan") if made.is_floating_point() else torch.iinfo(made.dtype).max // 2)

    monkeypatch.setattr(torch, "empty", poisoned)
    return
