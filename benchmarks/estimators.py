"""What schedules gain by an estimator: ``python -m benchmarks.estimators``.

Decodes real prompts once a drafter and temperature with every draft verified. Beside the engine's own estimator others
look on: each says its c of every round, then learns from what became of it. That gives a trace an estimator, with the
same drafts and the same outcomes in all of them. The simulator replays them under one cost curve; the bootstrap goes
over prompts.

Needs the package ``dspark-estimator-online``. Prompts are those of the folder that ``DSPARK_PROMPTS`` names, or those
that ship. Costs are figures in ``results/`` that were measured on a machine at rest, or those of ``--profile``.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._common import Progress, describe, machine, prepare, read_json, table, write_json, write_section
from benchmarks.prompts import encode_chats, load_prompts

TARGET = "smollm2"
LOGISTIC = "dspark-estimator-online/logistic"
OWN = "own"
"""The engine's own estimator: the drafter's confidence head, or ``online``."""
SCHEDULERS = ("causal", "lookahead")


@dataclass
class Onlooker:
    """Records rounds with the c of an estimator that the engine does not use; None records the engine's.

    The engine verifies everything, so what it drafts and accepts is the same whoever looks on.
    """

    estimator: Any
    recorder: Any
    order: list[str] = field(default_factory=list)

    def on_round(self, record: Any) -> None:
        """Say c as before the round, keep it, then learn."""
        self.order += [d.request.request_id for d in record.committed if d.request.num_cached < d.request.prompt_len]
        if self.estimator is not None and record.draft is not None:
            probs = np.asarray(self.estimator.estimate(record.batch, record.draft), dtype=np.float64)
            confidence = dataclasses.replace(record.confidence, probs=probs)
            record = dataclasses.replace(record, confidence=confidence)
        self.recorder.on_round(record)
        if self.estimator is not None:
            self.estimator.observe(record)

    def on_finish(self, request: Any, reason: str) -> None:
        """Close the request's trace."""
        self.recorder.on_finish(request, reason)
        if self.estimator is not None:
            self.estimator.release(request.slot, request.generation)

    def requests(self) -> tuple[Any, ...]:
        """The finished requests in the order in which their prompts were read."""
        return tuple(self.recorder.finished[n] for n in dict.fromkeys(self.order) if n in self.recorder.finished)


def record(decoder: Any, names: Sequence[str], prompts: Sequence[Sequence[int]], params: Any) -> dict[str, Any]:
    """Estimator -> trace. The decoder verifies all of each draft (scheduler ``fixed``) and is idle."""
    from dspark.bench.trace import AcceptanceTrace, TraceRecorder
    from dspark.plugins import Kind, load_plugins
    from dspark.protocols import BuildContext

    parts, target = decoder.engine.parts, decoder.engine.parts.target
    if parts.name("scheduler") != "dspark/fixed":
        raise ValueError(f"scheduler {parts.name('scheduler')}: traces of several estimators need dspark/fixed")
    context = BuildContext(
        target=target, vocab_size=target.vocab_size, gamma=parts.gamma, max_slots=decoder.engine.config.max_slots,
        device=target.device, dtype=target.dtype, drafter=parts.drafter,
    )  # fmt: skip
    catalog = load_plugins().catalog
    made = {n: None if n == OWN else catalog.build(Kind.ESTIMATOR, n, None, context) for n in names}
    onlookers = {name: Onlooker(estimator, TraceRecorder()) for name, estimator in made.items()}
    for name, onlooker in onlookers.items():
        decoder.engine.observe(name, onlooker)
    decoder.generate(list(prompts), params)
    taps = bool(parts.drafter.capabilities.needs_taps)
    return {n: AcceptanceTrace(o.requests(), parts.gamma, taps=taps, dense=False) for n, o in onlookers.items()}


def committed_cost(drafter: str, mode: str) -> Any:
    """A curve through figures in ``results/`` of whole rounds less drafting: 1 and 32 tokens from ``frame``, 8 and 256
    from ``draft``, which also says what drafting takes.

    Raises:
        ValueError: they have not been measured.
    """
    from dspark.scheduling.cost import ContextBucket, CostProfile

    frame, draft = read_json("frame"), read_json("draft")
    if frame is None or draft is None:
        raise ValueError("results/frame.json and results/draft.json are missing: name a cost with --profile")
    plain = {case["case"]: case["phase_ms_per_step"] for case in frame["cases"]}
    steps = {n: sum(plain[f"batch {n}, prompts of 40"].values()) for n in (1, 32)}
    rounds = [c for c in draft["cases"] if c["drafter"] == "markov" and c["mode"] == mode]
    gamma = int(draft["gamma"])
    steps |= {c["batch"] * (1 + gamma): c["round_ms"] - c["ms"] for c in rounds}
    points = tuple((n, ms / 1000) for n, ms in sorted(steps.items()))
    drafting = tuple((c["batch"], gamma, c["ms"] / 1000) for c in rounds) if drafter != "ngram" else ()
    return CostProfile((ContextBucket(points),), draft=drafting).table()


