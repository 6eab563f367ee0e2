"""The figures of an evaluation and of a calibration, from their JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dspark.evaluation.svg import Axis, Series, bar_chart, line_chart

Drafters = Sequence[Mapping[str, Any]]

LEAST_ROUNDS = 10
"""Rounds of a bin that a reliability diagram shows."""


def position_curves(drafters: Drafters) -> list[str]:
    """Conditional acceptance and unconditional acceptance in decoding, and 1 - TV on identical prefixes."""
    positions = Axis.of_integers("position", range(1, 1 + max(d["gamma"] for d in drafters)))
    rates = Axis.around("share", [0.0, 1.0], low=0.0, high=1.0)
    kinds = {
        "Conditional acceptance by position, in decoding": "conditional_acceptance",
        "Survival by position, in decoding": "acceptance",
    }
    charts = [
        line_chart(title, [_by_position(d, d["positions"][key]) for d in drafters], positions, rates)
        for title, key in kinds.items()
    ]
    forced = [d for d in drafters if d["teacher_forced"]]
    if forced:
        lines = [_with_intervals(d["label"], d["teacher_forced"]["overlap"]) for d in forced]
        charts.append(line_chart("1 - TV by position, on identical prefixes", lines, positions, rates))
    return charts


def _by_position(drafter: Mapping[str, Any], values: Sequence[float | None]) -> Series:
    return Series(drafter["label"], range(1, len(values) + 1), values)


def _with_intervals(label: str, values: Sequence[Sequence[float]], xs: Sequence[float] = ()) -> Series:
    """From [value, low, high] a point."""
    value, low, high = zip(*values, strict=True)
    return Series(label, xs or range(1, len(values) + 1), value, low, high)


def length_bars(drafters: Drafters) -> str:
    """Accepted length by data set."""
    names = list(drafters[0]["accepted_length"])
    series = []
    for d in drafters:
        value, low, high = zip(*(d["accepted_length"][name] for name in names), strict=True)
        series.append(Series(d["label"], range(len(names)), value, low, high))
    top = max(v for s in series for v in s.highs)
    return bar_chart("Accepted length by data set", names, series, Axis.around("tokens a round", [0, top], low=0.0))


def block_ablation(drafters: Drafters) -> str | None:
    """Accepted length against gamma; None unless one drafter ran at several."""
    return _ablation(drafters, "Block length", "gamma", lambda d: d["gamma"], _without_gamma)


def depth_ablation(drafters: Drafters) -> str | None:
    """Accepted length against draft layers; None unless drafters that differ in depth ran at one gamma."""
    deep = [d for d in drafters if d["about"].get("layers")]
    return _ablation(
        deep, "Depth", "draft layers", lambda d: d["about"]["layers"], lambda d: f"{_kind(d)}, gamma {d['gamma']}"
    )


def _kind(drafter: Mapping[str, Any]) -> str:
    return str(drafter["about"].get("head", drafter["about"]["name"]))


def _without_gamma(drafter: Mapping[str, Any]) -> str:
    return str(drafter["label"]).removesuffix(f" @{drafter['gamma']}")


def _ablation(drafters: Drafters, title: str, what: str, value: Any, group: Any) -> str | None:
    groups: dict[str, dict[float, Any]] = {}
    for d in drafters:
        groups.setdefault(group(d), {})[float(value(d))] = d["accepted_length"]["macro"]
    kept = {name: dict(sorted(points.items())) for name, points in groups.items() if len(points) > 1}
    if not kept:
        return None
    series = [_with_intervals(name, list(points.values()), list(points)) for name, points in kept.items()]
    values = [v for s in series for v in (*s.lows, *s.highs)]
    xs = [x for points in kept.values() for x in points]
    axis = Axis.around("accepted length, macro average", values)
    return line_chart(f"{title}: accepted length against {what}", series, Axis.of_integers(what, xs), axis)


def threshold_bars(drafters: Drafters) -> list[str]:
    """Acceptance rate and drafts verified a round, by static threshold on c_k."""
    names = [f"{t['threshold']:g}" for t in drafters[0]["thresholds"]]
    charts = []
    for key, title, label in (
        ("acceptance", "Share of verified drafts that is accepted, by threshold", "share"),
        ("verified", "Drafts verified a round, by threshold", "drafts"),
        ("accepted_length", "Accepted length, by threshold", "tokens a round"),
    ):
        series = [Series(d["label"], range(len(names)), [t[key] for t in d["thresholds"]]) for d in drafters]
        top = max([1.0, *(float(v or 0) for s in series for v in s.ys)])
        charts.append(bar_chart(title, names, series, Axis.around(label, [0, top], low=0.0), "threshold on c_k"))
    return charts


def reliability(title: str, judged: Mapping[str, Any]) -> str:
    """Survival that was predicted against what survived, a line a position; the larger a mark, the more rounds. Bins of
    a few rounds are left out."""
    unit = Axis.around("share that survived", [0, 1], low=0.0, high=1.0)
    lines = []
    for k, b in enumerate(judged["bins"], 1):
        kept = [i for i, count in enumerate(b["count"]) if count >= LEAST_ROUNDS]
        points = ([b[name][i] for i in kept] for name in ("predicted", "observed", "count"))
        xs, ys, sizes = points
        lines.append(Series(f"position {k}", xs, ys, sizes=sizes))
    exact = Series("", [0.0, 1.0], [0.0, 1.0], plain=True)
    axis = Axis.around("survival that was predicted", [0, 1], low=0.0, high=1.0)
    return line_chart(title, [*lines, exact], axis, unit)


def ece_bars(judged: Mapping[str, Mapping[str, Any]]) -> str:
    """ECE by position of several judgements, with what noise alone shows of the last."""
    some = list(judged.values())[-1]
    names = [str(k) for k in range(1, 1 + len(some["ece"]))]
    series = [Series(label, range(len(names)), j["ece"]) for label, j in judged.items()]
    series.append(Series("noise alone, 95th percentile", range(len(names)), some["noise_ece_95"]))
    top = max([0.01, *(float(v or 0) for s in series for v in s.ys)])
    return bar_chart("ECE of survival by position", names, series, Axis.around("ECE", [0, top], low=0.0), "position")
