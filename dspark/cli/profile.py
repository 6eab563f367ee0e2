"""``dspark profile``: what forwards and drafts cost here, for schedulers and the choice of gamma."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark.cli import _options as opt
from dspark.errors import CostTableError

if TYPE_CHECKING:
    from dspark.api import SpeculativeDecoder
    from dspark.scheduling.cost import CostProfile

SLOTS = 64
"""Requests at once where nothing is said: as many as the largest batch that is looked at."""
DRAFT_SHARE = 0.25
GLUE_TOKENS = 24


def profile(
    target: opt.TargetOption = opt.TARGET,
    revision: opt.RevisionOption = None,
    dtype: opt.DtypeOption = "auto",
    device: opt.DeviceOption = "auto",
    drafter: opt.DrafterOption = "ngram",
    gamma: opt.GammaOption = None,
    max_slots: opt.SlotsOption = None,
    settings: opt.SetOption = None,
    tokens: Annotated[int, typer.Option(min=2, help="Largest forward, in tokens.")] = 256,
    context: Annotated[
        list[int] | None, typer.Option(min=0, help="Tokens before each sequence, a bucket each; 64 and 512 by default.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=1.0, help="Time to take, loading apart.")] = 60.0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A file for the profile, beside the one that is kept.")
    ] = None,
    page: Annotated[Path | None, typer.Option("--html", help="A file for the curves.")] = None,
    check: Annotated[
        Path | None, typer.Option(help="Measure nothing: say whether this profile holds here. Exit code 1 if not.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON.")] = False,
) -> None:
    """Measure what forwards and drafts cost on this machine, and keep it for engines to plan with.

    Times forwards by executed tokens, context and batch size, with more points where the curve bends, and drafts by
    requests and gamma. The result is kept with what it depends on; an engine refuses one that was measured elsewhere.
    """
    options = opt.DecoderOptions(
        target, revision, dtype, device, drafter, None, None, gamma, max_slots or SLOTS, "none", settings or ()
    )
    decoder = opt.build_decoder(options)
    if check is not None:
        say_whether_it_holds(decoder, check)
        return
    with progress(seconds) as tell:
        measured = measure_all(decoder, tokens, tuple(context or (64, 512)), seconds, tell)
    show(measured, save(measured, output, page), json)


def say_whether_it_holds(decoder: SpeculativeDecoder, path: Path) -> None:
    """Print that a profile holds for this machine, target and drafter.

    Raises:
        CostTableError: it does not; the message names what differs.
    """
    from dspark.engine.draft_cost import drafter_fingerprint
    from dspark.scheduling.cost import CostProfile, differences

    parts = decoder.engine.parts
    found = CostProfile.load(path)
    found.check(parts.target.fingerprint())
    other = differences(found.drafter, drafter_fingerprint(parts, decoder.engine.config)) if found.draft else []
    if other:
        raise CostTableError(f"{path}: its drafting times do not hold here ({'; '.join(other)}); measure a new one")
    typer.echo(f"{path} holds here: {found.state}, {sum(len(b.points) for b in found.buckets)} points")


def measure_all(
    decoder: SpeculativeDecoder,
    tokens: int,
    contexts: tuple[int, ...],
    seconds: float,
    tell: Callable[[], None] | None = None,
) -> CostProfile:
    """Forwards, drafts, and what a step takes beside them.

    Raises:
        CostTableError: nothing fits the slots.
    """
    from dspark.engine.draft_cost import drafter_fingerprint, measure_draft, spread
    from dspark.scheduling.cost import profile as measure

    engine = decoder.engine
    parts, slots = engine.parts, engine.config.max_slots
    share = DRAFT_SHARE if parts.gamma else 0.0
    taps = parts.drafter.tap_layers
    glue = measure_glue(decoder)
    found = measure(
        parts.target, slots=slots, most_tokens=tokens, contexts=contexts, budget_seconds=(1 - share) * seconds,
        taps=taps, glue_seconds=glue, tell=tell,
    )  # fmt: skip
    if not parts.gamma:
        return found
    gammas = {1, 2, 3, 5, parts.gamma}
    points = measure_draft(
        parts,
        list(spread(slots)),
        [g for g in gammas if g <= parts.gamma],
        budget_seconds=share * seconds,
        tell=tell,
    )
    return dataclasses.replace(found, draft=points, drafter=drafter_fingerprint(parts, engine.config))


def measure_glue(decoder: SpeculativeDecoder) -> float:
    """Median seconds of a real step outside forwards."""
    from dspark.config import SamplingParams

    engine = decoder.engine
    vocab = engine.parts.target.vocab_size
    params = SamplingParams(max_tokens=min(GLUE_TOKENS, engine.max_len - 8), ignore_eos=True)
    engine.submit([i % vocab for i in range(8)], params)
    rest: list[float] = []
    while engine.has_work:
        before = dict(engine.stats.phase_seconds)
        engine.step()
        took = {k: s - before.get(k, 0.0) for k, s in engine.stats.phase_seconds.items()}
        rest.append(took["step"] - took.get("target", 0.0) - took.get("draft", 0.0))
    return max(statistics.median(rest), 0.0)


@contextmanager
def progress(seconds: float) -> Iterator[Callable[[], None]]:
    """A bar on standard error that fills with the time; nothing where that is no terminal."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from dspark.cli._render import console_for

    console = console_for(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[timings]} timings"))
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("profile", total=seconds, timings=0)
        began, count = time.perf_counter(), 0

        def tell() -> None:
            nonlocal count
            count += 1
            bar.update(task, completed=min(time.perf_counter() - began, seconds), timings=count)

        yield tell
        bar.update(task, completed=seconds, timings=count)


def save(measured: CostProfile, output: Path | None, page: Path | None) -> list[Path]:
    """Keep the profile and write what was asked for; the files."""
    from dspark.cli._profile_page import profile_page
    from dspark.scheduling.cache import keep

    written: list[Path] = []
    kept = keep(measured)
    if kept is not None:
        written.append(kept)
        if measured.draft:  # engines with another drafter take the forwards
            keep(dataclasses.replace(measured, draft=(), drafter={}))
    if output is not None:
        measured.save(output)
        written.append(output)
    if page is not None:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(profile_page(measured), encoding="utf-8")
        written.append(page)
    return written


def show(measured: CostProfile, written: list[Path], json: bool) -> None:
    """Print tables, or JSON."""
    from dspark.cli._profile_page import batch_rows, draft_rows, forward_rows
    from dspark.cli._prompt_file import to_json
    from dspark.cli._render import console_for, table_for

    if json:
        typer.echo(to_json({**measured.to_json(), "files": [str(path) for path in written]}, indent=2))
        return
    console = console_for()
    tables: Mapping[str, Any] = {
        "forwards": forward_rows(measured),
        "drafts, milliseconds": draft_rows(measured),
        "tokens over sequences": batch_rows(measured),
    }
    for title, (head, rows) in tables.items():
        if rows:
            table = table_for(console, *head, title=title)
            for row in rows:
                table.add_row(*row)
            console.print(table)
    console.print(
        f"state {measured.state}, {measured.mode}, noise {100 * measured.noise:.1f} %, "
        f"{1e3 * measured.glue_seconds:.2f} ms of a step outside models",
        markup=False,
    )
    console.print(f"written: {', '.join(str(path) for path in written) or 'nothing'}", markup=False)
