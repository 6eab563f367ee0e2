"""What kernels are compiled for without a GPU is what they are launched with."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import GridExecutor

from dspark.ops.triton.aot import builds
from dspark.ops.triton.bias_sample import bias_sample
from dspark.ops.triton.launch import Tile
from dspark.ops.triton.reject_sample import reject_sample
from tests.kernels_interp.cases import BiasCase, RejectCase

SMALL = Tile(block_v=32, most_d=32)
WORDS = {torch.float32: "*fp32", torch.float64: "*fp64", torch.int32: "*i32", torch.int64: "*i64"}
BIAS = (BiasCase(2, 33, 8), BiasCase(2, 33, 8, pruned=True), BiasCase(2, 33, 8, candidates=5))
REJECT = (
    RejectCase(2, 1, 33, rank=8, modes=(1,)),
    RejectCase(2, 1, 33, rank=8, pruned=True, shuffled=True, settings="all", modes=(1,)),
    RejectCase(2, 1, 33, rank=8, candidates=5, shuffled=True, modes=(1,)),
    RejectCase(2, 1, 33, law=False),
)


def test_types_and_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: dict[str, dict[str, set[str]]] = {}
    plain = GridExecutor.__call__

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        known = {name: value for name, value in kwargs.items() if name in self.arg_names}
        own = launched.setdefault(self.fn.__name__, {})
        for name, value in inspect.getcallargs(self.fn, *args, **known).items():
            if isinstance(value, torch.Tensor):
                own.setdefault(name, set()).add(WORDS[value.dtype])
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", watched)
    for case in BIAS:
        bias_sample(**case.arguments(), tile=SMALL)
    for other in REJECT:
        reject_sample(**other.arguments(), tile=SMALL)
    described: dict[str, dict[str, str]] = {}
    for build in builds("sm_90"):
        if build.label.endswith("f32"):
            pointers = {name: kind for name, kind in build.types.items() if kind.startswith("*")}
            described.setdefault(build.kernel.fn.__name__, {}).update(pointers)
    assert set(described) == set(launched)
    for name, types in launched.items():
        assert types == {argument: {described[name].get(argument, "-")} for argument in types}, name
