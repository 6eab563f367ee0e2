"""``dspark advise``: is drafting worth it here, with which gamma and scheduler, at which concurrency."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark.cli import _evaluation as ev
from dspark.cli import _options as opt
from dspark.cli._bench_sweep import Bench

if TYPE_CHECKING:
    from dspark.api import SpeculativeDecoder
    from dspark.bench.advise import Advice
    from dspark.evaluation.collect import Sampling

CONCURRENCIES = (1, 8, 32)


def advise(
    data: ev.DataOption,
    concurrency: Annotated[
        list[int] | None, typer.Option("--concurrency", "-c", min=1, help="Requests at once; 1, 8 and 32 by default.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Prompts of each data set that are decoded.")] = 8,
    trace: Annotated[Path | None, typer.Option(help="Keep the sample of acceptance in this file.")] = None,
    threshold: Annotated[float, typer.Option(min=0.0, max=1.0, help="Gain that makes drafting worth it.")] = 0.04,
    measure: Annotated[
        bool, typer.Option("--measure", help="Run plain decoding and what is advised, beside predicting.")
    ] = False,
    repeat: Annotated[int, typer.Option(min=1, help="Repetitions of --measure; medians are shown.")] = 3,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")] = False,
    target: opt.TargetOption = opt.TARGET,
    revision: opt.RevisionOption = None,
    dtype: opt.DtypeOption = "auto",
    device: opt.DeviceOption = "auto",
    drafter: opt.DrafterOption = "auto",
    estimator: opt.EstimatorOption = None,
    gamma: opt.GammaOption = None,
    cost: opt.CostOption = "auto",
    settings: opt.SetOption = None,
    system: ev.SystemOption = None,
    max_tokens: ev.TokensOption = 64,
    temperature: ev.TemperatureOption = 0.0,
    top_k: ev.TopKOption = 0,
    top_p: ev.TopPOption = 1.0,
    coupled: ev.CoupledOption = False,
    seed: ev.SeedOption = 0,
) -> None:
    """Say whether drafting is worth it on this machine, for these prompts, and how to set it up.

    Decodes a few prompts to see how much of the drafts would be accepted, takes what forwards and drafts cost here
    (`dspark profile` measures it well), and replays the sample under every gamma and scheduler. `--measure` runs the
    advice for real.
    """
    from dspark.bench.advise import advise as weigh

    users = sorted(set(concurrency or CONCURRENCIES))
    options = opt.DecoderOptions(
        target, revision, dtype, device, drafter, None, estimator, gamma, users[-1], cost, settings or ()
    )
    sampling = ev.sampling_of(max_tokens, temperature, top_k, top_p, seed, coupled)
    lines = ev.read_data(data, limit)
    decoder, world = sample(options, sampling, lines, system, trace)
    found = weigh(dataclasses.replace(world, max_slots=users[-1]), users, threshold=threshold)
    decoder.close()
    if measure:
        check(found, options, sampling, lines, system, repeat, threshold)
    show(found, world.trace.native().rates, threshold, json)


def sample(
    options: opt.DecoderOptions, sampling: Sampling, lines: Sequence[ev.Line], system: str | None, path: Path | None
) -> tuple[SpeculativeDecoder, Any]:
    """A sample of acceptance and what this machine's steps cost, put together."""
    from dspark.bench.simulation import World
    from dspark.cli._trace import cost_of, record, recording_decoder

    decoder = recording_decoder(options, sampling)
    profile = cost_of(decoder, options.cost)
    trace = record(decoder, lines, system, sampling)
    if path is not None:
        trace.save(path)
    return decoder, World(trace, profile.table(), step_tokens=decoder.engine.config.step_tokens)


def check(
    found: Sequence[Advice],
    options: opt.DecoderOptions,
    sampling: Sampling,
    lines: Sequence[ev.Line],
    system: str | None,
    repeat: int,
    threshold: float,
) -> None:
    """Run plain decoding, what is advised, and the engine's own choice, and note their speeds."""
    from dspark.bench.load import Closed
    from dspark.bench.sweep import Plan, Sweep
    from dspark.bench.systems import System, known_systems

    known = known_systems(options.drafter)
    most = max(advice.concurrency for advice in found)
    free = dataclasses.replace(options, max_slots=None, gamma=None)  # a gamma that is named is not chosen at run time
    with Bench(free, most=most, vllm="") as bench:
        jobs = bench.prepare(lines, system, sampling)
        for advice in found:
            chosen = {"drafter": options.drafter, **advice.engine_settings(threshold)}
            advised = System(f"advised-{advice.concurrency}", "what is advised", chosen)
            load = Closed(advice.concurrency)
            plan = Plan([known["plain"], advised, known["auto"]], [load], jobs, repeat, greedy=sampling.params.greedy)
            for (name, _), cell in Sweep(plan, bench.backend).run().cells.items():
                advice.measured[name.partition("-")[0]] = cell.middle("throughput")


def show(found: Sequence[Advice], rates: Sequence[float], threshold: float, json: bool) -> None:
    """Print what is advised, with its numbers."""
    from dspark.cli._prompt_file import to_json
    from dspark.cli._render import console_for, table_for

    if json:
        advice = [one.as_dict(threshold) for one in found]
        typer.echo(to_json({"acceptance": list(rates), "threshold": threshold, "advice": advice}, indent=2))
        return
    console = console_for()
    head = ["requests at once", "plain", "best", "gamma", "scheduler", "gain", "chosen at run time", "clairvoyant"]
    measured = any(one.measured for one in found)
    table = table_for(console, *head, *(["measured gain"] if measured else []), title="Predicted tokens/s")
    for one in found:
        row = [
            str(one.concurrency), f"{one.plain.throughput:.1f}", f"{one.best.throughput:.1f}",
            str(one.best.policy.gamma), one.best.policy.scheduler, f"{100 * one.gain:+.1f} %",
            f"{one.adaptive.throughput:.1f}", f"{one.bound.throughput:.1f}",
        ]  # fmt: skip
        gain = one.measured_gain
        table.add_row(*row, *([] if not measured else ["-" if gain is None else f"{100 * gain:+.1f} %"]))
    console.print(f"accepted by position, given all before: {' '.join(f'{r:.2f}' for r in rates)}", markup=False)
    console.print(table)
    for one in found:
        console.print(one.sentence(threshold), markup=False)
