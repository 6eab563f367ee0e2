"""``dspark data``: training data that the target writes."""

from __future__ import annotations

import json
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark.cli import _options as opt
from dspark.errors import CapacityError, ConfigError, DSparkError

if TYPE_CHECKING:
    from rich.console import Console

    from dspark.training.data_output import Report
    from dspark.training.data_plan import Budget, DataConfig, Estimate
    from dspark.training.data_run import DataRun
    from dspark.training.selfprompt import SelfPromptConfig

SAMPLING, PROMPTS, SIZE = "Sampling", "Prompts", "Size"
INTERRUPTED = 130
"""Exit code of a run that was asked to stop."""
_UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SHOWN_FAILURES = 5


def panel(name: str, *flags: str, **more: Any) -> Any:
    """An option of a panel; left out, the field keeps its default."""
    return typer.Option(*flags, rich_help_panel=name, **more)


def data(
    file: Annotated[Path | None, typer.Argument(help="JSON lines with turns, messages or prompt.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The file of responses (.jsonl).")] = None,
    target: opt.TargetOption = opt.TARGET,
    revision: opt.RevisionOption = None,
    dtype: opt.DtypeOption = "auto",
    device: opt.DeviceOption = "auto",
    drafter: opt.DrafterOption = "none",
    max_slots: opt.SlotsOption = None,
    cost: opt.CostOption = "auto",
    settings: opt.SetOption = None,
    self_prompts: Annotated[
        int | None, panel(PROMPTS, "--self", min=1, help="No file: the target writes so many prompts itself.")
    ] = None,
    self_temperature: Annotated[float | None, panel(PROMPTS, help="At which it writes them; 1 by default.")] = None,
    self_tokens: Annotated[int | None, panel(PROMPTS, help="Longest of them; 256 by default.")] = None,
    chat: Annotated[
        bool, panel(PROMPTS, "--chat/--raw", help="Through the chat template, or prompts continued as they are.")
    ] = True,
    system: Annotated[str | None, panel(PROMPTS, help="A system message for chats that have none.")] = None,
    thinking: Annotated[
        bool | None, panel(PROMPTS, "--thinking/--no-thinking", help="The chat template's enable_thinking.")
    ] = None,
    template_args: Annotated[
        list[str] | None, panel(PROMPTS, "--template", metavar="KEY=VALUE", help="Its other variables, JSON or text.")
    ] = None,
    max_prompt: Annotated[
        int | None, panel(PROMPTS, help="Longest prompt in tokens, history included; 1024 by default.")
    ] = None,
    temperature: Annotated[
        list[float] | None, panel(SAMPLING, help="1 by default; 0 is greedy. May be repeated: an answer at each.")
    ] = None,
    samples: Annotated[int | None, panel(SAMPLING, help="Answers at each temperature above 0.")] = None,
    max_tokens: Annotated[int | None, panel(SAMPLING, help="Longest answer; 1024 by default.")] = None,
    min_response: Annotated[int | None, panel(SAMPLING, help="Shorter answers are not kept; 2 by default.")] = None,
    top_k: Annotated[int | None, panel(SAMPLING, help="Keep the k likeliest tokens; 0: off.")] = None,
    top_p: Annotated[float | None, panel(SAMPLING, help="Keep the likeliest tokens of this mass; 1: off.")] = None,
    min_p: Annotated[float | None, panel(SAMPLING, help="Keep tokens of this share of the best; 0: off.")] = None,
    repetition_penalty: Annotated[float | None, panel(SAMPLING, help="Over prompt and output; 1: off.")] = None,
    seed: Annotated[int | None, panel(SAMPLING, help="The same data each time, whatever the batch.")] = None,
    budget_tokens: Annotated[int | None, panel(SIZE, min=1, help="Most tokens that the target may write.")] = None,
    budget_bytes: Annotated[str | None, panel(SIZE, help="Most bytes of the files, such as 500MB or 2GiB.")] = None,
    fill: Annotated[
        bool, panel(SIZE, "--fill", help="Write until the budget is used up; else too much is refused.")
    ] = False,
    dry_run: Annotated[bool, panel(SIZE, "--dry-run", help="Estimate, and write nothing.")] = False,
    adopt: Annotated[
        bool, typer.Option("--adopt", help="Go on with responses that have no header, after checking each.")
    ] = False,
) -> None:
    """Let the target answer prompts, for training a drafter.

    The same command goes on where an earlier one ended, however it ended. Exit code 1 where requests failed, 130 where
    it was interrupted.
    """
    if output is None:
        raise typer.BadParameter("--output: say where the responses go")
    check_usage(file, output, self_prompts, self_temperature, self_tokens, budget_tokens, budget_bytes, fill)
    given = {
        "temperatures": temperature, "samples": samples, "max_tokens": max_tokens, "max_prompt": max_prompt,
        "min_response": min_response, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": repetition_penalty, "seed": seed, "chat": chat, "system": system,
        "template_args": parse_template(template_args or (), thinking),
    }  # fmt: skip
    config = data_config(given)
    prompts = file if file is not None else self_config(self_prompts, self_temperature, self_tokens)
    budget = make_budget(budget_tokens, budget_bytes)
    options = opt.DecoderOptions(
        target, revision, dtype, device, drafter, max_slots=max_slots, cost=cost, settings=settings or ()
    )
    from dspark.cli._render import console_for

    console = console_for()
    run = make_run(options, config, output, prompts, adopt)
    plan = run.plan()
    show_plan(console, plan, config, budget, fill)
    warn_of_space(plan, output)
    if not fill:
        plan.check(budget)
    if dry_run:
        return
    report = execute(run, budget, plan)
    show_report(console, report, run)
    if report.stopped == "interrupted":
        raise typer.Exit(INTERRUPTED)
    if report.failed:
        raise typer.Exit(1)


