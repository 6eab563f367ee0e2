"""Charts as SVG text: lines with intervals, and grouped bars. No plotting library, nothing to load.

Colours are classes (``c0``, ``c1``, ..) that the page styles, so that charts follow its light and dark theme.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 520, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 14, 44
LETTER, SLANT = 7, 40
"""Width of a letter, and further height for names that are slanted since they would not fit side by side."""
COLOURS = 8
TICKS = 6


@dataclass(frozen=True, slots=True)
class Series:
    """One line, or one bar of each group. Points whose y is None are left out.

    Attributes:
        label: in the legend; empty for none.
        xs, ys: points.
        lows, highs: ends of an interval at each point; empty for none.
        sizes: area of each point's mark relative to the largest; empty for equal marks.
        plain: a thin dashed line without marks.
    """

    label: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    lows: Sequence[float] = ()
    highs: Sequence[float] = ()
    sizes: Sequence[float] = ()
    plain: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """A range of values on pixels, and what stands beside it; ``names`` stand at the ticks instead of their numbers."""

    label: str
    low: float
    high: float
    ticks: tuple[float, ...] = field(default=())
    names: tuple[str, ...] = field(default=())

    @classmethod
    def around(
        cls, label: str, values: Sequence[float], *, low: float | None = None, high: float | None = None
    ) -> Axis:
        """A range with round ticks that holds all values; ``low`` and ``high`` fix its ends."""
        finite = [v for v in values if math.isfinite(v)] or [0.0, 1.0]
        bottom = min(finite) if low is None else low
        top = max(finite) if high is None else high
        if top <= bottom:
            bottom, top = bottom - 0.5, bottom + 0.5
        step = nice_step((top - bottom) / TICKS)
        first = math.floor(bottom / step + 1e-9) if low is None else math.ceil(bottom / step - 1e-9)
        last = math.ceil(top / step - 1e-9) if high is None else math.floor(top / step + 1e-9)
        ticks = tuple(round(i * step, 10) for i in range(first, last + 1))
        return cls(label, ticks[0] if low is None else bottom, ticks[-1] if high is None else top, ticks)

    @classmethod
    def of_integers(cls, label: str, values: Sequence[float]) -> Axis:
        """A tick at each of some integers, with a margin."""
        ticks = tuple(sorted({float(v) for v in values})) or (0.0,)
        margin = max(0.3, 0.05 * (ticks[-1] - ticks[0]))
        return cls(label, ticks[0] - margin, ticks[-1] + margin, ticks)

    @classmethod
    def named(cls, label: str, names: Sequence[str]) -> Axis:
        """Names side by side: name i stands at i."""
        ticks = tuple(float(i) for i in range(len(names)))
        return cls(label, -0.3, max(len(names) - 0.7, 0.3), ticks, tuple(names))

    def share(self, value: float) -> float:
        """Where a value lies: 0 at the low end, 1 at the high one."""
        return (value - self.low) / (self.high - self.low)


def nice_step(rough: float) -> float:
    """The smallest of 1, 2, 2.5, 5 or 10 times a power of ten that is not below ``rough``."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(k * power for k in (1, 2, 2.5, 5, 10) if k * power >= rough * (1 - 1e-9))


def line_chart(title: str, series: Sequence[Series], x: Axis, y: Axis) -> str:
    """Lines with marks and intervals."""
    body = [_frame(x, y)]
    for i, one in enumerate(series):
        points = [(_x(x, a), _y(y, b), k) for k, (a, b) in enumerate(zip(one.xs, one.ys, strict=True)) if b is not None]
        name = "ref" if one.plain else f"c{i % COLOURS}"
        parts = []
        if len(points) > 1:
            path = " ".join(f"{px:.1f},{py:.1f}" for px, py, _ in points)
            parts.append(f'<polyline class="line" points="{path}"/>')
        if not one.plain:
            biggest = max(one.sizes, default=1.0) or 1.0
            for px, py, k in points:
                if one.lows:
                    top, bottom = _y(y, one.highs[k]), _y(y, one.lows[k])
                    parts.append(f'<path class="whisker" d="M{px:.1f} {top:.1f}V{bottom:.1f}"/>')
                radius = 3.0 if not one.sizes else 1.5 + 5.0 * math.sqrt(one.sizes[k] / biggest)
                hint = f"{one.label}: {one.xs[k]:g}, {one.ys[k]:.4g}" if one.ys[k] is not None else one.label
                mark = f'<circle cx="{px:.1f}" cy="{py:.1f}" r="{radius:.1f}">'
                parts.append(f"{mark}<title>{escape(hint)}</title></circle>")
        body.append(f'<g class="{name}">{"".join(parts)}</g>')
    return _svg(title, "".join(body), [s.label for s in series if not s.plain])


