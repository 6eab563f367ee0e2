"""``dspark simulate``: recorded drafts under a cost curve, a load and the real schedulers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark.cli import _evaluation as ev
from dspark.cli import _options as opt
from dspark.cli._bench_sweep import CONCURRENCIES, ConcurrencyOption, RateOption
from dspark.errors import ConfigError

if TYPE_CHECKING:
    from dspark import _sched
    from dspark.bench.load import Load
    from dspark.bench.simulation import Point, Policy, World
    from dspark.bench.trace import AcceptanceTrace

SCHEDULERS = ("causal", "lookahead", "lagged", "fixed", "clairvoyant")
CONTEXTS = (512, 2048, 8192, 32768)
"""Context buckets of a roofline's table."""
MOST_TOKENS = 4096
COST, LOAD = "Cost", "Load"


def cost_option(**more: Any) -> Any:
    return typer.Option(rich_help_panel=COST, **more)


def load_option(**more: Any) -> Any:
    return typer.Option(rich_help_panel=LOAD, **more)


def simulate(
    trace: Annotated[Path, typer.Argument(help="The trace; with --data it is recorded first.")],
    profile: Annotated[Path | None, cost_option(help="What steps take: a file of `dspark profile`.")] = None,
    parameters: Annotated[float, cost_option(help="Roofline: parameters that a token passes through.")] = 0.0,
    bandwidth: Annotated[float, cost_option(help="Roofline: bytes a second.")] = 0.0,
    flops: Annotated[float, cost_option(help="Roofline: operations a second.")] = 0.0,
    draft_parameters: Annotated[float, cost_option(help="Roofline: parameters of the drafter.")] = 0.0,
    parameter_bytes: Annotated[float, cost_option(help="Roofline: bytes of a parameter.")] = 2.0,
    cache_bytes: Annotated[float, cost_option(help="Roofline: cache bytes of a token, all layers.")] = 0.0,
    pair_flops: Annotated[float, cost_option(help="Roofline: operations of a (query, key) pair, all layers.")] = 0.0,
    glue: Annotated[float, cost_option(help="Roofline: seconds of a step outside models.")] = 0.0,
    scheduler: Annotated[
        list[str] | None, typer.Option(help="Schedulers; several by default. clairvoyant: only what will be accepted.")
    ] = None,
    gamma: Annotated[
        list[int] | None, typer.Option(min=0, help="Drafted tokens a round; the trace's by default. May be repeated.")
    ] = None,
    adaptive: Annotated[bool, typer.Option("--adaptive", help="Also with gamma chosen by cost and history.")] = False,
    confidence: Annotated[
        str | None, typer.Option(help="What schedulers see: recorded, learned or oracle; what fits the trace.")
    ] = None,
    concurrency: ConcurrencyOption = None,
    rate: RateOption = None,
    per_user: Annotated[int, load_option(min=1, help="Requests of a run, by concurrency.")] = 8,
    replicas: Annotated[int, load_option(min=1, help="Engines; a request goes to the one with the fewest.")] = 1,
    max_slots: Annotated[int, load_option(min=1, help="Most requests decoded at once by an engine.")] = 64,
    step_tokens: Annotated[int, load_option(min=1, help="Most prompt tokens of a step.")] = 512,
    kv_tokens: Annotated[int | None, load_option(min=1, help="Cache tokens of an engine.")] = None,
    extra_prompt: Annotated[int, load_option(min=0, help="Tokens that prompts are longer than recorded.")] = 0,
    shuffle: Annotated[bool, typer.Option("--shuffle", rich_help_panel=LOAD, help="Requests in random order.")] = False,
    tier: Annotated[
        list[float] | None, typer.Option(help="A service level: tokens a second that 90 % of users get.")
    ] = None,
    lag: Annotated[bool, typer.Option("--lag", help="Also the price of planning two rounds late.")] = False,
    seed: ev.SeedOption = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of result.json and report.html.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")] = False,
    data: Annotated[list[Path] | None, typer.Option("--data", help="Record the trace on these prompts first.")] = None,
    limit: ev.LimitOption = None,
    target: opt.TargetOption = opt.TARGET,
    dtype: opt.DtypeOption = "auto",
    device: opt.DeviceOption = "auto",
    drafter: opt.DrafterOption = "auto",
    estimator: opt.EstimatorOption = None,
    settings: opt.SetOption = None,
    max_tokens: ev.TokensOption = 128,
    temperature: ev.TemperatureOption = 0.0,
    coupled: ev.CoupledOption = False,
) -> None:
    """Replay an acceptance trace under loads: throughput, speed of each user, accepted length and verify budget.

    A trace holds which drafts were made and how much of them the target accepts. What steps take is a profile of this
    machine or a roofline of another. Schedulers are those of the engine.
    """
    from dspark.bench.load import Closed, Poisson
    from dspark.bench.simulation import World
    from dspark.bench.trace import AcceptanceTrace

    if data is not None:
        options = opt.DecoderOptions(
            target,
            None,
            dtype,
            device,
            drafter,
            None,
            estimator,
            max(gamma or [0]) or None,
            None,
            "none",
            settings or (),
        )
        record_to(trace, options, data, limit, max_tokens, temperature, coupled, seed)
    found = AcceptanceTrace.load(trace)
    limits = {
        "parameters": parameters, "bandwidth": bandwidth, "flops": flops, "draft_parameters": draft_parameters,
        "parameter_bytes": parameter_bytes, "cache_bytes": cache_bytes, "pair_flops": pair_flops, "glue": glue,
    }  # fmt: skip
    cost, roofline = cost_from(profile, limits, found, max_slots)
    world = World(
        found, cost, roofline, replicas, max_slots, step_tokens, kv_tokens, extra_prompt, shuffle, seed, per_user
    )
    users = list(concurrency or ([] if rate else CONCURRENCIES))
    loads: list[Load] = [*map(Closed, users), *(Poisson(r, seed) for r in rate or ())]
    policies = policies_of(scheduler or SCHEDULERS, gamma or [None], adaptive, confidence)
    result = run(world, policies, loads, tier or [], lag)
    result["settings"] = {
        "trace": {"file": str(trace), "requests": len(found.requests), **found.about},
        "cost": {"profile": str(profile)} if profile is not None else limits,
        "world": {
            name: getattr(world, name)
            for name in ("replicas", "max_slots", "step_tokens", "kv_tokens", "extra_prompt", "shuffle", "seed")
        },
    }
    show(result, output, json)


