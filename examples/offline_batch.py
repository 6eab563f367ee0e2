"""Answer a file of prompts, as many at once as there are slots. After an interruption, the same command goes on.

    python examples/offline_batch.py prompts.jsonl answers.jsonl --target smollm2

A line of the input is ``{"prompt": "text"}``, or ``{"messages": [{"role": .., "content": ..}]}``. Each answer is one
line of the output, written at once, in the order in which they are finished. (``dspark generate --file`` does more, and
keeps the order.)
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dspark import DSparkError, SamplingParams, SpeculativeDecoder
from dspark.api import Generation
from dspark.drive import RequestLoop
from dspark.prompts import encode


def finished(answers: Path) -> set[str]:
    """Keys of the lines that have an answer. Half a line, which a killed run left, is cut off."""
    if not answers.exists():
        return set()
    data = answers.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(answers, len(whole))
    return {json.loads(line)["key"] for line in whole.split(b"\n") if line}


def read(prompts: Path) -> Iterator[tuple[int, str, str]]:
    """(number, key, line) of every line. The key holds the content: a line that was changed is answered anew."""
    with prompts.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, f"{number}-{hashlib.sha256(line.strip().encode()).hexdigest()[:16]}", line


class Batch:
    """What is still to be answered, and where answers go."""

    def __init__(self, decoder: SpeculativeDecoder, prompts: Path, answers: Path, params: dict[str, Any]) -> None:
        self.decoder, self.answers, self.params = decoder, answers, params
        lines, done = list(read(prompts)), finished(answers)
        self.todo = [entry for entry in lines if entry[1] not in done]
        self.total = len(lines)
        self.tokens = 0

    def run(self, progress: Progress) -> None:
        task = progress.add_task("prompts", total=self.total, completed=self.total - len(self.todo), tokens=0)
        source = iter(self.todo)
        loop: RequestLoop[tuple[int, str]] = RequestLoop(self.decoder, lambda job, result: self.keep(*job, result))

        def fill() -> None:  # called after every step: slots stay full, and the file is not all in the queue
            progress.update(task, completed=self.total - len(self.todo) + self.written, tokens=self.tokens)
            while len(loop) < 2 * self.decoder.engine.config.max_slots:
                if (entry := next(source, None)) is None:
                    return
                self.submit(loop, *entry)

        self.written = 0
        with self.answers.open("a", encoding="utf-8") as self.file:
            loop.run(fill)
            fill()

    def submit(self, loop: RequestLoop[tuple[int, str]], number: int, key: str, line: str) -> None:
        try:
            record = json.loads(line)
            ids = encode(record["messages"] if "messages" in record else record["prompt"], self.decoder.tokenizer)
            # A seed of its own: the answer is a function of the line, whatever runs beside it or ran before.
            seed = int(hashlib.sha256(key.encode()).hexdigest()[:16], 16)
            loop.submit(ids, SamplingParams(seed=seed, **self.params), (number, key))
        except (ValueError, KeyError, TypeError, DSparkError) as error:  # this line's fault: note it, and go on
            self.write({"line": number, "key": key, "error": f"{type(error).__name__}: {error}"})

    def keep(self, number: int, key: str, result: Generation) -> None:
        answer = {"text": result.text, "finish_reason": result.finish_reason}
        self.tokens += len(result.ids)
        self.write({"line": number, "key": key, **({"error": str(result.error)} if result.error else answer)})

    def write(self, record: dict[str, Any]) -> None:
        self.file.write(json.dumps(record, ensure_ascii=False) + "\n")
        self.file.flush()
        self.written += 1


def main(
    prompts: Path,
    answers: Path,
    target: str = "smollm2",
    drafter: str = "auto",
    max_slots: int = 16,
    max_tokens: int = 256,
    temperature: float = 0.0,
) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    params = {"max_tokens": max_tokens, "temperature": temperature}
    with (
        SpeculativeDecoder.from_pretrained(target, drafter, max_slots=max_slots) as decoder,
        Progress(*columns, TextColumn("{task.fields[tokens]} tokens")) as progress,
    ):
        Batch(decoder, prompts, answers, params).run(progress)


if __name__ == "__main__":
    typer.run(main)
