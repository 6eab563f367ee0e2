"""``dspark eval``: accepted length and more of one drafter or several, on the same prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark.cli import _evaluation as ev
from dspark.cli import _options as opt
from dspark.errors import ConfigError

if TYPE_CHECKING:
    from dspark.api import SpeculativeDecoder
    from dspark.evaluation.collect import Sampling
    from dspark.evaluation.compare import Run
    from dspark.evaluation.forced import Prefix


@dataclass(frozen=True, slots=True)
class Variant:
    """A drafter at one gamma."""

    label: str
    drafter: str
    gamma: int | None


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured, and where it goes."""

    options: opt.DecoderOptions
    variants: Sequence[Variant]
    lines: Sequence[ev.Line]
    sampling: Sampling
    system: str | None
    prefixes: Path | None
    anchors: int
    folder: Path
    restart: bool


def eval(
    data: ev.DataOption,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            "--drafter",
            "-d",
            help="A drafter as elsewhere, or NAME=DRAFTER; repeat it to compare. The first is the base.",
        ),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of results; a run goes on there.")] = Path(
        "dspark-eval"
    ),
    limit: ev.LimitOption = None,
    gamma: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens drafted a round; repeat it for a block-length ablation.")
    ] = None,
    prefixes: Annotated[
        Path | None,
        typer.Option(
            help="Responses for the teacher-forced comparison: JSON lines with prompt_ids and response_ids. By default "
            "the first drafter's answers, which are the target's."
        ),
    ] = None,
    anchors: Annotated[int, typer.Option(min=0, help="Anchors of each response; 0: no such comparison.")] = 16,
    replicates: Annotated[int, typer.Option(min=1, help="Bootstrap replicates.")] = 2000,
    restart: ev.RestartOption = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")] = False,
    target: opt.TargetOption = opt.TARGET,
    revision: opt.RevisionOption = None,
    dtype: opt.DtypeOption = "auto",
    device: opt.DeviceOption = "auto",
    estimator: opt.EstimatorOption = None,
    max_slots: opt.SlotsOption = None,
    settings: opt.SetOption = None,
    system: ev.SystemOption = None,
    max_tokens: ev.TokensOption = 256,
    temperature: ev.TemperatureOption = 0.0,
    top_k: ev.TopKOption = 0,
    top_p: ev.TopPOption = 1.0,
    coupled: ev.CoupledOption = False,
    seed: ev.SeedOption = 0,
) -> None:
    """Measure accepted length, acceptance by position, thresholds and calibration of one drafter or several.

    Every draft is verified in full. All drafters get the same prompts, seeds and settings. Writes result.json and
    report.html to the output folder; a run that was interrupted goes on where it stopped.
    """
    from dspark.cli._prompt_file import to_json
    from dspark.evaluation.acceptance import Bootstrap
    from dspark.evaluation.report import eval_page

    options = opt.DecoderOptions(
        target, revision, dtype, device, "", None, estimator, None, max_slots, "none", settings or ()
    )
    variants = variants_of(drafter or ["auto"], gamma or [None])
    sampling = ev.sampling_of(max_tokens, temperature, top_k, top_p, seed, coupled)
    lines = ev.read_data(data, limit)
    plan = Plan(options, variants, lines, sampling, system, prefixes, anchors, output, restart)
    with ev.resumable(output):
        result = measure(plan, Bootstrap(replicates, seed))
    paths = ev.write_result(output, ("result.json", "report.html"), result, eval_page(result))
    if json:
        typer.echo(to_json(result, indent=2))
    else:
        show(result, paths)


def variants_of(drafters: Sequence[str], gammas: Sequence[int | None]) -> list[Variant]:
    """Every drafter at every gamma.

    Raises:
        ConfigError: two of one name.
    """
    found: dict[str, Variant] = {}
    for text in drafters:
        name, equals, source = text.partition("=")
        if not equals or "/" in name or not source:
            name, source = Path(text).name or text, text
        for gamma in gammas:
            label = name if len(gammas) == 1 else f"{name} @{gamma}"
            if label in found:
                raise ConfigError(f"two drafters are called {label!r}: name them, as in --drafter NAME=DRAFTER")
            found[label] = Variant(label, source, gamma)
    return list(found.values())


