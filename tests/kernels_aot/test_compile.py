"""Every kernel that is launched, with every tuned tile, compiles for four architectures, without spills, within shared
memory, and takes what the committed report says.

``python -m tests.kernels_aot.write`` writes the report anew.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from dspark.ops.triton.aot import ARCHITECTURES, SHARED_LIMIT, Build, builds, compile_for, differences, report, usage
from dspark.ops.triton.launch import SIZE_CLASSES, Launch, Tile, choose_tile, tuned
from tests.kernels_aot.write import REPORT, dtypes_of


@pytest.fixture(scope="module")
def committed() -> Any:
    return json.loads(Path(REPORT).read_text(encoding="utf-8"))


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_compile_as_reported(architecture: str, committed: Any) -> None:
    found = report((architecture,), dtypes_of(committed["dtypes"]))
    assert differences(committed, found) == []
    for label, entry in found["kernels"][architecture].items():
        fits(architecture, label, entry)


def fits(architecture: str, label: str, entry: dict[str, int]) -> None:
    assert entry["spills"] == 0, label
    assert entry["shared"] <= SHARED_LIMIT[architecture], label


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_is_launched_and_not_reported_compiles_too(architecture: str, committed: Any) -> None:
    """Of models in the dtypes that the report leaves out."""
    for build in builds(architecture):
        if build.label not in committed["kernels"][architecture]:
            fits(architecture, build.label, asdict(usage(compile_for(build, architecture))))


def test_the_report_has_every_architecture_and_kernel(committed: Any) -> None:
    assert set(committed["kernels"]) == set(ARCHITECTURES)
    dtypes = dtypes_of(committed["dtypes"])
    for architecture in ARCHITECTURES:
        assert set(committed["kernels"][architecture]) == {b.label for b in builds(architecture, dtypes)}
        for label, entry in committed["kernels"][architecture].items():
            fits(architecture, label, entry)


def test_the_binaries_are_those_of_their_architecture() -> None:
    for architecture, kind, magic in (("sm_90", "cubin", b"\x7fELF"), ("gfx942", "hsaco", b"\x7fELF")):
        build = next(b for b in builds(architecture) if b.label.startswith("fold_tiles"))
        compiled = compile_for(build, architecture)
        assert compiled.asm[kind][:4] == magic
        machine = int.from_bytes(compiled.asm[kind][18:20], "little")
        assert machine == {"cubin": 190, "hsaco": 224}[kind]  # EM_CUDA, EM_AMDGPU


def test_spills_are_seen() -> None:
    """A tile far too large for its threads has to show: the check above would be empty else."""
    known = next(b.launch for b in builds("sm_90") if b.label.startswith("final_partials/bf16-bf16-r256-16x64x256"))
    given = {**known.arguments, "BLOCK_R": 64, "BLOCK_V": 128}
    huge = Build(Launch(known.kernel, known.grid, given, {"num_warps": 4}), "huge")
    assert usage(compile_for(huge, "sm_90")).spills > 0


def test_every_size_class_is_tuned_for_every_architecture() -> None:
    for op in ("bias_sample", "reject_sample"):
        assert set(tuned()[op]) >= set(ARCHITECTURES)
        for architecture in ARCHITECTURES:
            assert set(tuned()[op][architecture]) == set(SIZE_CLASSES)
            assert all(isinstance(choose_tile(op, architecture, size), Tile) for size in SIZE_CLASSES)
    assert choose_tile("bias_sample", "sm_86", "few-256") == choose_tile("bias_sample", "sm_80", "few-256")
    assert choose_tile("bias_sample", "host", "few-256") == Tile(block_v=32, most_d=128)


def test_differences_are_named() -> None:
    known = {"triton": "1", "kernels": {"sm_90": {"a": {"registers": 4, "spills": 0, "shared": 16}}}}
    other = {"triton": "1", "kernels": {"sm_90": {"a": {"registers": 5, "spills": 8, "shared": 16}}}}
    assert len(differences(known, other)) == 2
    assert len(differences(known, {**other, "triton": "2"})) == 1
    assert differences(known, {"triton": "1", "kernels": {"sm_90": {}}}) == ["sm_90 a: only in the committed report"]
