"""The crowd of the load test: who asks for what, who leaves, and who sends nonsense."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.prompts import load_prompts
from benchmarks.serve_cases import Malformed, malformed
from dspark.config import SamplingParams

MAX_LEN = 1024
"""Positions of a slot."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of the crowd.

    Attributes:
        index: its place in the arrivals.
        prompt: token ids of a chat.
        messages: the chat.
        sampling: as sent.
        stream: as events.
        leave_after: disconnect after so many events; None to stay.
        wrong: what to send instead.
    """

    index: int
    prompt: tuple[int, ...] = ()
    messages: tuple[dict[str, str], ...] = ()
    sampling: tuple[tuple[str, Any], ...] = ()
    stream: bool = False
    leave_after: int | None = None
    wrong: Malformed | None = None

    @property
    def exact(self) -> bool:
        """True where its tokens are a function of the request."""
        if self.wrong is not None or self.leave_after is not None:
            return False
        return self.params.greedy or self.params.seed is not None

    @property
    def params(self) -> SamplingParams:
        """As the engine takes it."""
        return SamplingParams(**{"temperature": 1.0, **dict(self.sampling)})


def crowd(arguments: argparse.Namespace, decoder: Any) -> list[Request]:
    """All requests in order of arrival: a tenth leave, a twentieth are malformed, the rest in equal shares greedy,
    seeded and (a sixth) unseeded."""
    rng = np.random.default_rng(arguments.seed)
    pool = distinct(arguments, decoder, rng)
    kinds = malformed("served", MAX_LEN)
    count = arguments.requests
    fates = np.array(["stay"] * count, dtype=object)
    order = rng.permutation(count)
    leaving, wrong = round(count / 10), round(count / 20)
    fates[order[:leaving]] = "leave"
    fates[order[leaving : leaving + wrong]] = "wrong"
    requests, seen = [], 0
    for i in range(count):
        if fates[i] == "wrong":
            requests.append(Request(i, wrong=kinds[seen % len(kinds)]))
            seen += 1
            continue
        messages, prompt, sampling = pool[int(rng.integers(len(pool)))]
        if rng.random() < 1 / 6:
            sampling = tuple((k, v) for k, v in sampling if k != "seed")
            sampling = tuple((k, 1.0 if k == "temperature" else v) for k, v in sampling)
        leave = int(rng.integers(1, 6)) if fates[i] == "leave" else None
        requests.append(Request(i, prompt, messages, sampling, leave is not None or rng.random() < 0.5, leave))
    return requests


def longest(requests: list[Request], count: int) -> list[Request]:
    """The requests that take most of a slot, each to its end: memory that they touch first is no growth later."""
    whole = [r for r in requests if r.wrong is None and r.leave_after is None]
    return sorted(whole, key=lambda r: -len(r.prompt) - r.params.max_tokens)[:count]


def distinct(arguments: argparse.Namespace, decoder: Any, rng: Any) -> list[tuple[Any, tuple[int, ...], Any]]:
    """(messages, token ids, sampling) of the requests that the crowd is drawn from."""
    from dspark.prompts import encode

    texts = [p.text for p in load_prompts(8)]
    pool = []
    for i in range(arguments.distinct):
        text = f"{texts[i % len(texts)][:400]} ({i})"
        messages = ({"role": "user", "content": text},)
        tokens = int(rng.integers(max(2, arguments.tokens // 2), arguments.tokens + 1))
        sampling: dict[str, Any] = {"max_tokens": tokens, "temperature": 0.0}
        if i % 2:
            sampling = {"max_tokens": tokens, "temperature": 0.8, "top_p": 0.95, "seed": i}
        pool.append((messages, tuple(encode(list(messages), decoder.tokenizer)), tuple(sampling.items())))
    return pool
