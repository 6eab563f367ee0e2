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
from pathlib import Path
from typing import Any

import torch

from benchmarks._common import describe, machine, prepare, table, write_json, write_section
from benchmarks.checks import NEIGHBOURS, SETTINGS, TARGET, Check, Job
from benchmarks.margins import BOUND
from benchmarks.prompts import OWN, VARIABLE, load_prompts


def report(check: Check, about: dict[str, Any], options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The result for JSON, and its section of the results page."""
    blocks, findings = check.blocks, check.findings
    result = {
        "machine": about,
        "target": TARGET,
        "dtype": "float32",
        "reference_attention": check.attention,
        "prompts": options.prompts,
        "tokens": options.tokens,
        "coupled_prompts": options.coupled_prompts,
        "coupled_tokens": options.coupled_tokens,
        "concurrency": options.concurrency,
        "bound": BOUND,
        "outputs": sum(b.outputs for b in blocks),
        "identical": sum(b.identical for b in blocks),
        "rounding": sum(b.rounding for b in blocks),
        "faults": check.faults,
        "seconds": round(check.progress.seconds),
        "blocks": [b.as_dict() for b in blocks],
        "findings": [f.as_dict() for f in findings],
    }
    rows = [
        [b.name, str(b.outputs), f"{b.tokens:,}", str(b.identical), str(b.rounding), str(b.faults), f"{b.accepted:,}"]
        for b in blocks
    ]
    head = ["run", "outputs", "tokens", "identical", "by rounding", "faults", "drafts accepted"]
    verdict = "passed" if not check.faults else f"FAILED: {check.faults} outputs differ by more than rounding"
    text = [
        f"`make verify` {verdict}: {result['outputs']} outputs compared, {result['identical']} identical, "
        f"{result['rounding']} that part where the margin is under {BOUND:g}. {options.prompts} prompts "
        f"of {options.tokens} tokens greedily, {options.coupled_prompts} prompts of {options.coupled_tokens} tokens "
        f"in each of {len(SETTINGS)} sampling settings; {result['seconds'] // 60} minutes.",
        "",
        describe(about),
        "",
        table(head, rows),
    ]
    if findings:
        lines = [
            [f.where, f.prompt, str(f.position), f"{f.expected} / {f.got}", f"{f.margin:.1e}", f"{f.after:.1e}"]
            for f in findings
        ]
        text += ["", "Every output that differs:", ""]
        text += [table(["run", "prompt", "token", "expected / got", "margin", "later"], lines, left=2)]
    return result, "\n".join(text)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; sizes of the seeded part follow from the others where they are not given."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verify", description=__doc__.split("\n\n")[0])
    parser.add_argument("--prompts", type=int, default=None, help="greedy prompts (64; 16 of those that ship)")
    parser.add_argument("--tokens", type=int, default=128, help="greedy tokens a prompt")
    parser.add_argument("--concurrency", default="1,8,32", help="slots, separated by commas")
    parser.add_argument("--coupled-prompts", type=int, default=None, help="seeded prompts (a quarter as many)")
    parser.add_argument("--coupled-tokens", type=int, default=None, help="seeded tokens a prompt (half as many)")
    parser.add_argument("--alone", type=int, default=None, help="seeded requests run alone under every schedule")
    parser.add_argument("--only", choices=("greedy", "coupled"), help="leave the other part out")
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
    greedy = check.greedy_jobs(load_prompts(options.prompts, options.prompts_dir), options.tokens)
    if options.only != "coupled":
        check.greedy(greedy, options.concurrency)
    if options.only != "greedy":
        seeded = check.coupled_jobs(shortest(greedy, options.coupled_prompts), options.coupled_tokens)
        check.coupled(seeded, shortest(greedy, NEIGHBOURS), options.concurrency, options.alone)
    result, text = report(check, about, options)
    print(f"\n{text}\n")
    if not options.no_write:
        print(f"written: {write_json('verify', result)}")
        write_section("verify", text)
    return 1 if check.faults else 0


if __name__ == "__main__":
    sys.exit(main())
