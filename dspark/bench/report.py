"""Tables and figures of sweeps and simulations, from their JSON: text, and one page that loads nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dspark.evaluation.report import grid, note, page, section, table
from dspark.evaluation.svg import Axis, Series, line_chart

Rows = Sequence[Mapping[str, Any]]
Table = tuple[list[str], list[list[str]]]


def number(value: Any, digits: int = 1) -> str:
    """A number, or a dash for none."""
    return "-" if not _known(value) else f"{value:.{digits}f}"


def times(value: Sequence[float] | None) -> str:
    """``1.62x [1.58, 1.66]``, or a dash."""
    return "-" if not value or not _known(value[0]) else f"{value[0]:.2f}x [{value[1]:.2f}, {value[2]:.2f}]"


def _known(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def sweep_rows(result: Mapping[str, Any]) -> Table:
    """A row a system and load."""
    head = ["load", "system", "tokens/s", "over plain", "over best static", "over others", "per user", "first token, s",
            "tokens a round", "verified", "same as plain"]  # fmt: skip
    rows = []
    for row in result["rows"]:
        same = row.get("same_as_plain")
        rows.append([
            str(row["load"]), str(row["system"]), number(row["throughput"]),
            *(times(row.get(f"over_{what}")) for what in ("plain", "static", "external")),
            number(row["user_speed"]), number(row["first_token"], 2), number(row["accepted_length"], 2),
            number(row["verify_budget"], 2), "-" if not same else f"{same[0]}/{same[1]}",
        ])  # fmt: skip
    return head, rows


def sweep_page(result: Mapping[str, Any]) -> str:
    """The report of a sweep, with the paper's figures 7 and 8."""
    closed = [row for row in result["rows"] if "concurrency" in row]
    opened = [row for row in result["rows"] if "rate" in row]
    names = [system["name"] for system in result["systems"]]
    static = [n for n in names if n == "plain" or n.startswith("gamma-")]
    chosen = [n for n in names if not n.startswith("gamma-")]
    parts = [
        section(
            "Throughput against speed of a user",
            note(
                "Tokens a second of all users against the median of what one user sees, from one user at the right to "
                "many at the left (the paper's figure 7). Medians over interleaved repetitions."
            ),
            grid([
                pareto(closed, chosen, "Systems"),
                pareto(closed, static, "Static gammas") if len(static) > 1 else None,
            ]),
        ),
        section(
            "Verify budget against concurrency",
            note("Drafts verified in a round of a request (the paper's figure 8), and tokens that a round committed."),
            grid([
                by_concurrency(closed, chosen, "verify_budget", "drafts verified a round"),
                by_concurrency(closed, chosen, "accepted_length", "tokens a round"),
                by_concurrency(closed, chosen, "throughput", "tokens a second"),
            ]),
        ),
        section("Figures", table(*sweep_rows(result))),
    ]  # fmt: skip
    if opened:
        parts.insert(2, section("Arrivals at random", grid([by_rate(opened, chosen)])))
    left = [note(line) for line in result["skipped"]]
    rows = [[key, _text(value)] for key, value in result.get("settings", {}).items()]
    rows += [[system["name"], f"{system['about']} {_text(system['settings'])}"] for system in result["systems"]]
    parts.append(section("Settings", *left, table(["setting", "value"], rows, "text")))
    return page(str(result.get("title", "Speed under load")), parts)


def pareto(rows: Rows, names: Sequence[str], title: str) -> str:
    """Throughput against the speed of a user, a line a system."""
    lines = []
    for name in names:
        mine = [r for r in rows if r["system"] == name and _known(r["user_speed"])]
        if mine:
            lines.append(Series(name, [r["user_speed"] for r in mine], [r["throughput"] for r in mine]))
    x = Axis.around("tokens/s of a user", [0.0, *(x for line in lines for x in line.xs)], low=0.0)
    return line_chart(f"{title}: throughput against speed of a user", lines, x, _from_zero("tokens/s of all", lines))


