"""What is compiled is all that an engine launches: a launch of other sizes runs code that is in the list already."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from dspark.ops.triton import describe
from dspark.ops.triton.aot import ARCHITECTURES, Build, builds, compile_for, specialised
from dspark.ops.triton.describe import PAIRS, key_of, launches
from dspark.ops.triton.launch import Launch
from dspark.ops.triton.measure import Unfit, attempt

FULL = [(torch.bfloat16, torch.bfloat16)]


def code_of(launch: Launch, architecture: str) -> str:
    """What tells compiled kernels apart, as Triton itself says it for the architecture."""
    options, types, constants, attributes = specialised(launch, architecture)
    return f"{launch.kernel.fn.__name__} {options} {types} {sorted(constants.items())} {sorted(attributes.items())}"


@pytest.mark.parametrize("architecture", ["sm_90", "gfx942"])
def test_other_numbers_of_requests_drafts_and_candidates_run_the_same_code(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row above all, whose 1 would be compiled in, and odd numbers, whose tensors lie less aligned."""
    known = {code_of(launch, architecture) for launch in launches(architecture, FULL)}
    for rows, gamma, kept in ((1, 1, 1), (3, 5, 33), (31, 16, 7)):
        monkeypatch.setattr(describe, "GAMMA", gamma)
        monkeypatch.setattr(describe, "KEPT", kept)
        for launch in launches(architecture, FULL, rows=(rows,)):
            assert code_of(launch, architecture) in known, (rows, describe.label_of(launch))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_labels_tell_builds_apart(architecture: str) -> None:
    found = list(builds(architecture))
    assert len({build.label for build in found}) == len(found) == len({key_of(b.launch) for b in found})


def test_the_list_has_what_engines_launch() -> None:
    """Row maps, pruned vocabularies at every tuned tile, candidates, each mask, all dtypes, edited logits."""
    labels = [build.label for build in builds("sm_90")]
    for dtype in ("bf16", "fp16", "fp32"):
        assert any(label.startswith(f"bias_partials/{dtype}-r512") and "names" in label for label in labels)
        assert {f"find_masks/{dtype}-w8", f"row_partials/{dtype}-settings-masks-w4", f"decide/{dtype}-q-w1"} <= {
            *labels
        }
    laws = [label for label in labels if label.startswith("final_partials/") and "-law-" in label]
    plain = [label for label in laws if "columns" not in label]
    assert sorted(laws) == sorted(plain + [label.replace("-law-", "-law-columns-") for label in plain])
    assert any(label.startswith("final_partials/fp32-bf16-r256") for label in laws)
    assert len(PAIRS) == 5


def test_a_launch_that_the_compiler_refuses_is_no_tile() -> None:
    """Whatever is wrong with it: here a width that is no power of two."""
    known = next(b for b in builds("sm_90", [torch.bfloat16]) if b.label.startswith("bias_partials/"))
    given: dict[str, Any] = {**known.launch.arguments, "BLOCK_V": 48}
    wrong = Build(Launch(known.launch.kernel, known.launch.grid, given, known.launch.options), "wrong")
    with pytest.raises(Unfit, match="CompilationError"):
        attempt(lambda: compile_for(wrong, "sm_90"), [])
