"""What the figures leave out, and when an ablation is drawn."""

from __future__ import annotations

from typing import Any

from dspark.evaluation import figures
from tests.evaluation.test_svg import group, svg_of


def drafter(label: str, gamma: int, layers: int | None = None, length: float = 2.0) -> dict[str, Any]:
    macro = [length, length - 0.1, length + 0.1]
    about = {"name": "dspark/dspark", "head": "markov"} | ({} if layers is None else {"layers": layers})
    return {"label": label, "gamma": gamma, "about": about, "accepted_length": {"a": macro, "macro": macro}}


def test_an_ablation_needs_one_drafter_at_several_values() -> None:
    assert figures.block_ablation([drafter("x", 3), drafter("y", 5)]) is None, "two drafters are no ablation"
    chart = figures.block_ablation([drafter("x @5", 5, length=2.5), drafter("x @3", 3), drafter("y @3", 3)])
    assert chart is not None
    points = [c.find("title").text for c in group(chart, "c0").findall("circle")]  # type: ignore[union-attr]
    assert points == ["x: 3, 2", "x: 5, 2.5"], "in the order of gamma"
    assert len(list(svg_of(chart).iter("g"))) == 1
    assert figures.depth_ablation([drafter("a", 5, 2), drafter("b", 3, 4)]) is None, "depth alone may differ"
    assert figures.depth_ablation([drafter("a", 5), drafter("b", 5, 2)]) is None, "prompt lookup has no depth"
    deep = figures.depth_ablation([drafter("a", 5, 2), drafter("b", 5, 4, 3.0), drafter("c", 3, 4)])
    assert deep is not None
    points = [c.find("title").text for c in group(deep, "c0").findall("circle")]  # type: ignore[union-attr]
    assert points == ["markov, gamma 5: 2, 2", "markov, gamma 5: 4, 3"]


def test_reliability_shows_bins_with_enough_rounds() -> None:
    bins = [{"predicted": [None, 0.1, 0.9], "observed": [None, 0.2, 0.8], "count": [0, 9, 40]}]
    chart = figures.reliability("t", {"bins": bins})
    assert [c.find("title").text for c in group(chart, "c0").findall("circle")] == ["position 1: 0.9, 0.8"]  # type: ignore[union-attr]


def test_noise_is_that_of_the_last_judgement() -> None:
    def judged(ece: float, noise: float) -> dict[str, Any]:
        return {"ece": [ece], "noise_ece_95": [noise]}

    chart = figures.ece_bars({"before": judged(0.08, 0.05), "after": judged(0.02, 0.01)})
    titles = [t.text for t in svg_of(chart).iter("title")]
    assert titles == ["before 1: 0.08", "after 1: 0.02", "noise alone, 95th percentile 1: 0.01"]