def record_to(
    path: Path,
    options: opt.DecoderOptions,
    data: Sequence[Path],
    limit: int | None,
    max_tokens: int,
    temperature: float,
    coupled: bool,
    seed: int,
) -> None:
    """Decode prompts and keep the trace."""
    from dspark.cli._trace import record, recording_decoder

    sampling = ev.sampling_of(max_tokens, temperature, 0, 1.0, seed, coupled)
    lines = ev.read_data(data, limit)
    decoder = recording_decoder(options, sampling)
    try:
        record(decoder, lines, None, sampling).save(path)
    finally:
        decoder.close()


def cost_from(
    profile: Path | None, limits: dict[str, float], trace: AcceptanceTrace, slots: int
) -> tuple[_sched.CostTable, _sched.Roofline | None]:
    """The table to plan with, and the roofline where that is what steps take.

    Raises:
        ConfigError: neither or both are given, or impossible limits.
    """
    from dspark import _sched
    from dspark.scheduling.cost import CostProfile

    named = any(limits[name] for name in ("parameters", "bandwidth", "flops"))
    if (profile is not None) == named:
        raise ConfigError("say what steps take: --profile FILE, or --parameters, --bandwidth and --flops of a roofline")
    if profile is not None:
        return CostProfile.load(profile).table(), None
    try:
        roofline = _sched.Roofline(**limits)
        return roofline.table(CONTEXTS, MOST_TOKENS, slots, trace.gamma), roofline
    except ValueError as err:
        raise ConfigError(str(err)) from err


def policies_of(
    schedulers: Sequence[str], gammas: Sequence[int | None], adaptive: bool, confidence: str | None
) -> list[Policy]:
    """Plain decoding, then every scheduler at every gamma, then with gamma chosen."""
    from dspark.bench.advise import THRESHOLD
    from dspark.bench.simulation import Policy

    policies = [Policy("off", 0)]
    policies += [Policy(name, g, confidence=confidence) for name in schedulers for g in gammas if g != 0]
    if adaptive:
        chosen = [name for name in schedulers if name not in ("fixed", "threshold", "off", "clairvoyant")]
        policies += [Policy(name, adaptive=THRESHOLD, confidence=confidence) for name in chosen or ["causal"]]
    return policies


def run(
    world: World, policies: Sequence[Policy], loads: Sequence[Load], levels: Sequence[float], lag: bool
) -> dict[str, Any]:
    """Every point and what follows from them, for JSON."""
    from dspark.bench.simulation import frontier, lag_price, sweep, tiers

    points = sweep(world, policies, loads)
    feasible = [p for p in points if p.policy.scheduler != "clairvoyant" and p.policy.confidence != "oracle"]
    return {
        "points": [p.as_dict() for p in points],
        "frontier": [p.as_dict() for p in frontier(feasible)],
        "tiers": [
            {"speed": speed, "policies": {label: _point(best) for label, best in by_policy.items()}}
            for speed, by_policy in tiers(feasible, levels).items()
        ],
        "lag": [{"load": load.label, "price": price} for load, price in (lag_price(world, loads) if lag else [])],
    }


def _point(point: Point | None) -> dict[str, Any] | None:
    return None if point is None else point.as_dict()


def show(result: dict[str, Any], output: Path | None, json: bool) -> None:
    """Write what was asked for, and print tables or JSON."""
    from dspark.bench.report import simulation_page, simulation_rows, tier_rows
    from dspark.cli._prompt_file import to_json
    from dspark.cli._render import console_for, table_for

    written: list[Path] = []
    if output is not None:
        written += ev.write_result(output, ("result.json", "report.html"), result, simulation_page(result))
    if json:
        typer.echo(to_json(result, indent=2))
        return
    console = console_for()
    tables = {"simulated": simulation_rows(result["points"]), "frontier": simulation_rows(result["frontier"])}
    if result["tiers"]:
        tables["service levels, tokens/s of all"] = tier_rows(result)
    for title, (head, rows) in tables.items():
        table = table_for(console, *head, title=title)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for entry in result["lag"]:
        console.print(f"lag of two rounds at load {entry['load']}: {100 * entry['price']:+.2f} %", markup=False)
    if written:
        console.print(f"written: {', '.join(str(path) for path in written)}", markup=False)
