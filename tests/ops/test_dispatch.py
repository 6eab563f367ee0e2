"""Which kernel runs an operation: chosen once, with its reason; what is asked for by name never falls back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dspark.capabilities import KernelCapabilities
from dspark.config import EngineConfig
from dspark.engine.build import build_parts
from dspark.errors import ConfigError, UnknownComponentError
from dspark.ops import bias_sample, dispatch
from dspark.ops.dispatch import Offer, choose, choose_all, obstacle_of, table
from dspark.plugins import load_plugins
from dspark.plugins.kernels import choose_kernels, kernel_table, offers
from dspark.types import Mode
from tests.exactness.harness import target

CPU = torch.device("cpu")
SHIPPED = offers(load_plugins().catalog, CPU, torch.float32)


@pytest.fixture(autouse=True)
def compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process without Triton's interpreter, whatever this one has."""
    monkeypatch.setattr(dispatch, "_interpreting", lambda: False)


def foreign(name: str = "bias_sample.fast", dist: str = "acme", **declared: Any) -> Offer:
    return Offer(name, f"{dist}/{name}", KernelCapabilities(**declared), lambda: print, builtin=False)


def test_a_cpu_takes_the_engines_own_code_and_says_why() -> None:
    choice = choose("bias_sample", CPU, torch.float32, SHIPPED)
    assert (choice.name, choice.call) == ("plain", None)
    assert "not for a CPU" in choice.reason


def test_what_is_asked_for_is_taken() -> None:
    choice = choose("bias_sample", CPU, torch.bfloat16, SHIPPED, "reference")
    assert choice.name == "dspark/bias_sample.reference"
    assert choice.call is bias_sample.reference
    assert choose("bias_sample", CPU, torch.float32, SHIPPED, "dspark/bias_sample.reference").call is choice.call
    assert choose("bias_sample", CPU, torch.float32, SHIPPED, "plain").call is None


@pytest.mark.parametrize("name", ["triton", "bias_sample.triton", "dspark/triton"])
def test_what_is_asked_for_and_can_not_run_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="was asked for and can't run bias_sample in float32 on cpu: it compiles"):
        choose("bias_sample", CPU, torch.float32, SHIPPED, name)


def test_a_dtype_that_a_kernel_does_not_take_is_refused() -> None:
    with pytest.raises(ConfigError, match="float64"):
        choose("bias_sample", CPU, torch.float64, SHIPPED, "reference")
    assert choose("bias_sample", CPU, torch.float64, SHIPPED).name == "plain"


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownComponentError, match="triton"):
        choose("bias_sample", CPU, torch.float32, SHIPPED, "tritn")
    with pytest.raises(ConfigError, match="bias_sample"):
        choose_all(CPU, torch.float32, SHIPPED, {"bias_smple": "triton"})


def test_plugins_kernels_run_where_they_are_named_alone() -> None:
    mine = foreign()
    assert choose("bias_sample", CPU, torch.float32, [*SHIPPED, mine]).name == "plain"
    assert choose("bias_sample", CPU, torch.float32, [*SHIPPED, mine], "fast").name == "acme/bias_sample.fast"
    with pytest.raises(ConfigError, match="several"):
        choose("bias_sample", CPU, torch.float32, [mine, foreign(dist="other")], "fast")
    with pytest.raises(ConfigError, match="runs on cuda, not on cpu"):
        choose("bias_sample", CPU, torch.float32, [foreign(devices=("cuda",))], "fast")


def test_a_gpu_that_triton_compiles_for_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "triton_obstacle", lambda device: "" if device.type == "cuda" else "no")
    monkeypatch.setattr(dispatch, "_title", lambda device: "sm_90")
    found = offers(load_plugins().catalog, "cuda", torch.bfloat16)
    choice = choose("reject_sample", "cuda", torch.bfloat16, found)
    assert (choice.name, choice.reason) == ("dspark/reject_sample.triton", "triton runs on sm_90")
    assert choose("reject_sample", "cuda", torch.float64, found).name == "plain"


def test_a_gpu_that_is_not_there_is_said() -> None:
    triton = next(o for o in SHIPPED if o.name == "bias_sample.triton")
    if not torch.cuda.is_available():
        assert "no GPU" in obstacle_of(triton, torch.device("cuda"), "bfloat16")
    assert "no GPU" in obstacle_of(triton, torch.device("mps"), "bfloat16")


def test_the_table_has_a_reason_for_everything() -> None:
    rows = kernel_table(load_plugins().catalog)
    assert {(r.op, r.dtype) for r in rows if r.device == "cpu"} == {
        (op, dtype) for op in dispatch.OPS for dtype in ("bfloat16", "float32")
    }
    assert all(r.reason for r in rows)
    assert [r.op for r in table(SHIPPED, (torch.float32,)) if r.device == "cpu"] == list(dispatch.OPS)


def test_an_engine_takes_what_its_config_names() -> None:
    catalog = load_plugins().catalog
    made = choose_kernels(catalog, {"bias_sample": "reference"}, CPU, torch.float32)
    assert made["bias_sample"].call is bias_sample.reference
    assert made["reject_sample"].call is None
    toy = target(3)
    toy.dtype = torch.float32
    parts = build_parts(EngineConfig(drafter="none", kernels={"reject_sample": "reference"}), catalog, toy)
    assert parts.kernel("reject_sample") is not None
    assert parts.kernel("bias_sample") is None
    for mode in Mode:
        assert parts.verifiers[mode]._kernel is parts.kernel("reject_sample")
        assert parts.verifiers[mode].capabilities.unwarped is (mode is not Mode.GREEDY)
    with pytest.raises(ConfigError, match="was asked for"):
        build_parts(EngineConfig(drafter="none", kernels={"reject_sample": "triton"}), catalog, toy)
