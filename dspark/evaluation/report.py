"""One self-contained HTML page: tables and figures, nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from dspark.evaluation import figures

STYLE = """
:root { color-scheme: light dark; --text: #1c2430; --soft: #5d6876; --line: #d9dee5; --back: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e8ee; --soft: #9aa5b3; --line: #39424e; --back: #14181d; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 1120px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
p, .legend, figcaption { color: var(--soft); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .8rem 0; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child, .text th, .text td { text-align: left; } .text td { white-space: normal; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(480px, 100%), 1fr)); gap: 1.2rem; }
figure { margin: 0; } svg { width: 100%; height: auto; } svg text { font-size: 12px; fill: var(--soft); }
.grid { stroke: var(--line); fill: none; } .axis { stroke: var(--soft); fill: none; }
.line { fill: none; stroke: currentColor; stroke-width: 2; } circle, rect { fill: currentColor; }
.whisker { stroke: currentColor; stroke-width: 1.5; } .dark { stroke: var(--text); }
.ref .line { stroke: var(--soft); stroke-dasharray: 4 4; stroke-width: 1; }
.legend { font-size: 13px; display: flex; flex-wrap: wrap; gap: .2rem 1rem; }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .35em; background: currentColor; }
.c0 { color: #2f6fde; } .c1 { color: #d9632a; } .c2 { color: #2a9d63; } .c3 { color: #a04bc4; }
.c4 { color: #c39a10; } .c5 { color: #1c9db0; } .c6 { color: #cf3f6d; } .c7 { color: #7a8594; }
"""

Rows = Sequence[Sequence[str]]


def page(title: str, sections: Sequence[str]) -> str:
    """A whole document."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n" + "\n".join(sections) + "\n</body></html>\n"
    )


def section(title: str, *parts: str) -> str:
    """A heading and what stands below it."""
    return f"<h2>{escape(title)}</h2>\n" + "\n".join(parts)


def note(text: str) -> str:
    """A paragraph."""
    return f"<p>{escape(text)}</p>"


def table(head: Sequence[str], rows: Rows, kind: str = "numbers") -> str:
    """Cells are text; the first column is a name. ``kind`` is ``numbers``, or ``text`` for cells that may wrap."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table class="{kind}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def grid(charts: Sequence[str | None]) -> str:
    """Figures side by side."""
    return f'<div class="figures">{"".join(chart for chart in charts if chart)}</div>'


def eval_page(result: Mapping[str, Any]) -> str:
    """The report of ``dspark eval``."""
    drafters = result["drafters"]
    lengths = section(
        "Accepted length",
        note(
            "Mean over rounds of committed tokens. Intervals: 95 %, bootstrap over prompts. The gain is over the first "
            "drafter, on the same replicates."
        ),
        table(*length_rows(result)),
        grid([figures.length_bars(drafters), figures.block_ablation(drafters), figures.depth_ablation(drafters)]),
    )
    forced = "; ".join(
        f"{d['label']}: {f['anchors']} anchors in {f['responses']} responses, one most likely token at "
        f"{100 * f['agreement'][0][0]:.1f} % of first positions"
        for d in drafters
        if (f := d["teacher_forced"])
    )
    positions = section(
        "By position",
        note("Offered and accepted count rounds; conditional acceptance is of those that accepted all before."),
        *(note(f"Teacher-forced. {forced}.") for _ in [0] if forced),
        grid(figures.position_curves(drafters)),
        *(part for d in drafters for part in (note(d["label"]), table(*position_rows(d)))),
    )
    thresholds = section(
        "Threshold sweep",
        note("From the same full-length rounds: what a static threshold would have verified of them."),
        grid(figures.threshold_bars(drafters)),
    )
    judged = [d for d in drafters if d["calibration"]]
    calibration = section(
        "Calibration",
        *(note(_calibration_line(d)) for d in judged),
        grid([figures.reliability(d["label"], d["calibration"]) for d in judged]),
    )
    return page(_title(result), [lengths, positions, thresholds, *([calibration] if judged else []), _settings(result)])


def _title(result: Mapping[str, Any]) -> str:
    names = ", ".join(d["label"] for d in result["drafters"])
    return f"{names} on {result['settings']['target']['name']}"


def _calibration_line(drafter: Mapping[str, Any]) -> str:
    judged, estimator = drafter["calibration"], drafter["about"]["estimator"]
    temperatures = "calibrated" if estimator["calibration"] else "no temperatures on file"
    return (
        f"{drafter['label']}: estimator {estimator['name']}, {temperatures}; mean ECE {100 * judged['mean_ece']:.2f} % "
        f"over {judged['count'][0]:.0f} rounds, of which noise alone shows {100 * _mean(judged['noise_ece']):.2f} %; "
        f"AUC {_mean(judged['auc']):.3f}"
    )


def _mean(values: Sequence[float | None]) -> float:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else float("nan")


def length_rows(result: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of the main table: accepted length with its interval, a column a data set."""
    names = list(result["drafters"][0]["accepted_length"])
    rows = []
    for d in result["drafters"]:
        cells = [interval(d["accepted_length"][name]) for name in names]
        gained = "" if d["gain"] is None else percent_interval(d["gain"]["macro"])
        rows.append([d["label"], str(d["rounds"]), *cells, gained])
    return ["drafter", "rounds", *names, "macro gain"], rows


def interval(value: Sequence[float]) -> str:
    """``2.31 [2.20, 2.43]``."""
    return f"{value[0]:.2f} [{value[1]:.2f}, {value[2]:.2f}]"


def percent_interval(value: Sequence[float]) -> str:
    """``+12.3 % [+9.8, +15.1]``."""
    return f"{100 * value[0]:+.1f} % [{100 * value[1]:+.1f}, {100 * value[2]:+.1f}]"


def position_rows(drafter: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Counts and rates of one drafter, a column a position."""
    p, forced = drafter["positions"], drafter["teacher_forced"]
    rows = [["offered", *map(str, p["offered"])], ["accepted", *map(str, p["accepted"])]]
    rows += [
        [name.replace("_", " "), *(share(v) for v in p[name])] for name in ("acceptance", "conditional_acceptance")
    ]
    if forced:
        rows.append(["1 - TV, teacher-forced", *(share(v[0]) for v in forced["overlap"])])
        rows.append(["same most likely token", *(share(v[0]) for v in forced["agreement"])])
    return ["position", *(str(k) for k in range(1, 1 + drafter["gamma"]))], rows


def share(value: float | None) -> str:
    """``0.873``, or a dash."""
    return "-" if value is None else f"{value:.3f}"


def _settings(result: Mapping[str, Any]) -> str:
    rows = [[key, _text(value)] for key, value in result["settings"].items()]
    rows += [[d["label"], _text(d["about"])] for d in result["drafters"]]
    rows += [[f"{d['label']} failed", f"{key}: {why}"] for d in result["drafters"] for key, why in d["failed"].items()]
    if result["left_out"]:
        rows.append(["left out, not finished by all", ", ".join(result["left_out"])])
    return section("Settings", table(["setting", "value"], rows, "text"))


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_text(v)}" for k, v in value.items() if v not in (None, {}, ""))
    return str(value)


def calibrate_page(result: Mapping[str, Any]) -> str:
    """The report of ``dspark calibrate``."""
    judged = {"before": result["before"], "after": result["after"]}
    held_out = "cross-fitted: each prompt is judged under temperatures that it had no part in"
    what = section(
        "Temperatures",
        note(
            f"{result['rounds']} rounds of {result['prompts']} prompts, verified in full. After: "
            f"{'under the temperatures on file' if 'drift' in result else held_out}."
        ),
        table(*calibration_rows(result)),
        grid([figures.ece_bars(judged)]),
    )
    diagrams = section(
        "Reliability", grid([figures.reliability(f"Survival, {when}", one) for when, one in judged.items()])
    )
    rows = [[key, _text(value)] for key, value in result["settings"].items()]
    more = [["calibration file", str(result["calibration"])], ["sampling temperatures", _bucket(result)]]
    settings = section("Settings", table(["setting", "value"], [*rows, *more], "text"))
    name = result["settings"]["target"]["name"]
    return page(f"Calibration of confidences on {name}", [what, diagrams, settings])


def _bucket(result: Mapping[str, Any]) -> str:
    low, high = result["bucket"]
    return f"{low:g} to {high:g}"


def calibration_rows(result: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Temperature, ECE and AUC, a column a position."""
    before, after = result["before"], result["after"]

    def percents(values: Sequence[float]) -> list[str]:
        return [f"{100 * v:.2f}" for v in values]

    rows = [
        ["rounds", *(f"{n:.0f}" for n in before["count"])],
        ["survived", *(share(v) for v in before["observed"])],
        ["temperature", *(share(v) for v in result["temperatures"])],
        ["ECE before, %", *percents(before["ece"])],
        ["ECE after, %", *percents(after["ece"])],
        ["ECE of noise alone, %", *percents(after["noise_ece"])],
        ["AUC before", *(share(v) for v in before["auc"])],
        ["AUC after", *(share(v) for v in after["auc"])],
    ]
    return ["position", *(str(k) for k in range(1, 1 + len(before["ece"])))], rows
