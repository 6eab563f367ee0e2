"""The operators ``torch.ops.dspark``: on a CPU the references, with shapes that ``torch.compile`` can trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dspark.ops import bias_sample, library, reject_sample
from tests.kernels_interp.cases import BIAS_CASES, REJECT_CASES, BiasCase, RejectCase


@pytest.mark.parametrize("case", BIAS_CASES[:8], ids=str)
def test_bias_sample_is_the_reference(case: BiasCase) -> None:
    arguments = case.arguments()
    for got, want in zip(library.bias_sample(**arguments), bias_sample.reference(**arguments), strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize("case", REJECT_CASES, ids=str)
def test_reject_sample_is_the_reference(case: RejectCase) -> None:
    arguments = case.arguments()
    for got, want in zip(library.reject_sample(**arguments), reject_sample.reference(**arguments), strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)


def test_the_operators_keep_torchs_rules() -> None:
    """Schemas, fake tensors and tracing with dynamic shapes, by torch's own checks."""
    a = BiasCase(3, 50, 8).arguments()
    flat = (a["base"], a["temperature"], a["keys"], a["latent"], a["w2"], None, None, None)
    assert set(torch.library.opcheck(torch.ops.dspark.bias_sample, flat).values()) == {"SUCCESS"}
    b: dict[str, Any] = RejectCase(4, 2, 40).arguments()
    law = b["law"]
    rest = (
        *(b[n] for n in ("logits", "starts", "lens", "drafts", "mode", "uniforms", "keys", "log_q")),
        [law.base, law.lse, law.temperature], [law.latent, law.w2], None, None, None, None, [], False, None,
    )  # fmt: skip
    assert set(torch.library.opcheck(torch.ops.dspark.reject_sample, rest).values()) == {"SUCCESS"}


def test_importing_the_operators_imports_no_triton() -> None:
    import subprocess
    import sys

    code = "import sys, dspark.ops.library, dspark.engine.engine; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
