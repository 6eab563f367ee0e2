"""What a request's processors remember: committed tokens alone. Drafts are laid over it row by row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from dspark.config import SamplingParams
from dspark.errors import ComponentError, RequestError
from dspark.protocols import LogitsProcessor
from dspark.types import FloatArray, IntArray, Mode


class IdSet:
    """A growing set of token ids that is also an array. Ids outside the vocabulary have no logit and are dropped."""

    def __init__(self, vocab_size: int, ids: Iterable[int] = ()) -> None:
        self._vocab_size = vocab_size
        self._index: dict[int, int] = {}
        self._array = np.empty(64, dtype=np.int64)
        self.add(ids)

    def __len__(self) -> int:
        return len(self._index)

    def __contains__(self, token_id: int) -> bool:
        return token_id in self._index

    def add(self, ids: Iterable[int]) -> None:
        for token in ids:
            if token in self._index or not 0 <= token < self._vocab_size:
                continue
            count = len(self._index)
            if count == len(self._array):
                self._array = np.concatenate([self._array, np.empty_like(self._array)])
            self._array[count] = token
            self._index[token] = count

    def array(self) -> IntArray:
        """The ids, in order of arrival, [len]."""
        return self._array[: len(self._index)]


class RequestSampling:
    """The sampling state of one request, from submit to finish.

    Args:
        params: its sampling parameters.
        prompt_ids: the prompt; the repetition penalty counts it, presence and frequency do not.
        vocab_size: V, width of the target's logits.
        eos_token_ids: ids that end its output; masked by ``min_tokens`` unless ``ignore_eos``.
        mode: how its tokens are decided; ``greedy`` takes no warpers. None for what the parameters select.

    Raises:
        RequestError: a biased or stop id outside the vocabulary, or a custom processor without the three methods.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
        mode: Mode | None = None,
    ) -> None:
        self.params = params
        self.mode = params.mode if mode is None else mode
        self.vocab_size = vocab_size
        self.num_output = 0
        bad = sorted(i for i in (*params.logit_bias, *params.stop_token_ids) if i >= vocab_size)
        if bad:
            raise RequestError(f"logit_bias and stop_token_ids: ids {bad} are outside the vocabulary of {vocab_size}")
        self.bias_ids = np.fromiter(params.logit_bias.keys(), dtype=np.int64)
        self.bias = np.fromiter(params.logit_bias.values(), dtype=np.float64)
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
        self.end_ids: IntArray = np.array(sorted(i for i in ends if i < vocab_size), dtype=np.int64)
        self.repeats = params.repetition_penalty != 1.0
        self.counts_output = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self._seen = IdSet(vocab_size, prompt_ids if self.repeats else ())
        self._counts: Counter[int] = Counter()
        self.processors: tuple[LogitsProcessor, ...] = tuple(_fork(p) for p in params.logits_processors)
        self._static = bool(len(self.bias_ids)) or self.repeats or self.counts_output or bool(self.processors)

    @property
    def edits(self) -> bool:
        """True where processors before the warpers may change the next rows."""
        return self._static or self.num_output < self.params.min_tokens

    def commit(self, token_ids: Sequence[int]) -> None:
        """Committed tokens join the history. Rejected drafts must never come here.

        Raises:
            ComponentError: a custom processor's ``advance`` raised.
        """
        self.num_output += len(token_ids)
        if self.repeats:
            self._seen.add(token_ids)
        if self.counts_output:
            self._counts.update(token_ids)
        for processor in self.processors:
            try:
                for token in token_ids:
                    processor.advance(int(token))
            except Exception as fault:
                raise ComponentError(
                    f"custom logits processor {type(processor).__name__}.advance: {type(fault).__name__}: {fault}",
                    component=type(processor).__name__,
                    phase="commit",
                ) from fault

    def seen_rows(self, drafts: Sequence[int]) -> Iterator[IntArray]:
        """Ids that the repetition penalty counts, for the row after the anchor and after each draft."""
        base, extra = self._seen.array(), IdSet(self.vocab_size)
        yield base
        for token in drafts:
            extra.add([token])
            yield np.concatenate([base, extra.array()])

    def count_rows(self, drafts: Sequence[int]) -> Iterator[tuple[IntArray, FloatArray]]:
        """Distinct generated ids and what presence and frequency subtract from each, row by row."""
        counts = Counter(self._counts)
        yield self._amounts(counts)
        for token in drafts:
            counts[token] += 1
            yield self._amounts(counts)

    def _amounts(self, counts: Counter[int]) -> tuple[IntArray, FloatArray]:
        kept = {token: count for token, count in counts.items() if 0 <= token < self.vocab_size}
        ids = np.fromiter(kept.keys(), dtype=np.int64)
        times = np.fromiter(kept.values(), dtype=np.float64)
        return ids, self.params.presence_penalty + self.params.frequency_penalty * times


def _fork(processor: object) -> LogitsProcessor:
    if not isinstance(processor, LogitsProcessor):
        missing = [m for m in ("fork", "advance", "process") if not hasattr(processor, m)]
        raise RequestError(f"logits processor {type(processor).__name__} lacks {', '.join(missing)}")
    return processor.fork()