def measure(plan: Plan, bootstrap: Any) -> dict[str, Any]:
    """Run every variant and put their figures together.

    Raises:
        DSparkError: naming what is unknown, missing or does not fit.
    """
    from dspark.evaluation import about
    from dspark.evaluation.compare import summarise

    runs: list[Run] = []
    chosen: list[Prefix] = []
    first: SpeculativeDecoder | None = None
    with ev.progress("prompts") as show:
        for variant in plan.variants:
            decoder, run = decode(plan, variant, first, show)
            first = first or decoder
            runs.append(run)
            if plan.anchors:
                chosen = chosen or prefixes_for(plan, run)
                force(plan, run, decoder, chosen, show)
    if first is None:
        raise ConfigError("no drafter to measure")
    settings = {
        "target": about.target_of(first.engine),
        "sampling": plan.sampling.as_dict(),
        "verifier": first.engine.parts.name(plan.sampling.as_dict()["mode"]),
        "teacher_forced": {"responses": len(chosen), "anchors": plan.anchors, "span": span_of(plan)},
    }
    return summarise(runs, bootstrap, settings)


def decode(plan: Plan, variant: Variant, first: SpeculativeDecoder | None, show: Any) -> tuple[SpeculativeDecoder, Run]:
    """A variant's decoder, and what it did with the prompts."""
    import dataclasses

    from dspark.evaluation.compare import run_prompts
    from dspark.evaluation.rounds import RoundLog

    log = RoundLog()
    options = dataclasses.replace(plan.options, drafter=variant.drafter, gamma=variant.gamma)
    decoder = ev.full_length_decoder(options, log, len(plan.lines), like=first)
    items = ev.items_of(plan.lines, decoder, plan.system)
    path = plan.folder / "rounds" / f"{ev.file_name(variant.label)}.jsonl"
    run = run_prompts(decoder, log, items, plan.sampling, path, label=variant.label, show=show, restart=plan.restart)
    for key, why in run.failed.items():
        typer.echo(f"dspark: {variant.label}, {key}: {' '.join(why.split())}", err=True)
    return decoder, run


def prefixes_for(plan: Plan, run: Run) -> list[Prefix]:
    """The responses that were named, or those of the first run, kept in the folder so that they stay the same."""
    from dspark.evaluation.compare import prefixes_of
    from dspark.evaluation.forced import read_prefixes, write_prefixes

    if plan.prefixes is not None:
        return read_prefixes(plan.prefixes)
    path = plan.folder / "prefixes.jsonl"
    kept = {p.key: p for p in read_prefixes(path)} if path.exists() and not plan.restart else {}
    new = prefixes_of(run)
    chosen = [kept.get(p.key, p) for p in new]
    if chosen:
        write_prefixes(path, list({**kept, **{p.key: p for p in chosen}}.values()))
    return chosen


def force(plan: Plan, run: Run, decoder: SpeculativeDecoder, prefixes: Sequence[Prefix], show: Any) -> None:
    """The teacher-forced comparison of one variant."""
    from dspark.evaluation.compare import run_forced

    path = plan.folder / "forced" / f"{ev.file_name(run.label)}.jsonl"
    run_forced(
        run,
        decoder,
        prefixes,
        plan.sampling,
        path,
        span=span_of(plan),
        anchors=plan.anchors,
        show=show,
        restart=plan.restart,
    )


def span_of(plan: Plan) -> int:
    """Tokens behind every anchor: the same whichever drafters run, unless a larger gamma is asked for."""
    from dspark.evaluation.forced import SPAN

    return max(SPAN, *(v.gamma or 0 for v in plan.variants))


def show(result: Mapping[str, Any], paths: Sequence[Path]) -> None:
    """The main table, and where the rest is."""
    from dspark.cli._render import console_for, table_for
    from dspark.evaluation.report import length_rows, position_rows

    console = console_for()
    head, rows = length_rows(result)
    for title, (columns, body) in [
        ("accepted length", (head, rows)),
        *((d["label"], position_rows(d)) for d in result["drafters"]),
    ]:
        table = table_for(console, *columns, title=title)
        for row in body:
            table.add_row(*row)
        console.print(table)
        console.print()
    for d in result["drafters"]:
        if d["calibration"]:
            mean = d["calibration"]["mean_ece"]
            console.print(f"{d['label']}: mean ECE of survival {100 * mean:.2f} %", markup=False)
    console.print(f"written: {', '.join(str(path) for path in paths)}", markup=False)