def bar_chart(title: str, groups: Sequence[str], series: Sequence[Series], y: Axis, x_label: str = "") -> str:
    """Grouped bars: bar i of a series belongs to group i."""
    x = Axis(x_label, 0.0, float(max(1, len(groups))))
    body = [_frame(x, y)]
    width = (WIDTH - LEFT - RIGHT) / max(1, len(groups)) * 0.8 / max(1, len(series))
    zero = _y(y, min(max(0.0, y.low), y.high))
    for i, one in enumerate(series):
        parts = []
        for k, value in enumerate(one.ys):
            if value is None:
                continue
            left = _x(x, k + 0.1) + i * width
            top = _y(y, value)
            box = f'x="{left:.1f}" y="{min(top, zero):.1f}" width="{width * 0.94:.1f}" height="{abs(zero - top):.1f}"'
            parts.append(f"<rect {box}><title>{escape(f'{one.label} {groups[k]}: {value:.4g}')}</title></rect>")
            if one.lows:
                middle = left + width * 0.47
                ends = f"M{middle:.1f} {_y(y, one.highs[k]):.1f}V{_y(y, one.lows[k]):.1f}"
                parts.append(f'<path class="whisker dark" d="{ends}"/>')
        body.append(f'<g class="c{i % COLOURS}">{"".join(parts)}</g>')
    slot = (WIDTH - LEFT - RIGHT) / max(1, len(groups))
    slanted = max(map(len, groups), default=0) * LETTER > slot
    for k, name in enumerate(groups):
        at, down = _x(x, k + 0.5), HEIGHT - BOTTOM + 16
        turn = f'text-anchor="end" transform="rotate(-35 {at:.1f} {down})"' if slanted else 'text-anchor="middle"'
        body.append(f'<text x="{at:.1f}" y="{down}" {turn}>{escape(name)}</text>')
    return _svg(title, "".join(body), [s.label for s in series], SLANT if slanted else 0)


def _x(axis: Axis, value: float) -> float:
    return LEFT + axis.share(value) * (WIDTH - LEFT - RIGHT)


def _y(axis: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - axis.share(min(max(value, axis.low), axis.high)) * (HEIGHT - TOP - BOTTOM)


def _frame(x: Axis, y: Axis) -> str:
    """Grid, ticks and labels."""
    parts = []
    for tick in y.ticks:
        at = _y(y, tick)
        parts.append(f'<path class="grid" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for name, tick in zip(x.names or [f"{tick:g}" for tick in x.ticks], x.ticks, strict=True):
        at = _x(x, tick)
        parts.append(f'<path class="grid" d="M{at:.1f} {HEIGHT - BOTTOM}v4"/>')
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{escape(name)}</text>')
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<path class="axis" d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x.label)}</text>'
    )
    parts.append(
        f'<text transform="rotate(-90 14 {middle:.1f})" x="14" y="{middle:.1f}" text-anchor="middle">'
        f"{escape(y.label)}</text>"
    )
    return "".join(parts)


def _svg(title: str, body: str, labels: Sequence[str], more: int = 0) -> str:
    """The whole figure with its title and legend, as HTML; ``more`` pixels of height."""
    named = [(i, label) for i, label in enumerate(labels) if label]
    legend = "".join(f'<span class="c{i % COLOURS}"><i></i>{escape(label)}</span>' for i, label in named)
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT + more}" role="img" aria-label="{escape(title)}">{body}</svg>'
        f'<div class="legend">{legend}</div></figure>'
    )
