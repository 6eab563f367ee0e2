"""The author's guide is typed in and followed: its head is tested, trained and decoded with. Other blocks run too."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from dspark.testing import ContractViolation, run_checks
from dspark.testing.contracts import checks_of
from tests.docs.contracts import PAGE, page
from tests.training.tiny import hf_target, responses, settings, write_lines

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "plugins" / "guide.md"


def fenced(path: Path, language: str) -> list[str]:
    """Blocks of a language, in order; of none for an empty string."""
    parts = re.split(r"^```(\w*)\n", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [block for mark, block in zip(parts[1::4], parts[2::4], strict=True) if mark == language]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The guide's plugin, installed as its pyproject.toml says: module and entry point on ``sys.path``."""
    head = fenced(GUIDE, "python")[0]
    project = tomllib.loads(fenced(GUIDE, "toml")[0])["project"]
    (tmp_path / "my_head.py").write_text(head, encoding="utf-8")
    info = tmp_path / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n", encoding="utf-8"
    )
    points = "\n".join(f"{k} = {v}" for k, v in project["entry-points"]["dspark"].items())
    (info / "entry_points.txt").write_text(f"[dspark]\n{points}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    from dspark.testing import suite

    monkeypatch.setattr(suite, "_CATALOGS", {})  # what was loaded before this was installed
    yield tmp_path
    sys.modules.pop("my_head", None)


def test_the_head_takes_forty_lines() -> None:
    head = fenced(GUIDE, "python")[0]
    assert len([line for line in head.splitlines() if line.strip()]) <= 40
    assert max(map(len, head.splitlines())) <= 120


def test_the_head_passes_the_kit_and_trains_and_decodes(
    installed: Path, tiny_model: Any, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dspark import SpeculativeDecoder
    from dspark.training.config import TrainConfig
    from dspark.training.run import Run

    _, _, test, decode = fenced(GUIDE, "python")
    names: dict[str, Any] = {}
    exec(compile(test, "test_my_head.py", "exec"), names)
    outcomes = run_checks(names["TestMyHead"])
    assert [str(o.violation) for o in outcomes if o.violation] == []
    assert sum(not o.skipped for o in outcomes) >= 15

    monkeypatch.chdir(installed)
    (asked,) = map(yaml.safe_load, fenced(GUIDE, "yaml"))
    write_lines(Path(asked["data"]["files"]), responses())
    small = settings(installed, data=asked["data"], run=asked["run"])
    small["drafter"] |= {**asked["drafter"], "gamma": 4}
    torch.manual_seed(0)
    Run(TrainConfig.of(small), say=lambda _: None, target=hf_target(tiny_model, tiny_tokenizer)).train()

    real = SpeculativeDecoder.from_pretrained.__func__  # type: ignore[attr-defined]

    def from_pretrained(cls: Any, target: str, *args: Any, **more: Any) -> Any:
        assert target == "smollm2"
        return real(cls, tiny_model, *args, tokenizer=tiny_tokenizer, cost=None, max_slots=2, max_len=96, **more)

    monkeypatch.setattr(SpeculativeDecoder, "from_pretrained", classmethod(from_pretrained))
    names = {}
    exec(compile(decode, str(GUIDE), "exec"), names)
    assert names["decoder"].stats.drafted > 0
    assert names["decoder"].engine.parts.drafter.head.scale == 2.0


def test_the_head_with_a_state_passes_the_kit(installed: Path) -> None:
    from dspark.testing import SequentialHeadSuite

    head, variant, *_ = fenced(GUIDE, "python")
    (installed / "my_head.py").write_text(f"{head}\n{variant}", encoding="utf-8")
    for name in ("mine", "two-back"):
        made = type("Suite", (SequentialHeadSuite,), {"component": f"my-head/{name}"})
        outcomes = run_checks(made)
        assert [str(o.violation) for o in outcomes if o.violation] == []
        assert sum(not o.skipped for o in outcomes) >= 15


def test_the_failure_that_the_guide_shows_is_what_one_sees(installed: Path) -> None:
    import my_head

    def leaks(self: Any, prev: Any, hidden: Any) -> Any:
        after = torch.cat([prev[:, 1:], prev[:, -1:]], dim=1) if prev.dim() == 2 else prev
        return self.scale * (torch.sigmoid(hidden @ self.gate.T) * self.first[after]) @ self.second.T

    my_head.MyHead.block = leaks
    from dspark.testing import SequentialHeadSuite

    class TestMyHead(SequentialHeadSuite):
        component = "my-head/mine"

    with pytest.raises(ContractViolation) as caught:
        TestMyHead().test_prefix_causality()
    shown = next(b for b in fenced(GUIDE, "") if b.startswith("sequential head"))

    def shape(text: str) -> str:
        return re.sub(r"\d+(\.\d+)?(e-\d+)?", "N", text.strip())

    assert shape(str(caught.value)) == shape(shown)


def test_the_page_of_contracts_is_the_suites() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `python -m tests.docs.contracts`"


def test_blocks_of_the_testing_page(capsys: pytest.CaptureFixture[str]) -> None:
    for block in fenced(ROOT / "docs" / "plugins" / "testing.md", "python"):
        names: dict[str, Any] = {}
        if "my-dist" in block:
            compile(block, "testing.md", "exec")
            continue
        exec(compile(block, "testing.md", "exec"), names)
        if "TestMyHead" in names:
            assert not [o for o in run_checks(names["TestMyHead"]) if o.violation]
            assert any(check == "test_rows" for check, _ in checks_of(names["TestMyHead"]))
    shown = capsys.readouterr().out
    assert "test_non_anticipation holds" in shown
