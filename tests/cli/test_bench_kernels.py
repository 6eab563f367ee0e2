"""``dspark bench kernels`` without a GPU, and the kernels' lines of ``dspark doctor``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what is said without a GPU")


@needs_no_gpu
def test_floors_are_listed(dspark: Callable[..., Any]) -> None:
    done = dspark("bench", "kernels", "--device", "cpu", "--rows", "1,64", "--json")
    assert done.code == 0, done.err
    calls = done.json["calls"]
    assert [(c["op"], c["rows"]) for c in calls] == [(o, n) for o in ("bias_sample", "reject_sample") for n in (1, 64)]
    assert calls[0]["goal_bytes"] == 151_936 * 256 * 2  # W2 in bfloat16
    assert calls[1]["operations"] == 2 * 64 * 151_936 * 256
    assert calls[3]["goal_bytes"] == 64 * 8 * 151_936 * 2  # the target's logits
    people = dspark("bench", "kernels", "--device", "cpu")
    assert "no GPU here" in people.out


@needs_no_gpu
def test_tuning_needs_a_gpu(dspark: Callable[..., Any]) -> None:
    done = dspark("bench", "kernels", "--tune")
    assert done.code == 1
    assert "needs a GPU" in done.err


def test_rows_are_numbers(dspark: Callable[..., Any]) -> None:
    for wrong in ("x", "0", "1,-2"):
        done = dspark("bench", "kernels", "--device", "cpu", "--rows", wrong)
        assert done.code == 2
        assert "--rows" in done.err


def test_doctor_says_which_kernels_run_and_why(dspark: Callable[..., Any]) -> None:
    found = dspark("doctor", "--json").json["kernels"]
    cpu = [k for k in found if k["device"] == "cpu"]
    assert {(k["op"], k["dtype"]) for k in cpu} == {
        (op, dtype) for op in ("bias_sample", "reject_sample") for dtype in ("bfloat16", "float32")
    }
    assert all(k["kernel"] == "plain" and "CPU" in k["reason"] for k in cpu)
