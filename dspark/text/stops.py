"""Stop strings over streamed text, and ``TextStream``: detokeniser and stop strings in one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dspark.errors import ConfigError
from dspark.text.detokenize import Detokenizer


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces.

    The one that *completes* first wins; of several that complete at the same character, the longest. So what is found
    depends on the text alone, not on how it was cut into tokens or blocks. Text that may be the start of a stop string
    is held back until it is known not to be.

    Args:
        stops: non-empty strings; without any, text passes through.
    """

    __slots__ = ("_firsts", "_held", "_longest", "_stops", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str) or not all(isinstance(s, str) and s for s in stops):
            raise ConfigError(f"stop: expected a sequence of non-empty strings, got {stops!r}")
        self._stops = tuple(dict.fromkeys(stops))
        self._firsts = frozenset(s[0] for s in self._stops)
        self._longest = max((len(s) for s in self._stops), default=0)
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found."""

    def push(self, piece: str, *, check: bool = True) -> tuple[str, str | None]:
        """Text that may be shown now, and the stop string that ``piece`` completed.

        Args:
            piece: more text.
            check: False to let stop strings that complete within ``piece`` pass as text. One that begins in it can
                still complete in a later piece.
        """
        if self.matched is not None:
            return "", self.matched
        if not piece or not self._stops:
            return piece, None
        text = self._held + piece
        if check:
            start = self._find(text, len(self._held))
            if self.matched is not None:
                self._held = ""
                return text[:start], self.matched
        keep = self._undecided(text)
        self._held = text[keep:]
        return text[:keep], None

    def flush(self) -> str:
        """What was held back: no stop string will complete any more."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str, old: int) -> int:
        """Start of the first match that ends after character ``old``; sets ``matched``."""
        best = (len(text) + 1, 0)
        for stop in self._stops:
            start = text.find(stop, max(0, old - len(stop) + 1))
            if start >= 0 and (start + len(stop), start) < best:
                best = (start + len(stop), start)
                self.matched = stop
        return best[1]

    def _undecided(self, text: str) -> int:
        """Where the longest suffix begins that is a proper prefix of a stop string."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._firsts:
                tail = text[start:]
                if any(len(s) > len(tail) and s.startswith(tail) for s in self._stops):
                    return start
        return len(text)


class TextStream:
    """The text of one request, token by token: UTF-8 complete, cut before a stop string.

    Feed committed tokens one by one. The token whose push returns a stop string completes it: the output ends with it
    and tokens after it are dropped. No text at or after the start of the stop string is ever returned, also where that
    start lies tokens or rounds before.

    Stop strings count from token ``min_tokens + 1`` on, the first that may also be EOS: one that completes earlier is
    text like any other; one that begins earlier and completes later stops.

    Args:
        tokenizer: a transformers tokenizer.
        stops: stop strings.
        min_tokens: so many tokens can't complete a stop string.
        skip_special_tokens: leave special tokens out of the text; stop strings can't match them then.
    """

    __slots__ = ("_count", "_detokenizer", "_matcher", "_min_tokens")

    def __init__(
        self,
        tokenizer: Any,
        stops: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._matcher = StopMatcher(stops)
        self._min_tokens = min_tokens
        self._count = 0

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, found by ``push`` or, in held-back text, by ``flush``."""
        return self._matcher.matched

    def push(self, token_id: int) -> tuple[str, str | None]:
        """Text to show with one more token, and the stop string that it completed, if any."""
        self._count += 1
        if self._matcher.matched is not None:
            return "", self._matcher.matched
        return self._matcher.push(self._detokenizer.push(token_id), check=self._count > self._min_tokens)

    def flush(self) -> str:
        """The rest of the text, when the request is over; empty after a stop string."""
        if self._matcher.matched is not None:
            return ""
        text, matched = self._matcher.push(self._detokenizer.flush(), check=self._count > self._min_tokens)
        return text if matched is not None else text + self._matcher.flush()