def throughputs(trace: Any, cost: Any, users: int, requests: int) -> dict[str, float]:
    """Scheduler -> simulated tokens a second."""
    from dspark.bench.load import Closed
    from dspark.bench.simulation import Policy, World, replay

    world = World(trace, cost, max_slots=users)
    policies = {"plain": Policy("off", 0), **{n: Policy(n) for n in ("fixed", *SCHEDULERS, "clairvoyant")}}
    return {name: replay(world, p, Closed(users), requests).throughput for name, p in policies.items()}


def compare(
    traces: Mapping[str, Any], cost: Any, concurrency: Sequence[int], resamples: int, seed: int = 0
) -> list[dict[str, Any]]:
    """A row a concurrency and scheduler: throughputs, and ratios with 95 % intervals from resampled prompts."""
    count = len(next(iter(traces.values())).requests)
    rng = np.random.default_rng(seed)
    picks = [np.arange(count), *(rng.integers(0, count, count) for _ in range(resamples))]
    rows = []
    for users in concurrency:
        runs = []
        for pick in picks:
            some = {n: dataclasses.replace(t, requests=tuple(t.requests[i] for i in pick)) for n, t in traces.items()}
            runs.append({n: throughputs(t, cost, users, max(4 * count, 8 * users)) for n, t in some.items()})
        for scheduler in SCHEDULERS:
            row: dict[str, Any] = {"concurrency": users, "scheduler": scheduler}
            first = runs[0][OWN]
            row["throughput"] = {n: found[scheduler] for n, found in runs[0].items()}
            row["bounds"] = {n: first[n] for n in ("plain", "fixed", "clairvoyant")}
            ratios = {f"{n} over fixed": [r[n][scheduler] / r[n]["fixed"] for r in runs] for n in traces}
            ratios["logistic over plain"] = [r[LOGISTIC][scheduler] / r[LOGISTIC]["plain"] for r in runs]
            for other in traces:
                if other != LOGISTIC:
                    ratios[f"logistic over {other}"] = [r[LOGISTIC][scheduler] / r[other][scheduler] for r in runs]
            row["ratios"] = {name: interval(values) for name, values in ratios.items()}
            rows.append(row)
    return rows


def interval(values: Sequence[float]) -> list[float]:
    """The first, and the middle 95 % of the others."""
    low, high = np.percentile(values[1:], [2.5, 97.5]) if len(values) > 1 else (np.nan, np.nan)
    return [float(values[0]), float(low), float(high)]


def report(rows: Sequence[Mapping[str, Any]], about: dict[str, Any], options: argparse.Namespace) -> str:
    """The section of the results page: rows of ``causal``, and how far ``lookahead`` is from them."""
    head = ["drafter", "temperature", "requests at once", "plain", "all verified", "clairvoyant", "logistic",
            "over all verified", "over plain", "over `online`", "over the head"]  # fmt: skip
    lines = []
    for row in (row for row in rows if row["scheduler"] == SCHEDULERS[0]):
        ratios, bounds = row["ratios"], [row["bounds"][name] for name in ("plain", "fixed", "clairvoyant")]
        own = ratios["logistic over own"]
        online, head_of = (own, None) if row["own"] == "online" else (ratios["logistic over online"], own)
        cells = [ratios[f"{LOGISTIC} over fixed"], ratios["logistic over plain"], online, head_of]
        speeds = [*bounds, row["throughput"][LOGISTIC]]
        lines.append([
            f"`{row['drafter']}`", f"{row['temperature']:g}", str(row["concurrency"]), *(f"{x:.1f}" for x in speeds),
            *("" if cell is None else shown(cell) for cell in cells),
        ])  # fmt: skip
    what = (
        f"Scheduler `{SCHEDULERS[0]}`; `{SCHEDULERS[1]}` is within {100 * apart(rows):.1f} % of it throughout. Speeds "
        f"in tokens/s. {options.prompts} prompts of up to {options.tokens} tokens, recorded with {options.slots} "
        f"requests at once; intervals: 95 %, {options.resamples} resamples of the prompts."
    )
    return f"{table(head, lines)}\n\n{what} {describe(about)}"


