"""The sweep over loads: ``python -m benchmarks.sweep``.

Runs ``dspark bench`` greedily with every system and at temperature 1 with a few, on the prompts of the folder that
``DSPARK_PROMPTS`` names, writes both tables into the results page, and draws ``docs/sweep.png`` where Chromium is
installed. ``--from FOLDER`` takes results that are there already instead of running.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks._common import ROOT, describe, machine, prepare, table, write_json, write_section
from benchmarks.prompts import OWN, VARIABLE

SAMPLED = ("plain", "auto", "gamma-1", "gamma-3", "generate")
SETS = ("gsm8k", "math500", "mbpp", "humaneval", "mt-bench", "arena-hard-v2")
KEPT = (
    "concurrency", "load", "system", "throughput", "user_speed", "user_speed_p10", "first_token", "accepted_length",
    "verify_budget", "planning", "over_plain", "over_static", "over_external", "same_as_plain",
)  # fmt: skip
HEAD = (
    "requests at once", "system", "tokens/s", "over plain", "over best static", "over generate or vLLM", "per user",
    "tokens a round", "verified", "planning",
)  # fmt: skip


def prompts(limit: int) -> list[str]:
    """Arguments for data: some sets of the folder that is named, or the prompts that ship."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return ["--data", str(OWN)]
    files = [Path(folder) / f"{name}.jsonl" for name in SETS]
    return [part for file in files if file.is_file() for part in ("--data", str(file))] + ["--limit", str(limit)]


def run(folder: Path, options: argparse.Namespace, temperature: float, systems: Iterable[str]) -> None:
    """One ``dspark bench``, in a process of its own."""
    command = [
        sys.executable, "-m", "dspark", "bench", *prompts(options.limit), "--target", options.target,
        "--drafter", options.drafter, "--dtype", options.dtype, "--output", str(folder),
        "--repeat", str(options.repeat), "--max-tokens", str(options.max_tokens), "--temperature", str(temperature),
        "--per-user", str(options.per_user), "--least", str(options.least),
        *(part for c in options.concurrency for part in ("--concurrency", str(c))),
        *(part for name in systems for part in ("--system", name)),
        *(("--vllm", options.vllm) if options.vllm else ()),
    ]  # fmt: skip
    subprocess.run(command, check=True)


def load(folder: Path) -> dict[str, Any]:
    """The result that a bench left in a folder."""
    result: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return result


def ratio(value: Any) -> str:
    """A ratio with its interval."""
    return "" if not value or value[0] is None else f"{value[0]:.2f}x [{value[1]:.2f}, {value[2]:.2f}]"


def figure(value: Any, digits: int) -> str:
    """A number, or nothing."""
    return "" if not isinstance(value, (int, float)) or value != value else f"{value:,.{digits}f}"


def section(result: dict[str, Any]) -> str:
    """The table of one result."""
    rows = []
    for row in result["rows"]:
        share = row.get("planning")
        rows.append([
            str(row["load"]), row["system"], figure(row["throughput"], 1), ratio(row.get("over_plain")),
            ratio(row.get("over_static")), ratio(row.get("over_external")), figure(row["user_speed"], 1),
            figure(row.get("accepted_length"), 2), figure(row.get("verify_budget"), 2),
            "" if share is None else f"{100 * share:.2f} %",
        ])  # fmt: skip
    return table(list(HEAD), rows, left=2)


def picture(page: Path, output: Path) -> None:
    """The figures of a report, drawn by Chromium; left as it is without one."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        print(f"no Chromium here: {output} is left as it is")
        return
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        view = browser.new_page(viewport={"width": 1180, "height": 900}, device_scale_factor=1.5)
        view.goto(page.resolve().as_uri())
        charts = view.locator("div.figures")
        boxes = [box for i in range(2) if (box := charts.nth(i).bounding_box())]
        top = min(box["y"] for box in boxes) - 8
        bottom = max(box["y"] + box["height"] for box in boxes) + 8
        view.screenshot(path=output, full_page=True, clip={"x": 0, "y": top, "width": 1180, "height": bottom - top})
        browser.close()


def main(arguments: Iterable[str] | None = None) -> int:
    """Measure, write and draw."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sweep", description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--per-user", type=int, default=1, help="requests of a run, by concurrency")
    parser.add_argument("--least", type=int, default=8, help="requests of a run at least")
    parser.add_argument("--limit", type=int, default=16, help="prompts of a set")
    parser.add_argument("--system", nargs="+", default=[], help="systems of the greedy part; all by default")
    parser.add_argument("--vllm", help="a Python that has vLLM")
    parser.add_argument("--output", type=Path, default=Path("dspark-bench"), help="folder of both results")
    parser.add_argument("--from", dest="ready", type=Path, help="take the results of this folder instead of running")
    options = parser.parse_args(None if arguments is None else list(arguments))
    prepare()
    folder = options.ready or options.output
    if options.ready is None:
        run(folder / "greedy", options, 0.0, options.system)
        run(folder / "sampled", options, 1.0, SAMPLED)
    about, text, kept = machine(), [], {}
    for name, title in (("greedy", "Greedy"), ("sampled", "At temperature 1")):
        if not (folder / name / "result.json").is_file():
            continue
        result = load(folder / name)
        kept[name] = [{key: row[key] for key in KEPT if key in row} for row in result["rows"]]
        text.append(f"**{title}**\n\n{section(result)}\n" + "".join(f"\n- {line}" for line in result["skipped"]))
    write_json("sweep", {"about": about, **kept})
    write_section("sweep", "\n\n".join([*text, describe(about)]))
    picture(folder / "greedy" / "report.html", ROOT / "docs" / "sweep.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
