"""Answering a file of prompts: turns one after another, lines side by side, answers in the file's order."""

from __future__ import annotations

import dataclasses
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import typer

from dspark.cli._options import MOST_SLOTS, DecoderOptions, build_decoder, use_chat
from dspark.cli._prompt_file import Conversation, OrderedWriter, conversation, read_lines
from dspark.errors import DSparkError

if TYPE_CHECKING:
    from dspark.api import Generation, SpeculativeDecoder
    from dspark.config import SamplingParams
    from dspark.drive import RequestLoop


def line_params(params: SamplingParams, line: int, choice: int) -> SamplingParams:
    """Parameters of one sample of one line: its seed is hash(hash(seed, line - 1), choice), its n 1."""
    from dspark.sampling.draws import choice_seed

    seed = params.seed
    if seed is not None:
        seed = choice_seed(seed, line - 1)
        seed = choice_seed(seed, choice) if params.n > 1 else seed
    return dataclasses.replace(params, n=1, seed=seed, request_key=None)


class FileRun:
    """Keeps an engine busy with conversations; a refused or failed one ends alone.

    Args:
        decoder: whose engine is driven.
        params: for every line.
        on_done: called with each conversation that ended.
        on_tokens: called with the number of tokens that a step added.
    """

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        params: SamplingParams,
        on_done: Callable[[Conversation], None],
        on_tokens: Callable[[int], None],
    ) -> None:
        from dspark.drive import RequestLoop

        self._decoder, self._params, self._on_done = decoder, params, on_done
        self._loop: RequestLoop[Conversation] = RequestLoop(decoder, self._take, on_tokens)
        self._ready: deque[Conversation] = deque()

    def run(self, conversations: Iterable[Conversation]) -> None:
        """Answer them all. What is live when this is left by an exception is aborted."""
        source = iter(conversations)
        self._loop.run(lambda: self._fill(source, most=2 * self._decoder.engine.config.max_slots))

    def _fill(self, source: Iterator[Conversation], most: int) -> None:
        """Submit until the engine has enough waiting; next turns go first."""
        while len(self._loop) < most:
            one = self._ready.popleft() if self._ready else next(source, None)
            if one is None:
                return
            self._submit(one)

    def _submit(self, one: Conversation) -> None:
        from dspark.prompts import encode

        if one.error:
            self._end(one, one.error)
            return
        try:
            ids = encode(one.next_prompt(), self._decoder.tokenizer)
            self._loop.submit(ids, line_params(self._params, one.line, one.choice), one)
        except DSparkError as err:
            self._end(one, str(err))
        except Exception as err:  # a chat template raises whatever its author chose, for roles that it does not take
            self._end(one, f"the chat template refuses it: {type(err).__name__}: {err}")

    def _take(self, one: Conversation, result: Generation) -> None:
        one.answer(result)
        if result.error is not None:
            self._end(one, str(result.error))
        elif one.todo:
            self._ready.append(one)
        else:
            self._end(one)

    def _end(self, one: Conversation, error: str = "") -> None:
        one.error = error
        self._on_done(one)


@dataclasses.dataclass(slots=True)
class Tally:
    """What became of a file's samples.

    Attributes:
        samples, failed: ended, and ended with an error; bad lines count as failed.
        tokens: of all answers.
    """

    samples: int = 0
    failed: int = 0
    tokens: int = 0


def answer_file(
    options: DecoderOptions,
    params: SamplingParams,
    file: Path,
    output: Path | None,
    *,
    chat: bool | None,
    system: str | None,
    stats: bool,
) -> bool:
    """Answer every line of ``file``; False where some were bad, refused or failed.

    Answers go to ``output`` or standard output, in the file's order. A bad line is said by its number on standard
    error, stands in the output with its ``error``, and stops no other.

    Raises:
        DSparkError: a file that can't be read or written, or a decoder that can't be built.
    """
    lines = list(read_lines(file))
    if not lines:
        raise DSparkError(f"file {str(file)!r} has no lines")
    samples = len(lines) * params.n
    tally = Tally()
    tickets: dict[tuple[int, int], int] = {}
    with opened(output) as out:
        decoder = build_decoder(options, defaults={"max_slots": min(MOST_SLOTS, samples)})
        as_chat = use_chat(decoder, chat)
        writer = OrderedWriter(out)

        def conversations() -> Iterator[Conversation]:
            for number, record in lines:
                for choice in range(params.n):
                    tickets[number, choice] = len(tickets)
                    yield made(number, choice, record, as_chat, system)

        said: set[str] = set()
        with progress(samples, output) as show:

            def done(one: Conversation) -> None:
                tally.samples += 1
                if one.error:
                    tally.failed += 1
                    message = f"dspark: {file} line {one.line}: {' '.join(one.error.split())}"
                    if message not in said:  # a bad line fails once for each of its samples
                        typer.echo(message, err=True)
                        said.add(message)
                writer.put(tickets[one.line, one.choice], one.as_dict(stats=stats))
                show(tally)

            def count(tokens: int) -> None:
                tally.tokens += tokens
                show(tally)

            try:
                FileRun(decoder, params, done, count).run(conversations())
            finally:
                writer.close()
    typer.echo(f"{tally.samples - tally.failed} of {samples} answered, {tally.tokens} tokens", err=True)
    if stats:
        from dspark.cli.generate import print_stats

        print_stats(decoder)
    return not tally.failed


def made(number: int, choice: int, record: Any, chat: bool, system: str | None) -> Conversation:
    """The conversation of a line; a bad line's holds its error, and nothing to ask."""
    if isinstance(record, DSparkError):
        return Conversation(number, choice, {}, error=str(record))
    try:
        return conversation(number, choice, record, chat=chat, system=system)
    except DSparkError as err:
        return Conversation(number, choice, record, error=str(err))


@contextmanager
def opened(path: Path | None) -> Iterator[IO[str]]:
    """The file to write, or standard output.

    Raises:
        DSparkError: it can't be written.
    """
    if path is None:
        yield sys.stdout
        return
    try:
        out = path.open("w", encoding="utf-8", newline="\n")
    except OSError as err:
        raise DSparkError(f"--output {str(path)!r} can't be written: {err}") from err
    with out:
        yield out


@contextmanager
def progress(samples: int, output: Path | None) -> Iterator[Callable[[Tally], None]]:
    """A bar on standard error, if that is a terminal that the answers do not go to."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from dspark.cli._render import console_for

    console = console_for(stderr=True)
    shown = console.is_terminal and (output is not None or not sys.stdout.isatty())
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not shown) as bar:
        task = bar.add_task("", total=samples)
        yield lambda tally: bar.update(task, completed=tally.samples, description=f"{tally.tokens} tokens")
