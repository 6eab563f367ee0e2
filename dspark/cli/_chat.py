"""The interactive chat of ``dspark generate``."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import typer

from dspark.errors import DSparkError

if TYPE_CHECKING:
    from dspark.api import SpeculativeDecoder
    from dspark.config import SamplingParams

HELP = "/reset forgets the conversation, /stats shows figures, /quit or Ctrl-D leaves; Ctrl-C ends an answer"


class Chat:
    """Asks for lines and streams answers until the user leaves.

    Args:
        decoder: answers.
        params: how.
        system: a system message that opens each conversation.
        raw: each line is a text of its own, to be continued; there is no conversation.
        stats: show figures after every answer.
    """

    def __init__(
        self, decoder: SpeculativeDecoder, params: SamplingParams, *, system: str | None, raw: bool, stats: bool
    ) -> None:
        self._decoder = decoder
        self._params = params
        self._system = system
        self._raw = raw
        self._stats = stats
        self._messages: list[dict[str, Any]] = []
        self._reset()

    def run(self) -> None:
        """The loop. Line editing is the terminal's (readline, where Python has it)."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401
        kind = "each line is continued as it is" if self._raw else "a chat"
        typer.echo(f"{self._decoder.engine.parts.target.name}: {kind}. {HELP}.", err=True)
        while True:
            try:
                line = input("> ").strip()
            except EOFError:
                typer.echo(err=True)
                return
            except KeyboardInterrupt:  # one that came just after an answer's end must not cost the conversation
                typer.echo("\n/quit or Ctrl-D leaves", err=True)
                continue
            if line in ("/quit", "/exit"):
                return
            if line:
                self._take(line)

    def _take(self, line: str) -> None:
        if line == "/reset":
            self._reset()
        elif line == "/stats":
            self._print_stats()
        elif line == "/help":
            typer.echo(HELP, err=True)
        elif line.startswith("/") and " " not in line:
            typer.echo(f"{line}: no such command. {HELP}", err=True)
        else:
            self._answer(line)
            if self._stats:
                self._print_stats()

    def _reset(self) -> None:
        self._messages = [{"role": "system", "content": self._system}] if self._system is not None else []

    def _answer(self, line: str) -> None:
        """Stream one answer. What was said stays in the conversation where it was answered, in whole or in part."""
        messages = [*self._messages, {"role": "user", "content": line}]
        said = ""
        try:
            for chunk in self._decoder.stream(line if self._raw else messages, self._params):
                said += chunk.text or ""
                typer.echo(chunk.text or "", nl=False)
        except KeyboardInterrupt:
            typer.echo(" (ended)", nl=False)
        except DSparkError as err:
            typer.echo(f"dspark: {err}", err=True)
            if not self._raw:
                typer.echo("/reset forgets the conversation, if it has become too long", err=True)
            return
        typer.echo()
        if not self._raw:
            self._messages = [*messages, {"role": "assistant", "content": said}]

    def _print_stats(self) -> None:
        from dspark.cli.generate import print_stats

        print_stats(self._decoder)
        self._decoder.reset_stats()
