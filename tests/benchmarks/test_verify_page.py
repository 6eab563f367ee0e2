"""The results page of the verification: what it says of each part, and that an interruption keeps what was finished."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import _common, verify
from benchmarks.checks import Block
from benchmarks.margins import Finding


def result(part: str, blocks: list[Block]) -> dict[str, Any]:
    findings = [f for b in blocks for f in b.findings]
    return {
        "part": part,
        "machine": _common.machine(),
        "prompts": 4,
        "tokens": 16,
        "bound": 1e-4,
        "outputs": sum(b.outputs for b in blocks),
        "identical": sum(b.identical for b in blocks),
        "rounding": sum(b.rounding for b in blocks),
        "faults": sum(b.faults for b in blocks),
        "seconds": 125,
        "blocks": [b.as_dict() for b in blocks],
        "findings": [f.as_dict() for f in findings],
    }


def test_parts_are_stored_one_by_one_and_shown_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_common, "RESULTS", tmp_path)
    assert verify.measured() == []
    _common.write_json("verify-coupled", result("coupled", [Block("seeded", 3, 48, 3, accepted=9)]))
    assert [r["part"] for r in verify.measured()] == ["coupled"]
    wrong = Finding("greedy, alone", "set 1", 5, 7, 8, 0.5, 0.0)
    close = Finding("greedy, alone", "set 2", 6, 7, 8, 5e-5, 0.0)
    _common.write_json("verify-greedy", result("greedy", [Block("greedy, alone", 4, 64, 2, [wrong, close])]))
    text = verify.page(verify.measured())
    assert "**Greedy: FAILED: 1 outputs differ by more than rounding.** 4 outputs compared, 2 identical, 1 that" in text
    assert "**Seeded: passed.** 3 outputs compared, 3 identical, 0 that part" in text
    assert "| greedy, alone | set 1 | 5 | 7 / 8 | 5.0e-01 | 0.0e+00 |" in text
    assert text.index("Greedy") < text.index("Seeded")
