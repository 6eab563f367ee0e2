"""Several threads around one decoder."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from dspark.api import SpeculativeDecoder

PROMPTS = ["hi", "once upon a time", "one two three one two", "b"]


@pytest.fixture
def decoder(tiny_model: Any, tiny_tokenizer: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder.from_pretrained(
        tiny_model, drafter="ngram", tokenizer=tiny_tokenizer, scheduler="fixed", cost=None, max_slots=3
    )


def in_threads(calls: list[Callable[[], Any]]) -> list[Any]:
    """What the calls return, all begun at once."""
    barrier = threading.Barrier(len(calls))
    found: list[Any] = [None] * len(calls)

    def run(i: int) -> None:
        barrier.wait()
        found[i] = calls[i]()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_threads_get_what_each_gets_alone(decoder: SpeculativeDecoder) -> None:
    settings: list[dict[str, Any]] = [{"max_tokens": 24}, {"max_tokens": 24, "temperature": 1.0, "seed": 5}]
    asked = [(prompt, given) for prompt in PROMPTS for given in settings]
    alone = [decoder.generate(prompt, **given)[0].ids for prompt, given in asked]

    def generated(prompt: str, given: dict[str, Any]) -> list[int]:
        return decoder.generate(prompt, **given)[0].ids

    def streamed(prompt: str, given: dict[str, Any]) -> list[int]:
        return [token for chunk in decoder.stream(prompt, **given) for token in chunk.ids]

    for read in (generated, streamed):
        assert in_threads([functools.partial(read, *each) for each in asked]) == alone
    assert not decoder.engine.has_work
    assert not decoder.engine.live()


def test_one_token_requests_of_many_threads_keep_their_figures(decoder: SpeculativeDecoder) -> None:
    results = in_threads([lambda: decoder.generate(PROMPTS, max_tokens=1) for _ in range(6)])
    for result in results:
        assert [len(r.ids) for r in result] == [1] * len(PROMPTS)
        assert all(r.stats.acceptance.committed == 1 for r in result)


def test_a_stream_that_is_left_frees_its_slot_while_others_go_on(decoder: SpeculativeDecoder) -> None:
    want = decoder.generate(PROMPTS[1], max_tokens=40)[0].ids

    def leave() -> None:
        for _ in decoder.stream(PROMPTS[0], max_tokens=200):
            break

    found = in_threads([leave, leave, lambda: decoder.generate(PROMPTS[1], max_tokens=40)[0].ids, leave])
    assert found[2] == want
    assert len(decoder.engine.batcher.pool) == 3
