"""Prompts through an engine: which rounds each of them took, turn by turn."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dspark.api import Generation, SpeculativeDecoder
from dspark.config import SamplingParams
from dspark.drive import RequestLoop
from dspark.errors import DSparkError, EvaluationError
from dspark.evaluation.rounds import RoundLog, Rounds
from dspark.prompts import encode


class Dialogue(Protocol):
    """A conversation on its way; ``todo`` holds the user's turns still to come."""

    todo: list[str]

    def next_prompt(self) -> Any:
        """The next prompt, as :func:`dspark.prompts.encode` takes it."""
        ...

    def answer(self, result: Generation) -> None:
        """Take in the answer to it."""
        ...


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt of a data set.

    Attributes:
        dataset: which one.
        name: which prompt of it; the same in every run.
        digest: of its content: results of another content are not its own.
        begin: a fresh dialogue.
        sample: which sample of it, where several are taken.
    """

    dataset: str
    name: str
    digest: str
    begin: Callable[[], Dialogue]
    sample: int = 0

    @property
    def key(self) -> str:
        """What its record is kept under."""
        return f"{self.dataset}:{self.name}" + (f"#{self.sample}" if self.sample else "")

    def again(self, sample: int) -> Item:
        """Another sample of the same prompt."""
        return dataclasses.replace(self, sample=sample)


@dataclass(slots=True)
class Record:
    """What became of one prompt.

    Attributes:
        dataset, digest: of its item.
        samples: ``prompt_ids``, ``response_ids`` and ``finish_reason`` of each turn.
        rounds: of all turns.
    """

    dataset: str
    digest: str
    rounds: Rounds
    samples: list[dict[str, Any]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "dataset": self.dataset,
            "digest": self.digest,
            "samples": self.samples,
            "rounds": self.rounds.as_dict(),
        }

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Record:
        """The inverse of :meth:`as_dict`.

        Raises:
            EvaluationError: a malformed record.
        """
        try:
            return cls(str(raw["dataset"]), str(raw["digest"]), Rounds.from_dict(raw["rounds"]), list(raw["samples"]))
        except (KeyError, TypeError) as err:
            raise EvaluationError(f"malformed record: {type(err).__name__}: {err}") from err


@dataclass(frozen=True, slots=True)
class Sampling:
    """How prompts are decoded.

    Attributes:
        params: without seed and request key.
        seed: base of what each turn of each item draws from: hash(seed, item, turn).
        coupled: sampled requests are verified by ``coupled``, else by ``rejection``.
    """

    params: SamplingParams
    seed: int = 0
    coupled: bool = False

    def of(self, item: Item, turn: int) -> SamplingParams:
        """Parameters of one turn; the same whatever else runs, and in every run."""
        if self.params.greedy:
            return self.params
        digest = hashlib.sha256(f"{self.seed}/{item.key}/{turn}".encode()).digest()
        own = int.from_bytes(digest[:8], "little")
        if self.coupled:
            return dataclasses.replace(self.params, seed=own)
        return dataclasses.replace(self.params, request_key=own)

    def as_dict(self) -> dict[str, Any]:
        """What of it results depend on, for JSON."""
        names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "ignore_eos")
        values = {name: getattr(self.params, name) for name in names}
        mode = "greedy" if self.params.greedy else "coupled" if self.coupled else "rejection"
        return {**values, "mode": mode, "seed": self.seed}


class Collection:
    """Drives a decoder's engine until every item has been answered; a refused or failed item ends alone.

    Args:
        decoder: built with ``log`` among its observers.
        log: of its rounds.
        sampling: for every turn.
        on_done: called with each item that was answered, and what became of it.
        on_failed: called with each item that was not, and why.
        on_tokens: called with the number of tokens that a step added.
    """

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        log: RoundLog,
        sampling: Sampling,
        on_done: Callable[[Item, Record], None],
        on_failed: Callable[[Item, str], None],
        on_tokens: Callable[[int], None] = lambda count: None,
    ) -> None:
        self._decoder, self._log, self._sampling = decoder, log, sampling
        log.gamma = decoder.engine.parts.gamma
        self._on_done, self._on_failed = on_done, on_failed
        self._loop: RequestLoop[_Turn] = RequestLoop(decoder, self._take, on_tokens)
        self._ready: deque[_Turn] = deque()

    def run(self, items: Iterable[Item]) -> None:
        """Answer them. What is live when this is left by an exception is aborted, and has no record."""
        source = iter(items)
        self._loop.run(lambda: self._fill(source, most=self._decoder.engine.config.max_slots))

    def _fill(self, source: Iterator[Item], most: int) -> None:
        """Begin no more than there are slots for, so that who wants no further rounds gets few; next turns go first."""
        while len(self._loop) < most:
            turn = self._ready.popleft() if self._ready else None
            item = next(source, None) if turn is None else turn.item
            if item is None:
                return
            self._submit(turn or self._begin(item))

    def _begin(self, item: Item) -> _Turn:
        return _Turn(item, item.begin(), Record(item.dataset, item.digest, Rounds.concat([], self._log.gamma)))

    def _submit(self, turn: _Turn) -> None:
        try:
            ids = encode(turn.dialogue.next_prompt(), self._decoder.tokenizer)
            params = self._sampling.of(turn.item, len(turn.record.samples))
            turn.request = self._loop.submit(ids, params, turn)
        except DSparkError as err:
            self._on_failed(turn.item, str(err))
        except Exception as err:  # a chat template raises whatever its author chose
            self._on_failed(turn.item, f"the chat template refuses it: {type(err).__name__}: {err}")

    def _take(self, turn: _Turn, result: Generation) -> None:
        rounds = self._log.take(turn.request)
        if result.error is not None:
            self._on_failed(turn.item, str(result.error))
            return
        turn.take(result, rounds)
        if turn.dialogue.todo:
            self._ready.append(turn)
        else:
            self._on_done(turn.item, turn.record)


@dataclass(slots=True, eq=False)
class _Turn:
    """An item on its way."""

    item: Item
    dialogue: Dialogue
    record: Record
    request: str = ""

    def take(self, result: Generation, rounds: Rounds) -> None:
        """Note a finished turn.

        Raises:
            EvaluationError: its rounds do not add up to its tokens, but for one that prefill gave.
        """
        missing = len(result.ids) - int(rounds.committed.sum())
        if missing not in (0, 1):
            raise EvaluationError(
                f"{self.item.key}: {missing} of {len(result.ids)} tokens are of no round that was seen"
            )
        self.record.rounds = Rounds.concat([self.record.rounds, rounds], rounds.gamma)
        self.record.samples.append(
            {"prompt_ids": result.prompt_ids, "response_ids": result.ids, "finish_reason": result.finish_reason}
        )
        self.dialogue.answer(result)


def finished(items: Sequence[Item], records: Mapping[str, Mapping[str, Any]], where: str) -> set[str]:
    """Keys of the items that have a record.

    Raises:
        EvaluationError: a record was made from another content of its prompt.
    """
    for item in items:
        record = records.get(item.key)
        if record is not None and record.get("digest") != item.digest:
            raise EvaluationError(
                f"{where}: the result of {item.key} is of another prompt: the data changed; take another folder, or "
                "start over with --restart"
            )
    return {item.key for item in items if item.key in records}
