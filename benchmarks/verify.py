"""Token identity on a real model in float32: ``python -m benchmarks.verify``.

*Greedy*: the engine's output, with drafter ``none`` and ``ngram``, at several concurrencies, against transformers'
``generate`` on a separately loaded, unmodified model, one prompt at a time.

*Coupled*: seeded sampling under every schedule, alone and in batches with greedy and unseeded requests, against plain
decoding of the same seed alone; and that plain decoding, token by token, against transformers' processors on the
unmodified model.

Every difference is examined by the unmodified model (``benchmarks.margins``): margins under 1e-4 are counted and shown,
anything else fails the check, which then exits with 1.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks._common import describe, machine, prepare, read_json, table, write_json, write_section
from benchmarks.checks import NEIGHBOURS, SETTINGS, TARGET, Check, Job
from benchmarks.margins import BOUND
from benchmarks.prompts import OWN, VARIABLE, load_prompts
from dspark.config import SamplingParams

PARTS = ("greedy", "coupled")


def report(part: str, check: Check, about: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """What one part found, for JSON and for the results page."""
    seeded = part == "coupled"
    return {
        "part": part,
        "machine": about,
        "target": TARGET,
        "dtype": "float32",
        "reference_attention": check.attention,
        "prompts": options.coupled_prompts if seeded else options.prompts,
        "tokens": options.coupled_tokens if seeded else options.tokens,
        "concurrency": options.concurrency,
        "bound": BOUND,
        "outputs": sum(b.outputs for b in check.blocks),
        "identical": sum(b.identical for b in check.blocks),
        "rounding": sum(b.rounding for b in check.blocks),
        "faults": check.faults,
        "seconds": round(check.progress.seconds),
        "blocks": [b.as_dict() for b in check.blocks],
        "findings": [f.as_dict() for f in check.findings],
    }


def page(results: Sequence[dict[str, Any]]) -> str:
    """The section of the results page: every part that was measured, with its machine and date."""
    text: list[str] = []
    for result in results:
        seeded = result["part"] == "coupled"
        verdict = (
            "passed" if not result["faults"] else f"FAILED: {result['faults']} outputs differ by more than rounding"
        )
        size = f"{result['prompts']} prompts of {result['tokens']} tokens"
        size += f" in each of {len(SETTINGS)} sampling settings" if seeded else ""
        text += [
            f"**{'Seeded' if seeded else 'Greedy'}: {verdict}.** {result['outputs']} outputs compared, "
            f"{result['identical']} identical, {result['rounding']} that part where the margin is under "
            f"{result['bound']:g}. {size}; {result['seconds'] // 60} minutes.",
            "",
            describe(result["machine"]),
            "",
            table(HEAD, [_cells(block) for block in result["blocks"]]),
            "",
        ]
        if result["findings"]:
            text += [
                "Every output that differs:",
                "",
                table(DIFFERENCE, [_difference(f) for f in result["findings"]], left=2),
            ]
            text += [""]
    return "\n".join(text)


HEAD = ["run", "outputs", "tokens", "identical", "by rounding", "faults", "drafts accepted"]
DIFFERENCE = ["run", "prompt", "token", "expected / got", "margin", "later"]


def _cells(block: dict[str, Any]) -> list[str]:
    counts = [str(block[key]) for key in ("identical", "rounding", "faults")]
    return [block["name"], str(block["outputs"]), f"{block['tokens']:,}", *counts, f"{block['accepted']:,}"]


def _difference(found: dict[str, Any]) -> list[str]:
    tokens = f"{found['expected']} / {found['got']}"
    margins = [f"{found[key]:.1e}" for key in ("margin", "after")]
    return [found["run"], found["prompt"], str(found["position"]), tokens, *margins]


def measured() -> list[dict[str, Any]]:
    """Stored results of both parts, as far as there are any."""
    found = (read_json(f"verify-{part}") for part in PARTS)
    return [result for result in found if result is not None]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; sizes of the seeded part follow from the others where they are not given."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verify", description=__doc__.split("\n\n")[0])
    parser.add_argument("--prompts", type=int, default=None, help="greedy prompts (64; 16 of those that ship)")
    parser.add_argument("--tokens", type=int, default=128, help="greedy tokens a prompt")
    parser.add_argument("--concurrency", default="1,8,32", help="slots, separated by commas")
    parser.add_argument("--coupled-prompts", type=int, default=None, help="seeded prompts (a quarter as many)")
    parser.add_argument("--coupled-tokens", type=int, default=None, help="seeded tokens a prompt (half as many)")
    parser.add_argument("--alone", type=int, default=None, help="seeded requests run alone under every schedule")
    parser.add_argument("--only", choices=PARTS, help="leave the other part out")
    parser.add_argument("--prompts-dir", type=Path, help="folder of .jsonl files with 'turns' (DSPARK_PROMPTS)")
    parser.add_argument("--quick", action="store_true", help="8 prompts of 32 tokens, nothing written")
    parser.add_argument("--no-write", action="store_true", help="leave results/ and the results page alone")
    options = parser.parse_args(arguments)
    if options.quick:
        options.prompts, options.tokens, options.no_write = options.prompts or 8, min(options.tokens, 32), True
    if options.prompts is None:
        options.prompts = 64 if _folder_given(options.prompts_dir) else 16
    options.concurrency = [int(n) for n in options.concurrency.split(",")]
    options.coupled_prompts = options.coupled_prompts or max(1, options.prompts // 4)
    options.coupled_tokens = options.coupled_tokens or max(1, options.tokens // 2)
    options.alone = options.alone or max(2, options.coupled_prompts // 2)
    return options


def _folder_given(folder: Path | None) -> bool:
    return folder is not None or Path(os.environ.get(VARIABLE) or OWN) != OWN


def shortest(jobs: Sequence[Job], count: int) -> list[Job]:
    """The jobs with the shortest prompts, in their old order: reading prompts is not what the seeded part checks."""
    chosen = sorted(range(len(jobs)), key=lambda i: len(jobs[i].prompt))[:count]
    return [jobs[i] for i in sorted(chosen)]


def main(arguments: Iterable[str] | None = None) -> int:
    """Run the check; the exit status is 1 where a difference is more than rounding."""
    options = parse(None if arguments is None else list(arguments))
    prepare()
    about = machine()
    torch.manual_seed(0)
    check = Check()
    check.progress(describe(about))
    jobs = check.greedy_jobs(load_prompts(options.prompts, options.prompts_dir), options.tokens)
    results = []
    for part in PARTS:
        if options.only in (None, part):
            check.blocks.clear()
            run_part(part, check, jobs, options)
            results.append(report(part, check, about, options))
            if not options.no_write:  # at once, so that an interruption costs one part at most
                check.progress(f"written: {write_json(f'verify-{part}', results[-1])}")
                write_section("verify", page(measured()))
    print(f"\n{page(results)}\n")
    return 1 if any(result["faults"] for result in results) else 0


def run_part(part: str, check: Check, jobs: Sequence[Job], options: argparse.Namespace) -> None:
    """Greedy decoding of all prompts, or seeded sampling of the shortest ones beside a few greedy neighbours."""
    if part == "greedy":
        check.greedy(check.answered(jobs), options.concurrency)
        return
    seeded = check.coupled_jobs(shortest(jobs, options.coupled_prompts), options.coupled_tokens)
    params = SamplingParams(max_tokens=options.coupled_tokens)
    near = check.answered([replace(job, params=params) for job in shortest(jobs, NEIGHBOURS)])
    check.coupled(seeded, near, options.concurrency, options.alone)


if __name__ == "__main__":
    sys.exit(main())
