"""Case 15: stop strings through the real engine, however they fall into tokens and blocks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from dspark.config import SamplingParams
from dspark.engine.engine import Engine
from dspark.sampling.draws import CounterDraws
from dspark.testing import TableDrafter, TableEstimator, TableTarget
from dspark.testing.cheats import LengthTable
from tests.exactness.harness import make_parts

SENTENCE = "the quick brown fox jumps over a lazy dog"


@pytest.fixture(scope="module")
def chain(tiny_tokenizer: Any) -> tuple[list[int], torch.Tensor]:
    """The sentence's ids, made unique, and a table in which each follows the one before."""
    ids = tiny_tokenizer.encode(SENTENCE, add_special_tokens=False)
    first = len(tiny_tokenizer)
    kept = list(dict.fromkeys(ids))
    table = torch.zeros(first, first, dtype=torch.float64)
    for here, there in itertools.pairwise(kept):
        table[here, there] = 9.0
    return kept, table


def speak(
    tokenizer: Any, table: torch.Tensor, start: int, gamma: int, **params: Any
) -> tuple[list[int], list[str], str]:
    """Ids, streamed pieces of text and the finish reason."""
    parts = make_parts(
        CounterDraws(),
        drafter=TableDrafter(table, gamma=gamma),
        estimator=TableEstimator([[0.9]] * gamma),
        scheduler=LengthTable([gamma]),
        target=TableTarget(table, max_len=64),
        gamma=gamma,
    )
    made = Engine(parts, tokenizer=tokenizer)
    made.submit([start], SamplingParams(**params))
    chunks = list(made.run())
    pieces = [c.text or "" for c in chunks]
    return [t for c in chunks for t in c.ids], pieces, chunks[-1].finish_reason or ""


@pytest.mark.parametrize("gamma", [1, 2, 3, 5])
def test_a_stop_string_is_found_wherever_it_begins(chain: Any, tiny_tokenizer: Any, gamma: int) -> None:
    ids, table = chain
    length = len(ids) - 1
    free, pieces, reason = speak(tiny_tokenizer, table, ids[0], gamma, max_tokens=length)
    assert (free, reason) == (ids[1:], "length")
    text = "".join(pieces)
    assert text == tiny_tokenizer.decode(ids[1:])
    for size in (2, 4, 7):
        for at in range(1, len(text) - size, 3):
            stop = text[at : at + size]
            found = text.index(stop)
            got, pieces, reason = speak(tiny_tokenizer, table, ids[0], gamma, max_tokens=length, stop=stop)
            assert "".join(pieces) == text[:found], stop
            assert reason == "stop"
            assert got == free[: len(got)]
            assert stop in tiny_tokenizer.decode(got)
            assert stop not in tiny_tokenizer.decode(got[:-1])  # the token that completes it is the last one


def test_nothing_of_a_stop_string_is_streamed_before_it_is_ruled_out(chain: Any, tiny_tokenizer: Any) -> None:
    ids, table = chain
    text = tiny_tokenizer.decode(ids[1:])
    stop = text[4:9] + "#"  # begins like the text, never completes
    _, pieces, reason = speak(tiny_tokenizer, table, ids[0], 2, max_tokens=len(ids) - 1, stop=stop)
    assert "".join(pieces) == text
    assert reason == "length"


def test_two_stop_strings_the_first_to_complete_ends_the_output(chain: Any, tiny_tokenizer: Any) -> None:
    ids, table = chain
    text = tiny_tokenizer.decode(ids[1:])
    stops = [text[9:12], text[4:7]]
    _, pieces, reason = speak(tiny_tokenizer, table, ids[0], 5, max_tokens=len(ids) - 1, stop=stops)
    assert "".join(pieces) == text[:4]
    assert reason == "stop"