def apart(rows: Sequence[Mapping[str, Any]]) -> float:
    """The largest relative difference of one scheduler's throughput with ``logistic`` from the other's."""
    found: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        key = row["drafter"], row["temperature"], row["concurrency"]
        found.setdefault(key, []).append(row["throughput"][LOGISTIC])
    return max(max(pair) / min(pair) - 1 for pair in found.values())


def shown(ratio: Sequence[float]) -> str:
    """A ratio with its interval."""
    return f"{ratio[0]:.2f}x [{ratio[1]:.2f}, {ratio[2]:.2f}]"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.estimators", description=__doc__.split("\n\n")[0])
    parser.add_argument("--drafter", default="ngram,auto", help="separated by commas")
    parser.add_argument("--temperature", default="0,1", help="separated by commas")
    parser.add_argument("--concurrency", default="1,8,32", help="separated by commas")
    parser.add_argument("--prompts", type=int, default=27)
    parser.add_argument("--tokens", type=int, default=64, help="most new tokens a request")
    parser.add_argument("--slots", type=int, default=8, help="requests at once while recording")
    parser.add_argument("--resamples", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--profile", type=Path, default=None, help="costs: a file of `dspark profile`")
    parser.add_argument("--traces", type=Path, default=None, help="folder of traces; recorded where missing")
    parser.add_argument("--no-write", action="store_true", help="leave results/ and the results page alone")
    options = parser.parse_args(arguments)
    options.drafter = options.drafter.split(",")
    options.temperature = [float(t) for t in options.temperature.split(",")]
    options.concurrency = [int(n) for n in options.concurrency.split(",")]
    return options


def traces_of(options: argparse.Namespace, drafter: str, temperature: float, load: Any) -> tuple[str, dict[str, Any]]:
    """(the default estimator's name, estimator -> trace), read where they are kept, else recorded."""
    from dspark import SpeculativeDecoder
    from dspark.bench.trace import AcceptanceTrace
    from dspark.config import SamplingParams

    names = [OWN, "online", LOGISTIC] if drafter != "ngram" else [OWN, LOGISTIC]
    files = {}
    if options.traces is not None:
        stems = {n: f"{drafter.replace('/', '-')}-{temperature:g}-{n.replace('/', '-')}.jsonl" for n in names}
        files = {n: options.traces / stem for n, stem in stems.items()}
        if all(file.is_file() for file in files.values()):
            found = {n: AcceptanceTrace.load(file) for n, file in files.items()}
            return str(found[OWN].about["estimator"]), found
    target, prompts = load()
    params = SamplingParams(max_tokens=options.tokens, temperature=temperature)
    with SpeculativeDecoder.from_pretrained(
        target, drafter, cost=None, max_slots=options.slots, max_len=max(map(len, prompts)) + options.tokens + 16,
        scheduler="fixed", gamma_policy="static", prefix_cache=False, seed=options.seed,
    ) as decoder:  # fmt: skip
        own = decoder.engine.parts.name("estimator").removeprefix("dspark/")
        traces = record(decoder, names, prompts, params)
    for name, trace in traces.items():
        traces[name] = dataclasses.replace(trace, about={"drafter": drafter, "estimator": own if name == OWN else name})
    for name, file in files.items():
        traces[name].save(file)
    return own, traces


def main(arguments: Iterable[str] | None = None) -> int:
    """Record, replay and compare."""
    options = parse(None if arguments is None else list(arguments))
    prepare()
    from dspark.scheduling.cost import CostProfile

    about, say = machine(), Progress()
    kept: list[Any] = []

    def load() -> tuple[Any, list[list[int]]]:
        if not kept:
            from dspark.targets.hf import HFTarget

            kept.append(HFTarget.from_pretrained(TARGET, dtype=options.dtype, device="cpu"))
            kept.append(encode_chats(load_prompts(options.prompts), kept[0].tokenizer))
        return kept[0], kept[1]

    rows: list[dict[str, Any]] = []
    for drafter in options.drafter:
        for temperature in options.temperature:
            own, traces = traces_of(options, drafter, temperature, load)
            say(f"{drafter} at {temperature:g}: {len(traces[OWN].requests)} requests, default {own}")
            mode = "greedy" if temperature == 0 else "rejection"
            cost = CostProfile.load(options.profile).table() if options.profile else committed_cost(drafter, mode)
            labels = {"drafter": drafter, "temperature": temperature, "own": own}
            rows += [labels | row for row in compare(traces, cost, options.concurrency, options.resamples)]
            say("replayed")
    text = report(rows, about, options)
    print(f"\n{text}\n")
    if not options.no_write:
        print(f"written: {write_json('estimators', {'about': about, 'rows': rows})}")
        write_section("estimators", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
