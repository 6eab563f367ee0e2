"""Prompts from files, as chats: a spread over a folder, or the handful that is kept beside this file."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OWN = Path(__file__).parent / "data"
VARIABLE = "DSPARK_PROMPTS"


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A user's first turn and where it comes from (``file:line``)."""

    source: str
    text: str


def load_prompts(count: int, folder: Path | None = None) -> list[TextPrompt]:
    """``count`` prompts, spread over the .jsonl files of a folder and over each file's length.

    Args:
        folder: None for the one that ``DSPARK_PROMPTS`` names, else for the prompts that ship.

    Raises:
        ValueError: a folder without prompts, or with fewer than asked.
    """
    folder = folder or Path(os.environ.get(VARIABLE) or OWN)
    files = [_read(path) for path in sorted(folder.glob("*.jsonl"))]
    total = sum(len(file) for file in files)
    if total < count:
        raise ValueError(f"{folder} has {total} prompts, {count} are asked")
    shares = _shares([len(file) for file in files], count)
    picked = [[file[i * len(file) // share] for i in range(share)] for file, share in zip(files, shares, strict=True)]
    rounds = itertools.zip_longest(*picked)  # so that the first few already come from different files
    return [prompt for prompts in rounds for prompt in prompts if prompt is not None]


def _shares(sizes: Sequence[int], count: int) -> list[int]:
    """How many to take from each file: as even as their sizes allow."""
    shares = [0] * len(sizes)
    while sum(shares) < count:
        for i, size in enumerate(sizes):
            if shares[i] < size and sum(shares) < count:
                shares[i] += 1
    return shares


def _read(path: Path) -> list[TextPrompt]:
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = [(number, json.loads(line)) for number, line in enumerate(lines, start=1) if line.strip()]
    return [TextPrompt(f"{path.name}:{number}", row["turns"][0]) for number, row in rows]


def encode_chats(prompts: Sequence[TextPrompt], tokenizer: Any) -> list[list[int]]:
    """Token ids of each prompt as a chat, ready for the assistant's turn."""
    return [_encode(prompt.text, tokenizer) for prompt in prompts]


def _encode(text: str, tokenizer: Any) -> list[int]:
    from dspark.prompts import encode

    return encode([{"role": "user", "content": text}], tokenizer)


def chats_of_length(tokens: int, count: int, tokenizer: Any) -> list[list[int]]:
    """``count`` different chats of exactly ``tokens`` tokens: the shipped prompts one after the other, then cut.

    Raises:
        ValueError: the chat template alone takes more.
    """
    one, two = _encode("a", tokenizer), _encode("b", tokenizer)
    head = next(i for i, (x, y) in enumerate(zip(one, two, strict=False)) if x != y)
    tail = next(i for i, (x, y) in enumerate(zip(reversed(one), reversed(two), strict=False)) if x != y)
    room = tokens - head - tail
    if room < 1:
        raise ValueError(f"the chat template takes {head + tail} tokens, {tokens} are too few")
    texts = [prompt.text for prompt in load_prompts(_own_size(), OWN)]
    chats = []
    for i in range(count):
        words = itertools.islice(itertools.cycle(texts), i % len(texts), None)
        ids: list[int] = list(tokenizer(f"{i + 1}. {next(words)}", add_special_tokens=False)["input_ids"])
        while len(ids) < room:
            ids += tokenizer(f"\n\n{next(words)}", add_special_tokens=False)["input_ids"]
        chats.append([*one[:head], *ids[:room], *one[len(one) - tail :]])
    return chats


def _own_size() -> int:
    return sum(len(_read(path)) for path in OWN.glob("*.jsonl"))
