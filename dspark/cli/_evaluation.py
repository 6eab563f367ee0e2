"""What ``dspark calibrate`` and ``dspark eval`` share: data sets, sampling, progress, and how a run ends."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark.cli import _options as opt
from dspark.cli._prompt_file import Conversation, conversation, read_lines
from dspark.errors import EvaluationError, RequestError

if TYPE_CHECKING:
    from rich.progress import Progress

    from dspark.api import SpeculativeDecoder
    from dspark.evaluation.collect import Item, Sampling
    from dspark.evaluation.rounds import RoundLog

PANEL = "Sampling"
FULL_LENGTH = {"scheduler": "fixed"}
"""Every draft is verified in full: what a scheduler leaves out is never seen."""

DataOption = Annotated[
    list[Path],
    typer.Option("--data", help="JSON lines with turns, messages or prompt (each file a data set), or a folder."),
]
LimitOption = Annotated[int | None, typer.Option(min=1, help="Use the first so many prompts of each data set.")]
SystemOption = Annotated[str | None, typer.Option(help="A system message for chats that have none.")]
RestartOption = Annotated[bool, typer.Option("--restart", help="Drop what an earlier run left, and start over.")]
TokensOption = Annotated[int, typer.Option(min=1, rich_help_panel=PANEL, help="Most new tokens of a turn.")]
TemperatureOption = Annotated[float, typer.Option(rich_help_panel=PANEL, help="0 is greedy.")]
TopKOption = Annotated[int, typer.Option(rich_help_panel=PANEL, help="Keep the k likeliest tokens; 0: off.")]
TopPOption = Annotated[float, typer.Option(rich_help_panel=PANEL, help="Keep the likeliest tokens of this mass.")]
CoupledOption = Annotated[
    bool, typer.Option("--coupled", rich_help_panel=PANEL, help="Sample by the verifier coupled, not rejection.")
]
SeedOption = Annotated[int, typer.Option(min=0, rich_help_panel=PANEL, help="Base of every prompt's draws.")]


@dataclass(frozen=True, slots=True)
class Line:
    """A prompt as it stands in a file, checked."""

    dataset: str
    number: int
    record: dict[str, Any]

    @property
    def digest(self) -> str:
        text = json.dumps(self.record, sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def begin(self, chat: bool, system: str | None) -> Conversation:
        """A fresh conversation."""
        return conversation(self.number, 0, self.record, chat=chat, system=system)


def read_data(paths: Sequence[Path], limit: int | None = None) -> list[Line]:
    """The prompts of all data sets, one of each in turn, so that any beginning of the list has some of each.

    Raises:
        EvaluationError: nothing there, two data sets of one name, or a line that is no prompt.
    """
    files: dict[str, Path] = {}
    for path in paths:
        inside = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not inside:
            raise EvaluationError(f"--data {path}: no .jsonl files in this folder")
        for file in inside:
            if file.stem in files:
                raise EvaluationError(f"--data: {file} and {files[file.stem]} are both called {file.stem!r}")
            files[file.stem] = file
    lines = [line for name, file in files.items() for line in _read(name, file, limit)]
    return sorted(lines, key=lambda line: line.number)


def _read(name: str, file: Path, limit: int | None) -> list[Line]:
    found: list[Line] = []
    for number, record in read_lines(file):
        if limit is not None and len(found) == limit:
            break
        try:
            if isinstance(record, RequestError):
                raise record
            line = Line(name, number, record)
            line.begin(True, None)
        except RequestError as err:
            raise EvaluationError(f"{file} line {number}: {err}") from err
        found.append(line)
    if not found:
        raise EvaluationError(f"--data {file}: no prompts")
    return found


def items_of(lines: Sequence[Line], decoder: SpeculativeDecoder, system: str | None) -> list[Item]:
    """The prompts for a decoder: ``prompt`` is a chat where its tokenizer has a template."""
    from dspark.evaluation.collect import Item

    chat = opt.use_chat(decoder, None)
    digest = hashlib.sha256(json.dumps([chat, system]).encode()).hexdigest()[:8]

    def item(line: Line) -> Item:
        return Item(line.dataset, str(line.number), f"{line.digest}-{digest}", lambda: line.begin(chat, system))

    return [item(line) for line in lines]


def sampling_of(max_tokens: int, temperature: float, top_k: int, top_p: float, seed: int, coupled: bool) -> Sampling:
    """The sampling that the options describe.

    Raises:
        ConfigError: naming the one that is out of range.
    """
    from dspark.config import SamplingParams
    from dspark.evaluation.collect import Sampling

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p)
    return Sampling(params, seed, coupled)


def full_length_decoder(
    options: opt.DecoderOptions,
    log: RoundLog,
    slots: int,
    *,
    more: Mapping[str, Any] | None = None,
    like: SpeculativeDecoder | None = None,
) -> SpeculativeDecoder:
    """A decoder that verifies every draft in full, observed by ``log``; ``more`` are defaults of ``EngineConfig``."""
    defaults = {**FULL_LENGTH, "max_slots": min(opt.MOST_SLOTS, slots), **(more or {})}
    return opt.build_decoder(options, defaults=defaults, observers=[log], like=like)


def file_name(label: str) -> str:
    """A label as the name of a file."""
    return re.sub(r"[^\w.@+-]+", "_", label)


class ProgressBar:
    """Shows the parts of a run on standard error: bars in a terminal, a line a part elsewhere."""

    def __init__(self, unit: str, bars: Progress | None) -> None:
        self._unit, self._bars = unit, bars
        self._task: Any = None
        self._tokens = 0

    def begin(self, what: str, total: int, done: int) -> None:
        """A part begins."""
        self._tokens = 0
        if self._bars is not None:
            self._task = self._bars.add_task(what, total=total, completed=done, note="")
            return
        earlier = f", {done} of them from an earlier run" if done else ""
        typer.echo(f"{what}: {total} {self._unit}{earlier}", err=True)

    def done(self, count: int) -> None:
        """Pieces of it are finished."""
        if self._bars is not None:
            self._bars.update(self._task, advance=count)

    def tokens(self, count: int) -> None:
        """Tokens are out."""
        self._tokens += count
        if self._bars is not None:
            self._bars.update(self._task, note=f"{self._tokens} tokens")


@contextmanager
def progress(unit: str) -> Iterator[ProgressBar]:
    """Progress of a run that counts ``unit``, such as prompts."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from dspark.cli._render import console_for

    console = console_for(stderr=True)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit),
        TextColumn("{task.fields[note]}"), TimeElapsedColumn(),
    )  # fmt: skip
    if not console.is_terminal:
        yield ProgressBar(unit, None)
        return
    with Progress(*columns, console=console) as bars:
        yield ProgressBar(unit, bars)


@contextmanager
def resumable(folder: Path) -> Iterator[None]:
    """Say, where the run is interrupted, that what is finished is kept; exit code 130."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(
            f"dspark: interrupted; what was finished is kept in {folder}, and the same command goes on", err=True
        )
        raise typer.Exit(130) from None


def write_result(folder: Path, names: tuple[str, str], result: dict[str, Any], page: str) -> tuple[Path, Path]:
    """Write the result as JSON and the page that shows it.

    Raises:
        EvaluationError: they can't be written.
    """
    from dspark.cli._prompt_file import to_json

    paths = folder / names[0], folder / names[1]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths[0].write_text(to_json(result, indent=2) + "\n", encoding="utf-8")
        paths[1].write_text(page, encoding="utf-8")
    except OSError as err:
        raise EvaluationError(f"{folder}: {err}") from err
    return paths
