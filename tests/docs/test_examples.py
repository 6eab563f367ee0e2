"""The documents' Python blocks run, page by page from top to bottom, and the tables of components are the catalog's.

Hub ids stand for a tiny random model; everything else is what the reader would run. A block is left out only where the
line before its fence is ``<!-- needs: network -->``.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from dspark import DSparkWarning, SpeculativeDecoder
from dspark.ops import noise
from dspark.plugins import PluginManager
from dspark.plugins.kinds import Kind

ROOT = Path(__file__).parents[2]
NETWORK = "<!-- needs: network -->"
PAGES = ("README.md", "docs/tutorial.md")
NAMES = {
    "target": Kind.TARGET,
    "drafter": Kind.DRAFTER,
    "sequential head": Kind.SEQUENTIAL_HEAD,
    "confidence estimator": Kind.ESTIMATOR,
    "calibrator": Kind.CALIBRATOR,
    "scheduler": Kind.SCHEDULER,
    "gamma policy": Kind.GAMMA,
    "verifier": Kind.VERIFIER,
    "kernel": Kind.KERNEL,
    "preset": Kind.PRESET,
}


@dataclass(frozen=True)
class Block:
    """One fenced Python block: where it begins, its source, and whether it has to reach the network."""

    line: int
    source: str
    network: bool


def blocks(page: str) -> list[Block]:
    found: list[Block] = []
    start, before = 0, ""
    kept: list[str] | None = None
    for number, line in enumerate((ROOT / page).read_text(encoding="utf-8").splitlines(), start=1):
        if kept is None and line.startswith("```python"):
            kept, start = [], number
        elif kept is not None and line.startswith("```"):
            found.append(Block(start, "\n".join(kept), before == NETWORK))
            kept = None
        elif kept is not None:
            kept.append(line)
        elif line.strip():
            before = line.strip()
            continue
        if kept is None:
            before = ""
    return found


@pytest.fixture
def stand_ins(
    tiny_model: Any, tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[SpeculativeDecoder]]:
    """The tiny model for every hub id, small caches, and files in a folder of the test; yields the decoders made."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    made: list[SpeculativeDecoder] = []
    real = SpeculativeDecoder.from_pretrained.__func__  # type: ignore[attr-defined]

    def from_pretrained(cls: Any, target: Any, *args: Any, **settings: Any) -> Any:
        if isinstance(target, str):
            settings.setdefault("tokenizer", tiny_tokenizer)
            target = tiny_model
        settings.setdefault("max_slots", 8)
        settings.setdefault("max_len", 256)
        made.append(real(cls, target, *args, **settings))
        return made[-1]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(SpeculativeDecoder, "from_pretrained", classmethod(from_pretrained))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: tiny_model)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: tiny_tokenizer)
    yield made
    for decoder in made:
        decoder.close()


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run(
    page: str, stand_ins: list[SpeculativeDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("page")  # a real module, which dataclasses ask for
    monkeypatch.setitem(sys.modules, "page", module)
    names = vars(module)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DSparkWarning)
        # a random model seldom repeats itself, and its forward takes so little that its cost can look flat
        warnings.filterwarnings("ignore", "no draft accepted|flat-cost", DSparkWarning)
        for block in blocks(page):
            if not block.network:
                # the padding keeps the page's line numbers in tracebacks
                exec(compile("\n" * block.line + block.source, str(ROOT / page), "exec"), names)
    assert stand_ins
    assert sum(d.stats.acceptance.committed for d in stand_ins) > 0


def test_few_blocks_need_the_network() -> None:
    assert [block.network for block in blocks("README.md")].count(True) == 0
    assert [block.network for block in blocks("docs/tutorial.md")].count(True) <= 1


def test_the_marker_is_seen_only_right_before_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = f"{NETWORK}\n```python\na = 1\n```\n\n{NETWORK}\n\nText.\n\n```python\nb = 2\n```\n"
    (tmp_path / "page.md").write_text(page, encoding="utf-8")
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert blocks("page.md") == [Block(2, "a = 1", True), Block(10, "b = 2", False)]


def table(page: str, first_cell: str) -> list[list[str]]:
    """Rows of the table whose header begins with this cell."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_cell} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def shipped(kind: Kind) -> set[str]:
    return {entry.name for entry in PluginManager(discover=False, environ={}).load().of(kind)}


def test_the_readme_lists_what_ships() -> None:
    listed = {row[0]: set(re.findall(r"`([^`]+)`", row[1])) for row in table("README.md", "part")}
    assert {part: listed.get(part) for part in NAMES} == {part: shipped(kind) for part, kind in NAMES.items()}
    assert {kind for kind in Kind if shipped(kind)} == set(NAMES.values())


def test_the_tutorial_lists_every_scheduler_and_which_need_a_cost_table() -> None:
    listed = {row[0].strip("`"): row[1] == "yes" for row in table("docs/tutorial.md", "scheduler")}
    catalog = PluginManager(discover=False, environ={}).load()
    assert listed == {entry.name: entry.capabilities.needs_cost for entry in catalog.of(Kind.SCHEDULER)}


def test_the_tutorial_describes_every_sampling_parameter() -> None:
    import dataclasses

    from dspark import SamplingParams

    text = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    internal = {"request_key"}
    missing = [f.name for f in dataclasses.fields(SamplingParams) if f.name not in internal and f.name not in text]
    assert missing == []


def test_the_method_page_defines_the_noise_that_is_drawn() -> None:
    """The Python of the page gives the values of the package, for row keys and tokens at their extremes too."""
    names: dict[str, Any] = {}
    for block in blocks("docs/method.md"):
        exec(compile(block.source, "docs/method.md", "exec"), names)
    seeds, positions = np.array([0, 3, 2**64 - 1], dtype=np.uint64), np.array([0, 9, 70_000])
    drawn = noise.gumbel(seeds, positions, 500).numpy()
    keys = noise.row_keys(noise.NOISE, seeds, positions)
    page = [[names["gumbel"](int(key), token) for token in range(500)] for key in keys]
    np.testing.assert_allclose(drawn, np.array(page), rtol=1e-5, atol=1e-6)
