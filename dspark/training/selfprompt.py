"""Prompts that the target writes itself: its chat template up to a user's words, and what it puts there.

An instruction-tuned target has learnt what users say, though it is not meant to say it. Candidates are judged in their
order, so with a seed the prompts do not depend on the batch or on interruptions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.api import Generation, SpeculativeDecoder
from dspark.config import SamplingParams, build_config
from dspark.errors import ConfigError, DataError
from dspark.sampling.draws import choice_seed
from dspark.training.chat_format import UserTurn
from dspark.training.data_output import Output, Report
from dspark.training.line_file import LineFile, read_records
from dspark.training.requests import Ask, decode_stream

MOST_CANDIDATES = 20
"""Candidates tried for each prompt that is wanted."""
_WRITING = 2**63
"""Sets the seeds of candidates apart from those of answers."""
_BROKEN = "\ufffd"
"""Stands for bytes that are no character."""


@dataclass(frozen=True, slots=True)
class SelfPromptConfig:
    """How the target writes prompts.

    Attributes:
        count: prompts wanted.
        temperature: at which they are sampled.
        min_tokens, max_tokens: shortest and longest prompt kept, in tokens.
    """

    count: int
    temperature: float = 1.0
    min_tokens: int = 4
    max_tokens: int = 256

    def __post_init__(self) -> None:
        if type(self.count) is not int or self.count < 1:
            raise ConfigError(f"SelfPromptConfig.count: expected an integer of at least 1, got {self.count!r}")
        if not 0 < self.min_tokens <= self.max_tokens:
            raise ConfigError(
                f"SelfPromptConfig: expected 0 < min_tokens <= max_tokens, got {self.min_tokens} and {self.max_tokens}"
            )
        if not self.temperature > 0:
            raise ConfigError(
                f"SelfPromptConfig.temperature: expected more than 0, got {self.temperature!r}, which gives one prompt"
            )


class SelfPrompts:
    """Writes prompts until there are as many as wanted.

    Args:
        decoder: whose engine is used; nobody else may use it meanwhile.
        config: how.
        turn: where a user's words stand in the chat template.
        seed: of the run; candidate k has a seed of its own, derived from both.
        path: the file of prompts, read here; what is there counts.
        last_candidate: number of the last one that was not kept.
        report: counts as it goes.
    """

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        config: SelfPromptConfig,
        turn: UserTurn,
        seed: int | None,
        path: Path,
        last_candidate: int,
        report: Report,
    ) -> None:
        self._decoder, self.config, self._turn, self._seed = decoder, config, turn, seed
        self._report = report
        self._seen: set[bytes] = set()
        self.kept = self.tokens = 0
        for number, record in read_records(path):
            try:
                last_candidate = max(last_candidate, int(record["candidate"]))
                self.tokens += int(record["tokens"])
                self._seen.add(_same(record["messages"][0]["content"]))
            except (KeyError, TypeError, ValueError, IndexError) as err:
                raise DataError(f"{str(path)!r} line {number} was not written by this command: {err!r}") from err
            self.kept += 1
        self._asked = self._judged = last_candidate + 1
        self._waiting: dict[int, Generation] = {}

    @property
    def missing(self) -> int:
        """Prompts still to be written."""
        return max(0, self.config.count - self.kept)

    def run(
        self,
        most: int,
        prompts: LineFile,
        output: Output,
        on_step: Callable[[Report], None],
        stopped: Callable[[], bool],
    ) -> None:
        """Write at most so many prompts. What is not kept goes to the file of what is skipped, with the reason.

        Raises:
            DataError: too few candidates are fit to keep.
        """
        report = self._report
        wanted = min(self.config.count, self.kept + most)
        last = self._asked + MOST_CANDIDATES * (wanted - self.kept + self._decoder.engine.config.max_slots)

        def pull(reserved: int) -> Ask | None:
            ahead = self._asked - self._judged
            if ahead >= wanted - self.kept or self._asked >= last:
                return None
            if not output.has_room(reserved + self.config.max_tokens + 1):
                return None
            self._asked += 1
            return Ask(list(self._turn.opening), self.params(self._asked - 1), self._asked - 1)

        def take(candidate: int, result: Generation) -> None:
            if result.finish_reason == "abort":
                return
            if result.error is not None:
                raise DataError(f"a prompt can't be written: {result.error}") from result.error
            report.total_tokens += len(result.ids)
            self._waiting[candidate] = result
            while self.kept < wanted and not report.stopped and self._judged in self._waiting:
                self._judge(self._judged, self._waiting.pop(self._judged), prompts, output)
                self._judged += 1

        def count(tokens: int) -> None:
            report.tokens += tokens
            on_step(report)

        def ended() -> bool:
            return report.ended(stopped) or self.kept >= wanted

        decode_stream(self._decoder, pull, take, on_tokens=count, stopped=ended)
        if self.kept < wanted and not report.stopped:
            if self._asked >= last:
                reasons = ", ".join(f"{reason}: {n}" for reason, n in report.skipped.most_common())
                raise DataError(
                    f"{self.kept} of {self.config.count} prompts after {self._judged} candidates ({reasons}): "
                    "the target does not write prompts that can be kept; give a file of them"
                )
            report.stopped = "token budget"

    def params(self, candidate: int) -> SamplingParams:
        """How a candidate is sampled; one token more than a prompt may have, for the end of the turn."""
        seed = None if self._seed is None else choice_seed(choice_seed(self._seed, _WRITING), candidate)
        return build_config(
            SamplingParams,
            {
                "max_tokens": self.config.max_tokens + 1,
                "temperature": self.config.temperature,
                "seed": seed,
                "stop_token_ids": self._turn.end_ids,
                "stop": (self._turn.end_text,) if self._turn.end_text else (),
            },
        )

    def _judge(self, candidate: int, result: Generation, prompts: LineFile, output: Output) -> None:
        text = result.text.strip()
        why = self._fault(result, text)
        tokens = len(result.ids)
        if why:
            output.skip({"candidate": candidate, "tokens": tokens}, f"self-written prompt: {why}")
            return
        message = {"role": "user", "content": text}
        record: dict[str, Any] = {"candidate": candidate, "source": "self", "tokens": tokens, "messages": [message]}
        if output.write(prompts, record):
            self._seen.add(_same(text))
            self.kept += 1
            self._report.prompts += 1

    def _fault(self, result: Generation, text: str) -> str:
        """Why a candidate is not kept; empty where it is."""
        ids, end = result.ids, self._turn.end_ids
        if result.finish_reason != "stop":
            return "too long"
        words = ids[:-1] if end or ids[-1] in self._turn.special_ids else ids
        if (end and ids[-1] not in end) or any(i in self._turn.special_ids for i in words):
            return "not a user's turn"
        if not text:
            return "empty"
        if _BROKEN in text:
            return "broken characters"
        if len(words) < self.config.min_tokens:
            return "too short"
        return "a duplicate" if _same(text) in self._seen else ""


def _same(text: str) -> bytes:
    """Equal for texts that differ in case and white space alone."""
    return hashlib.sha256(" ".join(text.casefold().split()).encode()).digest()[:16]