def check_usage(
    file: Path | None,
    output: Path,
    self_prompts: int | None,
    self_temperature: float | None,
    self_tokens: int | None,
    budget_tokens: int | None,
    budget_bytes: str | None,
    fill: bool,
) -> None:
    """Refuse options that contradict one another.

    Raises:
        typer.BadParameter: exit code 2.
        DSparkError: a file that is not there, or an output that can't be.
    """
    if (file is None) == (self_prompts is None):
        raise typer.BadParameter("give either a file of prompts or --self N")
    if self_prompts is None and (self_temperature is not None or self_tokens is not None):
        raise typer.BadParameter("--self-temperature and --self-tokens belong to --self")
    if fill and budget_tokens is None and budget_bytes is None:
        raise typer.BadParameter("--fill needs --budget-tokens or --budget-bytes")
    if file is not None and not file.is_file():
        raise DSparkError(f"prompts {str(file)!r}: no such file")
    if not output.parent.is_dir():
        raise DSparkError(f"--output {str(output)!r}: there is no folder {str(output.parent)!r}")
    if file is not None and output.exists() and output.samefile(file):
        raise ConfigError(f"--output {str(output)!r} is the file of prompts")


def data_config(given: dict[str, Any]) -> DataConfig:
    """DataConfig of the options that were given.

    Raises:
        ConfigError: naming the one that is out of range.
    """
    from dspark.config import build_config
    from dspark.training.data_plan import DataConfig

    return build_config(DataConfig, {name: value for name, value in given.items() if value is not None})


def self_config(count: int | None, temperature: float | None, tokens: int | None) -> SelfPromptConfig:
    """How the target writes prompts."""
    from dspark.config import build_config
    from dspark.training.selfprompt import SelfPromptConfig

    given = {"count": count, "temperature": temperature, "max_tokens": tokens}
    return build_config(SelfPromptConfig, {name: value for name, value in given.items() if value is not None})


def make_budget(tokens: int | None, size: str | None) -> Budget:
    """The budget of the options."""
    from dspark.training.data_plan import Budget

    return Budget(tokens, None if size is None else parse_bytes(size))


