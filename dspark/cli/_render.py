"""How runs look: text with accepted drafts coloured, live in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from dspark.engine.state import Chunk

ACCEPTED = "bold green"
"""Style of tokens that were drafted and accepted."""

_SECONDS_BETWEEN_FRAMES = 0.08
_WIDE = 100
"""Columns from which a table has room for its lines."""
_TAIL = 320
"""Characters of each text that a terminal shows while several grow at once."""


def console_for(*, stderr: bool = False) -> Console:
    """A console that keeps long lines whole where it is no terminal."""
    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=160, no_color=True)


class TokenText:
    """Text of one output as it grows, styled token by token."""

    def __init__(self, tokenizer: Any) -> None:
        from dspark.text.detokenize import Detokenizer

        self.text = Text()
        self._detokenizer = Detokenizer(tokenizer) if tokenizer is not None else None

    def feed(self, chunk: Chunk) -> None:
        """Append a chunk; the accepted ones of its ids come first."""
        for k, token in enumerate(chunk.ids):
            piece = f"{token} " if self._detokenizer is None else self._detokenizer.push(token)
            self.text.append(piece, style=ACCEPTED if k < chunk.accepted else "")
        if chunk.finish_reason is not None and self._detokenizer is not None:
            self.text.append(self._detokenizer.flush())


class View:
    """Shows the runs of one prompt, or of several at once, in lanes: plain on the left, then each drafter's.

    In a terminal the texts grow in place. Elsewhere each prompt's last lane is printed when it is finished.

    Args:
        console: where to.
        titles: of the prompts.
        lanes: names of the lanes.
        tokenizer: of the target.
    """

    def __init__(self, console: Console, titles: Sequence[str], lanes: Sequence[str], tokenizer: Any) -> None:
        self._console = console
        self._titles, self._names = list(titles), list(lanes)
        self._texts = [[TokenText(tokenizer) for _ in lanes] for _ in titles]
        self._notes = [["" for _ in lanes] for _ in titles]
        self._live: Live | None = None
        self._drawn = 0.0

    def __enter__(self) -> View:
        if self._console.is_terminal:
            self._live = Live(self._frame(), console=self._console, auto_refresh=False, vertical_overflow="crop")
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is None:
            self._print_plainly()
            return
        self._live.vertical_overflow = "visible"
        self._live.update(self._frame(whole=True), refresh=True)
        self._live.stop()
        self._console.print()

    def feed(self, index: int, lane: int, chunk: Chunk) -> None:
        """A chunk of prompt ``index``; lane 0 is plain."""
        self._texts[index][lane].feed(chunk)
        now = time.monotonic()
        if self._live is not None and now - self._drawn > _SECONDS_BETWEEN_FRAMES:
            self._live.update(self._frame(), refresh=True)
            self._drawn = time.monotonic()

    def note(self, index: int, lane: int, text: str) -> None:
        """What stands above a text, such as its speed."""
        self._notes[index][lane] = text

    def _heads(self, index: int) -> list[str]:
        return [f"{name} {note}".rstrip() for name, note in zip(self._names, self._notes[index], strict=True)]

    def _frame(self, whole: bool = False) -> Table:
        whole = whole or len(self._texts) == 1
        grid = Table.grid(expand=True, padding=(0, 2))
        for _ in self._names:
            grid.add_column(ratio=1)
        for i, (title, texts) in enumerate(zip(self._titles, self._texts, strict=True)):
            heads = self._heads(i)
            heads[0] = f"{title}: {heads[0]}"
            grid.add_row(*(Text(f"\n{head}", style="bold") for head in heads))
            grid.add_row(*(each.text if whole else each.text[-_TAIL:] for each in texts))
        return grid

    def _print_plainly(self) -> None:
        for i, (title, texts) in enumerate(zip(self._titles, self._texts, strict=True)):
            self._console.print(f"{title}: " + "; ".join(self._heads(i)), markup=False)
            self._console.print(Text(texts[-1].text.plain.strip()), soft_wrap=True)
            self._console.print()


def table_for(console: Console, *columns: str, title: str | None = None) -> Table:
    """A table whose columns but the first are aligned to the right; without lines outside a terminal."""
    from rich import box

    narrow = console.width < _WIDE
    edges = None if not console.is_terminal else box.SIMPLE_HEAD if narrow else box.ROUNDED
    table = Table(
        title=title,
        box=edges,
        title_justify="left",
        pad_edge=console.is_terminal and not narrow,
        padding=(0, 0) if narrow else (0, 1),
    )
    for k, name in enumerate(columns):
        table.add_column(name, justify="right" if k else "left", no_wrap=True)
    return table


def verdict_text(label: str, text: str, ok: bool) -> Text:
    """A line such as ``lossless: yes, ...``; red where it is not ok."""
    return Text.assemble((f"{label}: ", "bold"), (text, "green" if ok else "bold red"))
