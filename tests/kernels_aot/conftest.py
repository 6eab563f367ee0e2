"""Compiling kernels for GPUs, in a process without Triton's interpreter."""

from __future__ import annotations

import os

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    raise pytest.UsageError(
        "tests/kernels_aot compiles kernels, which Triton's interpreter excludes: make test-kernels"
    )
