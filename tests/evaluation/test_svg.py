"""Charts: well-formed, in their frame, and what they show is what they were given."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from dspark.evaluation.svg import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    Series,
    bar_chart,
    line_chart,
    nice_step,
)

UNIT = Axis.around("share", [0.0, 1.0], low=0.0, high=1.0)


def svg_of(chart: str) -> ET.Element:
    return ET.fromstring(chart[chart.index("<svg") : chart.index("</svg>") + 6])


def group(chart: str, name: str) -> ET.Element:
    return next(g for g in svg_of(chart).iter("g") if g.get("class") == name)


def test_lines_go_through_their_points() -> None:
    x = Axis.of_integers("position", [1, 2, 3])
    chart = line_chart(
        "t", [Series("a", [1, 2, 3], [0.0, 0.5, 1.0]), Series("b", [1, 2, 3], [None, 0.2, None])], x, UNIT
    )
    circles = group(chart, "c0").findall("circle")
    heights = [float(c.get("cy", "")) for c in circles]
    assert heights == [HEIGHT - BOTTOM, (TOP + HEIGHT - BOTTOM) / 2, TOP]
    lefts = [float(c.get("cx", "")) for c in circles]
    assert lefts[1] - lefts[0] == pytest.approx(lefts[2] - lefts[1], abs=0.11)
    assert LEFT < lefts[0] < lefts[2] < WIDTH - RIGHT
    assert len(group(chart, "c1").findall("circle")) == 1, "what has no value is left out"
    assert group(chart, "c1").find("polyline") is None
    assert [t.text for t in svg_of(chart).iter("text")][-2:] == ["position", "share"]


def test_intervals_sizes_and_reference_lines() -> None:
    x = Axis.around("x", [0, 1], low=0.0, high=1.0)
    wide = Series("w", [0.2, 0.8], [0.5, 0.5], lows=[0.4, 0.1], highs=[0.6, 0.9], sizes=[1.0, 100.0])
    chart = line_chart("t", [wide, Series("", [0, 1], [0, 1], plain=True)], x, UNIT)
    radii = [float(c.get("r", "")) for c in group(chart, "c0").findall("circle")]
    assert radii[0] < 3 < radii[1]
    assert len(group(chart, "c0").findall("path")) == 2
    assert not group(chart, "ref").findall("circle")
    assert chart.count("<span") == 1, "reference lines have no legend"


def test_bars_stand_on_zero_within_their_group() -> None:
    y = Axis.around("tokens", [0.0, 4.0], low=0.0)
    chart = bar_chart("t", ["one", "two"], [Series("a", [0, 1], [1.0, 4.0]), Series("b", [0, 1], [2.0, None])], y)
    (first, second), (other,) = (group(chart, c).findall("rect") for c in ("c0", "c1"))
    for bar, value in ((first, 1.0), (second, 4.0), (other, 2.0)):
        assert float(bar.get("height", "")) == pytest.approx(value / y.high * (HEIGHT - TOP - BOTTOM), abs=0.1)
        assert float(bar.get("y", "")) + float(bar.get("height", "")) == pytest.approx(HEIGHT - BOTTOM, abs=0.11)
    middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
    assert float(first.get("x", "")) < float(other.get("x", "")) < middle < float(second.get("x", ""))
    texts = [t.text for t in svg_of(chart).iter("text")]
    assert "one" in texts
    assert "rotate(-35" not in chart
    long = bar_chart("t", ["livecodebench"] * 9, [Series("a", range(9), [1.0] * 9)], y)
    assert long.count("rotate(-35") == 9, "names that would overlap are slanted"


def test_text_is_escaped() -> None:
    chart = line_chart("a < b & c", [Series('"<x>"', [1], [0.5])], Axis.of_integers("k", [1]), UNIT)
    assert "<x>" not in chart
    assert "a &lt; b &amp; c" in chart
    svg_of(chart)


def test_axes_have_round_ticks_and_hold_their_values() -> None:
    axis = Axis.around("y", [1.37, 2.91])
    assert axis.low <= 1.37 < 2.91 <= axis.high
    assert axis.ticks[0] == axis.low
    assert len(axis.ticks) <= 8
    assert axis.ticks == tuple(round(t, 6) for t in axis.ticks)
    assert Axis.around("y", []).share(0.5) == 0.5
    flat = Axis.around("y", [2.0, 2.0])
    assert flat.low < 2.0 < flat.high
    fixed = Axis.around("y", [0.0, 0.137], low=0.0)
    assert fixed.low == 0.0
    assert fixed.high >= 0.137
    assert Axis.of_integers("k", [4, 2, 4]).ticks == (2.0, 4.0)
    for rough, nice in ((0.013, 0.02), (0.2, 0.2), (0.21, 0.25), (3.1, 5.0), (7.0, 10.0)):
        assert nice_step(rough) == pytest.approx(nice)
