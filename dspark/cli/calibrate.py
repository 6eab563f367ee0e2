"""``dspark calibrate``: temperatures for a drafter's confidences, fitted on rounds of held-out prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark.cli import _evaluation as ev
from dspark.cli import _options as opt
from dspark.errors import EvaluationError

if TYPE_CHECKING:
    from dspark.evaluation.collect import Sampling
    from dspark.evaluation.entries import Collected

PASSES = 64
"""Most samples of each prompt, where they are drawn."""
RAW = {"estimator": "linear", "estimator_config": {"calibrate": False}}
"""The checkpoint's own confidence head, as it is."""


def calibrate(
    drafter: Annotated[
        str, typer.Option("--drafter", "-d", help="Folder or Hub id of a checkpoint with a confidence head.")
    ],
    data: Annotated[
        list[Path] | None,
        typer.Option("--data", help="Held-out prompts: JSON lines, or a folder of them."),
    ] = None,
    recorded: Annotated[
        Path | None, typer.Option(help="Rounds of an earlier run: decode nothing, and load no model.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to fit on.")] = 15_000,
    check: Annotated[
        bool, typer.Option("--check", help="Fit nothing: judge the calibration on file. Exit code 1 where it drifted.")
    ] = False,
    calibration: Annotated[
        Path | None, typer.Option(help="The calibration file; by default calibration.json in the checkpoint's folder.")
    ] = None,
    bucket: Annotated[
        float, typer.Option(min=0.0, help="The temperatures hold for sampling temperatures up to so far away.")
    ] = 0.1,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of rounds and report.")] = Path(
        "dspark-calibrate"
    ),
    limit: ev.LimitOption = None,
    restart: ev.RestartOption = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")] = False,
    target: opt.TargetOption = opt.TARGET,
    revision: opt.RevisionOption = None,
    dtype: opt.DtypeOption = "auto",
    device: opt.DeviceOption = "auto",
    gamma: opt.GammaOption = None,
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
    """Fit temperatures for a drafter's confidences (STS), and write them into its checkpoint.

    Collects rounds at full verify length, reports ECE and AUC by position before and after, held out by prompts, and
    writes a report. An interrupted run goes on where it stopped.
    """
    from dspark.evaluation.entries import fit_entry, judge_entry, read_recorded

    if (data is None) == (recorded is None):
        raise typer.BadParameter("give either --data or --recorded")
    path = calibration_path(drafter, calibration)
    options = opt.DecoderOptions(
        target, revision, dtype, device, drafter, None, None, gamma, max_slots, "none", settings or ()
    )
    if recorded is not None:
        found = read_recorded(recorded, Path(drafter).expanduser())
    else:
        sampling = ev.sampling_of(max_tokens, temperature, top_k, top_p, seed, coupled)
        with ev.resumable(output):
            found = collect(options, ev.read_data(data or [], limit), sampling, rounds, system, output, restart)
    result = judge_entry(found, path) if check else fit_entry(found, path, rounds, bucket)
    finish(result, output, found.name + ("-check" if check else ""), json)
    if result.get("drift", {}).get("positions"):
        raise typer.Exit(1)


def calibration_path(drafter: str, named: Path | None) -> Path:
    """Where the temperatures are.

    Raises:
        EvaluationError: the drafter is no local folder, and no file is named.
    """
    from dspark.confidence.calibration import FILE_NAME

    if named is not None:
        return named
    folder = Path(drafter).expanduser()
    if not folder.is_dir():
        raise EvaluationError(
            f"{drafter} is no local folder that temperatures could be written into: name a file with --calibration, "
            "and give it to the estimator with --set estimator_config.calibration=FILE"
        )
    return folder / FILE_NAME


def collect(
    options: opt.DecoderOptions,
    lines: Sequence[ev.Line],
    sampling: Sampling,
    rounds: int,
    system: str | None,
    folder: Path,
    restart: bool,
) -> Collected:
    """Decode prompts, again and again where they are sampled, until so many rounds verified drafts.

    Raises:
        EvaluationError: there are too few; those that there are stay on file.
    """
    from dspark.evaluation.compare import run_prompts, run_settings
    from dspark.evaluation.entries import Collected
    from dspark.evaluation.rounds import RoundLog

    log = RoundLog()
    passes = 1 if sampling.params.greedy else PASSES
    decoder = ev.full_length_decoder(options, log, passes * len(lines), more=RAW)
    items = [item.again(n) for n in range(passes) for item in ev.items_of(lines, decoder, system)]
    drawn = sampling.as_dict()
    name = ev.file_name(f"{drawn['mode']}-{drawn['temperature']:g}-gamma{decoder.engine.parts.gamma}")
    path = folder / f"rounds-{name}.jsonl"
    with ev.progress("rounds") as show:
        run = run_prompts(
            decoder, log, items, sampling, path, label="rounds", rounds=rounds, show=show, restart=restart
        )
    for key, why in run.failed.items():
        typer.echo(f"dspark: {key}: {' '.join(why.split())}", err=True)
    return Collected(run_settings(decoder, run, sampling), run.records, name)


def finish(result: Mapping[str, Any], folder: Path, name: str, json: bool) -> None:
    """Write the report and print the table, or JSON."""
    from dspark.cli._prompt_file import to_json
    from dspark.cli._render import console_for, table_for
    from dspark.evaluation.report import calibrate_page, calibration_rows

    names = f"calibration-{name}.json", f"calibration-{name}.html"
    paths = ev.write_result(folder, names, dict(result), calibrate_page(result))
    if json:
        typer.echo(to_json(dict(result), indent=2))
        return
    console = console_for()
    head, rows = calibration_rows(result)
    table = table_for(console, *head)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    before, after = result["before"]["mean_ece"], result["after"]["mean_ece"]
    console.print(
        f"mean ECE {100 * before:.2f} % before, {100 * after:.2f} % after; {result['rounds']} rounds of "
        f"{result['prompts']} prompts; calibration {result['calibration']}",
        markup=False,
    )
    console.print(f"written: {', '.join(str(path) for path in paths)}", markup=False)
