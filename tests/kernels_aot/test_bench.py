"""``python -m benchmarks.kernels`` without a GPU: floors, and what compiling says."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch

from benchmarks.kernels import compilation, main

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what is said without a GPU")


@needs_no_gpu
@pytest.mark.timeout(900)
def test_it_prints_floors_and_compiles(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--rows", "1"])
    said = capsys.readouterr().out
    assert "no GPU here" in said
    assert "sm_90" in said
    assert "find_masks/bf16" in said


@needs_no_gpu
def test_it_can_leave_compiling_out(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--rows", "1", "--no-compile"])
    said = capsys.readouterr().out
    assert "no GPU here" in said
    assert "find_masks" not in said


def test_a_gpu_is_timed_and_not_compiled_for_unless_asked() -> None:
    assert compilation(None, False, "cuda") is None
    assert compilation("sm_90", True, "cpu") is None
