"""Answers in OpenAI's shapes: whole objects and server-sent events of chats and completions."""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from dspark.api import Generation
from dspark.engine.state import Chunk
from dspark.engine.stats import RequestStats
from dspark.sampling.logprobs import TokenLogprobs
from dspark.server.pieces import Pieces

_FLOOR = -9999.0
"""Stands for minus infinity, which JSON can't write."""
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


_LINES = {ord(c): f"\\u{ord(c):04x}" for c in "\x85\u2028\u2029"}
"""Some clients take these for ends of lines, and an event for cut off at them."""


def _json(value: dict[str, Any]) -> bytes:
    text = _ENCODER.encode(value)
    return (text if text.isascii() else text.translate(_LINES)).encode()


class Writer(ABC):
    """Writes the answer to one request.

    Args:
        model: its name.
        pieces: text of single tokens.
        stats: of every choice, filled in as they end.
        prompt_tokens: of all prompts.
        logprobs: whether they were asked for.
        token_ids: likewise.
        echoes: text before the output of every choice.
        samples: choices of each prompt.
    """

    kind = ""
    stream_kind = ""
    prefix = ""

    def __init__(
        self,
        model: str,
        pieces: Pieces,
        stats: Sequence[RequestStats],
        prompt_tokens: int,
        *,
        logprobs: bool = False,
        token_ids: bool = False,
        echoes: Sequence[str] = (),
        samples: int = 1,
    ) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model, self.pieces, self.stats, self.prompt_tokens = model, pieces, stats, prompt_tokens
        self.logprobs, self.token_ids = logprobs, token_ids
        self.samples = samples
        self.echoes = list(echoes) or [""] * len(stats)
        self._begun: set[int] = set()
        # All but the choices is the same in every event of a stream.
        self._event_head = b"data: " + _json(self._head(self.stream_kind))[:-1] + b',"choices":['
        self._offsets = [len(echo) for echo in self.echoes]

    # whole ----------------------------------------------------------------------------------------------------------

    def whole(self, results: Sequence[Generation]) -> dict[str, Any]:
        """The object of a finished request."""
        choices = []
        for i, result in enumerate(results):
            choice = self._choice(i, self.echoes[i] + result.text)
            choice["logprobs"] = self._logprobs(i, result.logprobs) if self.logprobs else None
            choice["finish_reason"] = result.finish_reason
            if self.token_ids:
                choice["token_ids"] = result.ids
            choices.append(choice)
        return {**self._head(self.kind), "choices": choices, "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Tokens of all choices; what speculation did stands under ``dspark``."""
        completion = sum(s.output_tokens for s in self.stats)
        rounds = sum(s.acceptance.rounds for s in self.stats)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": self._cached()},
            "dspark": {
                "drafted_tokens": sum(s.drafted for s in self.stats),
                "verified_tokens": sum(sum(s.acceptance.offered) for s in self.stats),
                "accepted_tokens": sum(sum(s.acceptance.accepted) for s in self.stats),
                "rounds": rounds,
                "accepted_length": completion / rounds if rounds else 0.0,
            },
        }

    def _cached(self) -> int:
        """Tokens of prompts that no choice of theirs had to read: a prompt's tokens are counted once, whatever n is."""
        cached = [s.cached_tokens for s in self.stats]
        return sum(min(cached[i : i + self.samples]) for i in range(0, len(cached), self.samples))

    # events ---------------------------------------------------------------------------------------------------------

    def event(self, index: int, chunk: Chunk) -> bytes:
        """The event of one chunk; empty where it shows nothing."""
        text = chunk.text or ""
        first = index not in self._begun
        self._begun.add(index)
        if not (first or text or chunk.logprobs or chunk.finish_reason or (self.token_ids and chunk.ids)):
            return b""
        choice = self._delta(index, (self.echoes[index] if first else "") + text, first)
        choice["logprobs"] = self._logprobs(index, chunk.logprobs) if self.logprobs and chunk.logprobs else None
        choice["finish_reason"] = chunk.finish_reason
        if self.token_ids:
            choice["token_ids"] = list(chunk.ids)
        return self._event_head + _json(choice) + b"]}\n\n"

    def last_event(self) -> bytes:
        """The usage, in an event without a choice."""
        return self._event_head + b'],"usage":' + _json(self.usage()) + b"}\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    # of each kind ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def _choice(self, index: int, text: str) -> dict[str, Any]:
        """A whole choice, but for its log-probabilities and its end."""

    @abstractmethod
    def _delta(self, index: int, text: str, first: bool) -> dict[str, Any]:
        """A part of one; ``first`` for the first of its choice."""

    @abstractmethod
    def _logprobs(self, index: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Log-probabilities of tokens."""


class ChatWriter(Writer):
    """``chat.completion`` and ``chat.completion.chunk``."""

    kind, stream_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def _choice(self, index: int, text: str) -> dict[str, Any]:
        return {"index": index, "message": {"role": "assistant", "content": text, "refusal": None}}

    def _delta(self, index: int, text: str, first: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        if text or first:
            delta["content"] = text
        return {"index": index, "delta": delta}

    def _logprobs(self, index: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        content = []
        for entry in entries:
            top = [self._token(token, value) for token, value in entry.top]
            content.append({**self._token(entry.token_id, entry.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self.pieces.bytes_of(token_id)
        return {"token": raw.decode("utf-8", "replace"), "logprob": max(logprob, _FLOOR), "bytes": list(raw)}


class CompletionWriter(Writer):
    """``text_completion``, whole and in parts."""

    kind, stream_kind, prefix = "text_completion", "text_completion", "cmpl"

    def _choice(self, index: int, text: str) -> dict[str, Any]:
        return {"index": index, "text": text}

    def _delta(self, index: int, text: str, first: bool) -> dict[str, Any]:
        return {"index": index, "text": text}

    def _logprobs(self, index: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        tokens = [self.pieces.text_of(e.token_id) for e in entries]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(token)
        top = [{self.pieces.text_of(t): max(v, _FLOOR) for t, v in reversed(e.top)} for e in entries]
        return {
            "tokens": tokens,
            "token_logprobs": [max(e.logprob, _FLOOR) for e in entries],
            "top_logprobs": top if any(top) else None,
            "text_offset": offsets,
        }
