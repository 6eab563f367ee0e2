"""Which tile tuning chooses: the quickest of those that compile, fit and do not spill."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dspark.errors import DSparkError
from dspark.ops.triton.launch import Tile
from dspark.ops.triton.measure import Unfit, attempt, quickest

TILES = [Tile(block_v=size) for size in (16, 32, 64, 128)]


def no_more(reason: str) -> Any:
    raise Unfit(reason)


def test_the_quickest_that_fits_is_chosen_and_the_others_reasons_are_told() -> None:
    costs = {16: 3.0, 64: 1.0, 128: 1.0}
    told: list[str] = []
    best = quickest("an op", TILES, lambda t: costs.get(t.block_v) or no_more("it spills"), told.append)
    assert best == (TILES[2], 1.0)  # of equals the first
    assert len(told) == 1
    assert "block_v=32" in told[0]
    assert "it spills" in told[0]


def test_a_search_that_finds_nothing_says_why() -> None:
    with pytest.raises(DSparkError, match="an op can be chosen: too large"):
        quickest("an op", TILES, lambda t: no_more("too large"), lambda line: None)


@pytest.mark.parametrize("fault", [RuntimeError, ValueError, KeyError, AssertionError, MemoryError])
def test_a_tile_that_fails_for_whatever_reason_is_none(fault: type[Exception]) -> None:
    def call() -> None:
        raise fault("first line\nthe reason")

    with pytest.raises(Unfit, match=f"{fault.__name__}: .*the reason"):
        attempt(call, [])


def test_a_lost_device_is_not_taken_for_a_bad_tile() -> None:
    def call() -> None:
        raise torch.AcceleratorError("illegal memory access")

    with pytest.raises(torch.AcceleratorError):
        attempt(call, [])


def test_a_tile_whose_kernels_spill_is_never_chosen() -> None:
    kernels: list[Any] = []

    def call() -> None:
        kernels.extend((SimpleNamespace(name="one", n_spills=0), SimpleNamespace(name="two", n_spills=8)))

    with pytest.raises(Unfit, match="two spills 8"):
        attempt(call, kernels)
    attempt(lambda: None, kernels[:1])
