"""The simulator against the engine: ``python -m benchmarks.simulate``.

Records a trace of the real engine on real prompts and a profile of this machine, replays the trace, and runs the same
loads for real: throughput and accepted length at concurrency 1, 8 and 32 have to agree within 10 %. Beside them stands
the clairvoyant bound, a replay that drafts at the same cost and verifies what will be accepted and nothing else. What
the simulated schedule lacks of it is what it can't know; the rest is the replay's error.

Prompts are those of the folder that ``DSPARK_PROMPTS`` names, or those that ship. Everything is greedy, so what the
engine writes under load is what was recorded.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Iterable
from typing import Any

from benchmarks._common import Progress, describe, machine, prepare, table, write_json, write_section
from benchmarks.prompts import encode_chats, load_prompts

TOLERANCE = 0.10
TARGET = "smollm2"


def record(target: Any, prompts: list[list[int]], options: argparse.Namespace) -> tuple[Any, Any]:
    """The trace of the prompts, and the cost of this machine as a profile."""
    from dspark import SpeculativeDecoder
    from dspark.bench.trace import record_trace, recording_settings
    from dspark.cli.profile import measure_all
    from dspark.config import SamplingParams

    params = SamplingParams(max_tokens=options.tokens, ignore_eos=True)
    decoder = SpeculativeDecoder.from_pretrained(
        target, options.drafter, cost=None, max_slots=max(options.concurrency), max_len=options.max_len,
        gamma=options.gamma, **recording_settings(params),
    )  # fmt: skip
    profile = measure_all(decoder, options.most_tokens, (64, 256), options.profile_seconds)
    trace = record_trace(decoder, prompts, lambda i: params)
    decoder.close()
    return trace, profile


def run_real(
    target: Any, prompts: list[list[int]], policy: dict[str, Any], profile: Any, options: argparse.Namespace
) -> dict[int, list[dict[str, Any]]]:
    """Figures of the engine by concurrency, one a repetition."""
    from dspark import SpeculativeDecoder
    from dspark.bench.load import Closed, EngineBackend, Job, run_load
    from dspark.config import SamplingParams

    params = SamplingParams(max_tokens=options.tokens, ignore_eos=True)
    decoder = SpeculativeDecoder.from_pretrained(
        target, options.drafter, cost=profile.table(), max_slots=max(options.concurrency), max_len=options.max_len,
        gamma_policy="static", gamma=options.gamma, refine_cost=False, **policy,
    )  # fmt: skip
    backend = EngineBackend(decoder.engine)
    found: dict[int, list[dict[str, Any]]] = {}
    for concurrency in options.concurrency:
        count = requests_of(concurrency, options)
        jobs = [Job(str(i), tuple(prompts[i % len(prompts)]), params) for i in range(count)]
        short = dataclasses.replace(params, max_tokens=4)
        run_load(backend, [dataclasses.replace(job, params=short) for job in jobs[:concurrency]], Closed(concurrency))
        runs = [run_load(backend, jobs, Closed(concurrency)).as_dict() for _ in range(options.repeat)]
        found[concurrency] = runs
    decoder.close()
    return found


def requests_of(concurrency: int, options: argparse.Namespace) -> int:
    """Requests of a run, simulated or real."""
    return max(options.least, concurrency * options.per_user)


def compare(
    trace: Any, profile: Any, real: dict[int, list[dict[str, Any]]], name: str, options: Any
) -> list[dict[str, Any]]:
    """Simulated against measured, a row a concurrency."""
    from dspark.bench.load import Closed
    from dspark.bench.simulation import Policy, World, replay

    world = World(trace, profile.table(), max_slots=max(options.concurrency))
    rows = []
    for concurrency, runs in real.items():
        point = replay(world, Policy(name), Closed(concurrency), requests_of(concurrency, options))
        row: dict[str, Any] = {"scheduler": name, "concurrency": concurrency}
        for figure in ("throughput", "accepted_length", "verify_budget"):
            measured = statistics.median(run[figure] for run in runs)
            said = float(point.figures[figure])
            row[figure] = {"simulated": said, "measured": measured, "off": said / measured - 1 if measured else 0.0}
        bound = replay(world, Policy("clairvoyant"), Closed(concurrency), requests_of(concurrency, options))
        best = float(bound.figures["throughput"])
        # two steps from the bound to the engine: what a schedule can't know, and what the replay leaves out
        said, measured = row["throughput"]["simulated"], row["throughput"]["measured"]
        row["clairvoyant"] = {"throughput": best, "share": measured / best, "unknown": said / best}
        row["met"] = all(abs(row[figure]["off"]) <= TOLERANCE for figure in ("throughput", "accepted_length"))
        rows.append(row)
    return rows


def report(rows: list[dict[str, Any]], about: dict[str, Any], options: argparse.Namespace) -> str:
    """The section of the results page."""
    head = ["scheduler", "requests at once", "tokens/s simulated", "measured", "off", "accepted length simulated",
            "measured", "off", "share of the clairvoyant bound", "simulated alone"]  # fmt: skip
    lines = []
    for row in rows:
        cells = [row["scheduler"], str(row["concurrency"])]
        for figure, digits in (("throughput", 1), ("accepted_length", 2)):
            one = row[figure]
            cells += [f"{one['simulated']:.{digits}f}", f"{one['measured']:.{digits}f}", f"{100 * one['off']:+.1f} %"]
        bound = row["clairvoyant"]
        cells += [f"{100 * bound['share']:.0f} %", f"{100 * bound['unknown']:.0f} %"]
        lines.append(cells)
    what = f"Drafter {options.drafter}, {options.tokens} tokens a request, greedy, {options.repeat} repetitions."
    return f"{table(head, lines)}\n\n{what} {describe(about)}"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate", description=__doc__.split("\n\n")[0])
    parser.add_argument("--drafter", default="auto", help="a registered drafter or a checkpoint's folder")
    parser.add_argument("--gamma", type=int, default=None)
    parser.add_argument("--concurrency", default="1,8,32", help="separated by commas")
    parser.add_argument("--scheduler", default="fixed,causal", help="separated by commas")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens a request")
    parser.add_argument("--per-user", type=int, default=2, help="requests of a run, by concurrency")
    parser.add_argument("--least", type=int, default=8, help="requests of a run at least")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--most-tokens", type=int, default=256, help="largest forward that is profiled")
    parser.add_argument("--profile-seconds", type=float, default=60.0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--no-write", action="store_true", help="leave results/ and the results page alone")
    options = parser.parse_args(arguments)
    options.concurrency = [int(n) for n in options.concurrency.split(",")]
    return options


def main(arguments: Iterable[str] | None = None) -> int:
    """Record, replay, run and compare; exit code 1 where a figure is off by more than 10 %."""
    options = parse(None if arguments is None else list(arguments))
    prepare()
    from dspark.targets.hf import HFTarget

    about, say = machine(), Progress()
    target = HFTarget.from_pretrained(TARGET, dtype=options.dtype, device="cpu")
    prompts = encode_chats(load_prompts(options.prompts), target.tokenizer)
    options.max_len = max(map(len, prompts)) + options.tokens + 16
    trace, profile = record(target, prompts, options)
    say(f"recorded {len(trace.requests)} requests; acceptance {[round(r, 3) for r in trace.native().rates]}")
    rows: list[dict[str, Any]] = []
    for name in options.scheduler.split(","):
        real = run_real(target, prompts, {"scheduler": name}, profile, options)
        rows += compare(trace, profile, real, name, options)
        say(f"{name} was run and replayed")
    text = report(rows, about, options)
    print(f"\n{text}\n")
    if not options.no_write:
        print(f"written: {write_json('simulate', {'about': about, 'rows': rows})}")
        write_section("simulate", text)
    return 0 if all(row["met"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