def parse_bytes(text: str) -> int:
    """``500MB`` -> 500,000,000; ``2GiB`` -> 2 * 2**30.

    Raises:
        ConfigError: for what is no size.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    if not found or found[2] not in _UNITS:
        raise ConfigError(f"--budget-bytes {text!r}: expected a size, such as 500MB or 2GiB")
    return int(float(found[1]) * _UNITS[found[2]])


def parse_template(pairs: list[str] | tuple[()], thinking: bool | None) -> dict[str, Any]:
    """Variables of the chat template.

    Raises:
        ConfigError: for what is no ``KEY=VALUE``.
    """
    args: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--template {pair!r}: expected KEY=VALUE")
        try:
            args[key.strip()] = json.loads(text)
        except ValueError:
            args[key.strip()] = text
    return args


def make_run(
    options: opt.DecoderOptions, config: DataConfig, output: Path, prompts: Path | SelfPromptConfig, adopt: bool
) -> DataRun:
    """Load the target and look at what is there."""
    from dspark.training.data_run import DataRun

    try:
        decoder = opt.build_decoder(options, defaults={"max_slots": opt.MOST_SLOTS, "max_len": config.max_len})
    except CapacityError as err:
        raise CapacityError(f"{err} (max_len is --max-prompt plus --max-tokens)") from err
    return DataRun(decoder, config, output, prompts, adopt=adopt)


def execute(run: DataRun, budget: Budget, plan: Estimate) -> Report:
    """Run, with a bar in a terminal and a line now and then elsewhere."""
    from dspark.cli._data_progress import progress

    try:
        with stop_signals() as stopped, progress(run, plan) as show:
            return run.run(budget, on_step=show, stopped=stopped)
    finally:
        run.decoder.close()


@contextmanager
def stop_signals() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM ask the run to stop after its step; a second one ends it at once."""
    asked: list[int] = []

    def ask(number: int, frame: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def show_plan(console: Console, plan: Estimate, config: DataConfig, budget: Budget, fill: bool) -> None:
    """What the run will write, before it does."""
    variants = ", ".join(f"T = {t:g}" + (f" #{sample}" if sample else "") for t, sample in config.variants)
    there = f", {plan.there:,} of them there" if plan.there else ""
    lines = [
        f"{plan.prompts:,} prompts, {plan.responses + plan.there:,} responses ({variants}){there}",
        f"estimate: up to {plan.tokens:,} tokens of response and {human_bytes(plan.bytes)}; "
        f"{plan.prompt_tokens:,} tokens of prompts to read",
    ]
    bounds = [f"{budget.tokens:,} tokens"] if budget.tokens is not None else []
    bounds += [human_bytes(budget.bytes)] if budget.bytes is not None else []
    if bounds:
        lines.append(f"budget: {' and '.join(bounds)}{', to be filled' if fill else ''}")
    skipped = [f"{reason}: {count}" for reason, count in plan.skipped.most_common()]
    skipped += [f"prompt too long: about {plan.too_long}"] if plan.too_long else []
    if skipped:
        lines.append(f"can't be answered: {'; '.join(skipped)}")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def warn_of_space(plan: Estimate, output: Path) -> None:
    """Say where the disk may not hold what is to come."""
    free = shutil.disk_usage(output.parent).free
    to_come = plan.bytes - sum(file.stat().st_size for file in output.parent.glob(f"{output.stem}*.jsonl"))
    if to_come > free:
        typer.echo(f"dspark: warning: {human_bytes(free)} are free on the disk of {str(output)!r}", err=True)


def show_report(console: Console, report: Report, run: DataRun) -> None:
    """What the run wrote, what it skipped, and how to go on."""
    lines = [
        f"{report.written:,} responses written, {report.responses:,} in {str(run.files.responses)!r}; "
        f"{report.tokens:,} tokens generated"
    ]
    if report.skipped:
        lines.append(f"skipped, see {str(run.files.skipped)!r}:")
        lines += [f"  {count:,} x {reason}" for reason, count in report.skipped.most_common()]
    if report.failed:
        lines.append(f"{len(report.failed)} requests failed; the same command tries them again:")
        lines += [f"  {' '.join(message.split())}" for message in report.failed[:_SHOWN_FAILURES]]
    if report.stopped:
        lines.append(f"ended early: {report.stopped}; the same command goes on")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def human_bytes(count: float) -> str:
    """``1234567`` -> ``1.2 MB``."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"