def by_concurrency(rows: Rows, names: Sequence[str], figure: str, label: str) -> str | None:
    """A figure against concurrency, doubling from tick to tick."""
    counts = sorted({r["concurrency"] for r in rows})
    lines = []
    for name in names:
        mine = [r for r in rows if r["system"] == name and _known(r[figure])]
        if mine:
            xs = [float(counts.index(r["concurrency"])) for r in mine]
            lines.append(Series(name, xs, [r[figure] for r in mine]))
    if not lines:
        return None
    x = Axis.named("concurrency", [str(c) for c in counts])
    return line_chart(f"{label} against concurrency", lines, x, _from_zero(label, lines))


def by_rate(rows: Rows, names: Sequence[str]) -> str:
    """Seconds to the first token, of the slowest in a hundred, against requests a second."""
    lines = []
    for name in names:
        mine = [r for r in rows if r["system"] == name and _known(r["first_token_p99"])]
        if mine:
            lines.append(Series(name, [r["rate"] for r in mine], [r["first_token_p99"] for r in mine]))
    x = Axis.around("requests/s", [0.0, *(x for line in lines for x in line.xs)], low=0.0)
    return line_chart("First token, 99th percentile, against arrivals", lines, x, _from_zero("seconds", lines))


def simulation_rows(points: Rows) -> Table:
    """A row a policy and load."""
    head = ["load", "policy", "tokens/s", "over plain", "per user", "slowest tenth", "first token, s", "tokens a round",
            "verified"]  # fmt: skip
    plain = {_load(p): p["throughput"] for p in points if p["label"] == "plain"}
    rows = []
    for p in points:
        base = plain.get(_load(p))
        rows.append([
            _load(p), p["label"], number(p["throughput"]), "-" if not base else f"{p['throughput'] / base:.2f}x",
            number(p["user_speed"]), number(p["user_speed_p10"]), number(p["first_token"], 2),
            number(p["accepted_length"], 2), number(p["verify_budget"], 2),
        ])  # fmt: skip
    return head, rows


def _load(point: Mapping[str, Any]) -> str:
    return str(point["concurrency"]) if "concurrency" in point else f"{point['rate']:g}/s"


def simulation_page(result: Mapping[str, Any]) -> str:
    """The report of a simulation."""
    points = [{**p, "system": p["label"]} for p in result["points"]]
    closed = [p for p in points if "concurrency" in p]
    opened = [p for p in points if "rate" in p]
    names = list(dict.fromkeys(p["label"] for p in points))
    parts = [
        section("Throughput against speed of a user", grid([
            pareto(points, names, "Policies"),
            by_concurrency(closed, names, "verify_budget", "drafts verified a round") if closed else None,
            by_rate(opened, names) if opened else None,
        ])),
        section(
            "On the frontier", note("No other point is better in both."), table(*simulation_rows(result["frontier"]))
        ),
    ]  # fmt: skip
    if result["tiers"]:
        parts.append(section("Service levels", table(*tier_rows(result))))
    if result["lag"]:
        rows = [[str(r["load"]), f"{100 * r['price']:+.2f} %"] for r in result["lag"]]
        parts.append(section("Price of the two-round lag", table(["load", "lagged over the same rule without"], rows)))
    parts.append(section("Points", table(*simulation_rows(result["points"]))))
    rows = [[key, _text(value)] for key, value in result["settings"].items()]
    parts.append(section("Settings", table(["setting", "value"], rows, "text")))
    return page("Simulated decoding", parts)


def tier_rows(result: Mapping[str, Any]) -> Table:
    """A row a service level: the most throughput of each policy at which users get that speed."""
    labels = list(dict.fromkeys(label for tier in result["tiers"] for label in tier["policies"]))
    rows = []
    for tier in result["tiers"]:
        cells = []
        for label in labels:
            best = tier["policies"].get(label)
            cells.append("-" if best is None else f"{best['throughput']:.1f} at {_load(best)}")
        rows.append([f"{tier['speed']:g} tokens/s", *cells])
    return ["each user gets", *labels], rows


def _from_zero(label: str, lines: Sequence[Series]) -> Axis:
    return Axis.around(label, [0.0, *(float(y) for line in lines for y in line.ys if y is not None)], low=0.0)


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_text(v)}" for k, v in value.items() if v not in (None, {}, ""))
    if isinstance(value, (list, tuple)):
        return ", ".join(_text(v) for v in value)
    return str(value)
