"""Drafters side by side on the real engine: resumed, paired, summarised, and put on a page."""

from __future__ import annotations

import json
import re
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from dspark.config import SamplingParams
from dspark.errors import EvaluationError
from dspark.evaluation.acceptance import Bootstrap
from dspark.evaluation.collect import Item, Sampling
from dspark.evaluation.compare import Run, prefixes_of, run_forced, run_prompts, summarise
from dspark.evaluation.report import eval_page
from tests.evaluation.conftest import GOLDEN, ITEMS, Talk

DSPARK, DFLASH = (str(GOLDEN / f"deepspec_{name}") for name in ("dspark_vanilla", "dflash"))
SAMPLING = Sampling(SamplingParams(max_tokens=18, temperature=1.0), seed=1)
SPAN = 6


def run(decoder: Callable[..., Any], folder: Path, name: str, items: list[Item] = ITEMS, **more: Any) -> Run:
    settings = {k: more.pop(k) for k in list(more) if k in ("gamma", "scheduler", "scheduler_config")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        built, log = decoder(name, **settings)
        label = Path(name).name
        made = run_prompts(built, log, items, SAMPLING, folder / f"{label}.jsonl", label=label, **more)
        run_forced(
            made, built, prefixes_of(made), SAMPLING, folder / f"{label}-f.jsonl", span=SPAN, anchors=4,
            restart=more.get("restart", False),
        )  # fmt: skip
    return made


@pytest.fixture
def runs(decoder: Callable[..., Any], tmp_path: Path) -> list[Run]:
    return [run(decoder, tmp_path, name) for name in (DSPARK, DFLASH, "ngram")]


class Counter:
    """Notes what progress it was told."""

    def __init__(self) -> None:
        self.parts: list[tuple[str, int, int]] = []
        self.pieces = 0
        self.out = 0

    def begin(self, what: str, total: int, done: int) -> None:
        self.parts.append((what, total, done))

    def done(self, count: int) -> None:
        self.pieces += count

    def tokens(self, count: int) -> None:
        self.out += count


def test_a_summary_adds_up(runs: list[Run]) -> None:
    result = json.loads(json.dumps(summarise(runs, Bootstrap(300), {"x": 1}), allow_nan=False))
    assert [d["label"] for d in result["drafters"]] == ["deepspec_dspark_vanilla", "deepspec_dflash", "ngram"]
    assert result["settings"]["prompts"] == {"alpha": 4, "beta": 4}
    for made, figures in zip(runs, result["drafters"], strict=True):
        rounds = [r.rounds for r in made.records.values()]
        assert figures["rounds"] == sum(map(len, rounds))
        assert figures["positions"]["offered"][0] == sum(int((r.offered > 0).sum()) for r in rounds)
        assert figures["tokens"] == sum(d["tokens"] for d in figures["datasets"].values())
        alpha = figures["datasets"]["alpha"]
        assert figures["accepted_length"]["alpha"][0] == pytest.approx(alpha["tokens"] / alpha["rounds"])
        mean = (figures["accepted_length"]["alpha"][0] + figures["accepted_length"]["beta"][0]) / 2
        assert figures["accepted_length"]["macro"][0] == pytest.approx(mean)
        full = figures["thresholds"][0]
        assert full["accepted_length"] == pytest.approx(figures["tokens"] / figures["rounds"])
        assert figures["calibration"]["count"] == figures["positions"]["offered"]
    first, second, third = result["drafters"]
    assert first["gain"] is None
    ratio = second["accepted_length"]["macro"][0] / first["accepted_length"]["macro"][0]
    assert second["gain"]["macro"][0] == pytest.approx(ratio - 1)
    assert third["teacher_forced"] is None, "prompt lookup has no law along a text"
    for figures in (first, second):
        forced = figures["teacher_forced"]
        assert forced["responses"] == 8
        assert all(0 < low <= value <= high < 1 for value, low, high in forced["overlap"])
    assert first["about"]["layers"] == 2
    assert first["about"]["head"] == "markov"


def test_conditional_acceptance_is_what_the_laws_overlap(runs: list[Run]) -> None:
    """Same law, other anchors: acceptance at position 1 lies near 1 - TV, within the noise of some 100 rounds."""
    figures = summarise(runs[:1], Bootstrap(200), {})["drafters"][0]
    forced, drawn = figures["teacher_forced"]["overlap"][0][0], figures["positions"]["conditional_acceptance"][0]
    assert abs(forced - drawn) < 0.15


def test_what_is_finished_is_not_done_again(decoder: Callable[..., Any], tmp_path: Path, runs: list[Run]) -> None:
    path = tmp_path / "deepspec_dspark_vanilla.jsonl"
    whole = path.read_bytes()
    lines = whole.split(b"\n")
    path.write_bytes(b"\n".join(lines[:5]) + b"\n" + lines[5][:40])
    show = Counter()
    again = run(decoder, tmp_path, DSPARK, show=show)
    assert show.parts == [("deepspec_dspark_vanilla", 8, 4)]
    assert show.pieces == 4
    assert show.out > 0
    assert set(again.records) == set(runs[0].records)
    for key, record in again.records.items():
        assert record.samples == runs[0].records[key].samples
    idle = Counter()
    run(decoder, tmp_path, DSPARK, show=idle)
    assert (idle.parts[0][2], idle.pieces, idle.out) == (8, 0, 0)
    fewer = run(decoder, tmp_path, DSPARK, items=ITEMS[:3])
    assert list(fewer.records) == [i.key for i in ITEMS[:3]], "what was not asked for is left alone"


def test_other_settings_are_refused(decoder: Callable[..., Any], tmp_path: Path, runs: list[Run]) -> None:
    with pytest.raises(EvaluationError, match=r"other settings .*gamma: 4 there, 2 here"):
        run(decoder, tmp_path, DSPARK, gamma=2)
    changed = [Item(i.dataset, i.name, "new", i.begin) for i in ITEMS]
    with pytest.raises(EvaluationError, match="another prompt"):
        run(decoder, tmp_path, DSPARK, items=changed)
    assert len(run(decoder, tmp_path, DSPARK, gamma=2, restart=True).records) == 8


def test_scheduled_rounds_are_refused(decoder: Callable[..., Any], tmp_path: Path) -> None:
    for settings in ({"scheduler": "off"}, {"scheduler_config": {"length": 2}}):
        with pytest.raises(EvaluationError, match="full length"):
            run(decoder, tmp_path, DSPARK, **settings)
    assert not list(tmp_path.iterdir())


def test_a_drafters_content_is_part_of_its_settings(
    decoder: Callable[..., Any], drafter: Callable[..., str], tmp_path: Path
) -> None:
    """Weights that were trained on in the same folder are another drafter."""
    from safetensors.torch import load_file, save_file

    folder = drafter()
    run(decoder, tmp_path, folder, items=ITEMS[:1])
    tensors = load_file(f"{folder}/model.safetensors")
    tensors["norm.weight"] = tensors["norm.weight"] * 1.001
    save_file(tensors, f"{folder}/model.safetensors")
    with pytest.raises(EvaluationError, match=r"other settings .*drafter: "):
        run(decoder, tmp_path, folder, items=ITEMS[:1])


def test_drafters_are_compared_on_what_all_finished(runs: list[Run]) -> None:
    lost = runs[1].records.pop("alpha:2")
    runs[1].failed["alpha:2"] = "too long"
    result = summarise(runs, Bootstrap(50), {})
    assert result["left_out"] == ["alpha:2"]
    assert result["settings"]["prompts"] == {"alpha": 3, "beta": 4}
    assert result["drafters"][0]["rounds"] < sum(len(r.rounds) for r in runs[0].records.values())
    assert result["drafters"][1]["failed"] == {"alpha:2": "too long"}
    runs[0].records.clear()
    runs[1].records["alpha:2"] = lost
    with pytest.raises(EvaluationError, match=r"no prompt was finished by every drafter \(alpha:2: too long\)"):
        summarise(runs, Bootstrap(50), {})


def test_rounds_wanted_end_a_run_early(decoder: Callable[..., Any], tmp_path: Path) -> None:
    built, log = decoder("ngram", max_slots=1)
    items = [Item("loop", str(i), "x", lambda i=i: Talk([[5, 6, 7, 5, 6, 7, 5, i]])) for i in range(30)]
    show = Counter()
    sampling = Sampling(SamplingParams(max_tokens=16))
    made = run_prompts(built, log, items, sampling, tmp_path / "r.jsonl", label="r", rounds=3, show=show)
    drafted = [len(r.rounds.drafted()) for r in made.records.values()]
    assert sum(drafted) >= 3 > sum(drafted[:-1])
    assert show.parts == [("r", 3, 0)]
    assert show.pieces == sum(drafted)
    assert log.pending == 0


def test_rounds_of_prompts_that_fail_are_made_up_for(
    decoder: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Live rounds count towards those wanted, until their prompt fails; then further prompts begin."""
    from dspark.evaluation import compare

    class Failing(compare.Collection):
        def _take(self, turn: Any, result: Any) -> None:
            if int(turn.item.name) < 3:
                result.error = RuntimeError("broken")
            super()._take(turn, result)

    monkeypatch.setattr(compare, "Collection", Failing)
    items = [Item("loop", str(i), "x", lambda i=i: Talk([[5, 6, 7, 5, 6, 7, 5, i]])) for i in range(30)]
    built, log = decoder("ngram", max_slots=3)
    sampling = Sampling(SamplingParams(max_tokens=16))
    made = run_prompts(built, log, items, sampling, tmp_path / "r.jsonl", label="r", rounds=4)
    assert set(made.failed) == {"loop:0", "loop:1", "loop:2"}
    assert sum(len(r.rounds.drafted()) for r in made.records.values()) >= 4
    assert 3 < len(made.records) + 3 < 12, "and no more than needed"


class Checker(HTMLParser):
    """Notes what a page would load, and whether its tags close."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.loads += [f"{tag} {name}={value}" for name, value in attrs if name in ("src", "href", "srcset")]
        if tag in ("script", "link", "img", "iframe"):
            self.loads.append(tag)
        if tag not in ("meta", "circle", "path", "polyline", "rect"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("circle", "path", "polyline", "rect"):
            assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing(decoder: Callable[..., Any], tmp_path: Path, runs: list[Run]) -> None:
    runs[0].label = "deepspec_dspark_vanilla @4"
    short = run(decoder, tmp_path / "short", DSPARK, gamma=2)
    short.label = "deepspec_dspark_vanilla @2"
    runs[1].failed["<script>alert(1)</script>"] = "why & how"
    result = summarise([*runs, short], Bootstrap(50), {"target": {"name": "tiny <1>"}})
    page = eval_page(json.loads(json.dumps(result)))
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert checker.loads == []
    assert "url(" not in page
    assert "tiny &lt;1&gt;" in page
    for chart in re.findall(r"<svg.*?</svg>", page):
        ET.fromstring(chart)
    titles = re.findall(r"<figcaption>(.*?)</figcaption>", page)
    assert "Block length: accepted length against gamma" in titles
    assert "Depth: accepted length against draft layers" not in titles, "all have one depth"
    assert "1 - TV by position, on identical prefixes" in titles
    assert sum("threshold" in t for t in titles) == 3
    macro = result["drafters"][1]["accepted_length"]["macro"]
    assert f"{macro[0]:.2f} [{macro[1]:.2f}, {macro[2]:.2f}]" in page
    for made in result["drafters"]:
        made["about"]["layers"] = 2 if made["label"] == "ngram" else 3
        made["about"]["head"], made["gamma"] = "none", 4
    assert "Depth: accepted length against draft layers" in eval_page(result)
