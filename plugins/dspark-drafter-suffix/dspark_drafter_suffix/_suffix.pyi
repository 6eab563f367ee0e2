from collections.abc import Sequence
from typing import final

@final
class Automaton:
    """A suffix automaton over one text, with counts of its strings of up to ``context + 1`` tokens.

    A *place* is a string of the text, as (class, length); it is good until the text grows.
    """

    def __new__(cls, context: int) -> Automaton:
        """An empty text; strings of up to ``context`` tokens, 1 to 65,536, are looked up."""

    def __len__(self) -> int:
        """Tokens of the text."""

    def extend(self, ids: Sequence[int]) -> None:
        """Append tokens, 0 to 2^32 - 1 each. Amortised O(1) a token, and O(context) in the worst case."""

    def matched(self) -> tuple[int, int]:
        """The longest suffix of the text, of at most ``context`` tokens, that something has followed."""

    def options(self, place: tuple[int, int], most: int) -> tuple[tuple[int, int], list[tuple[int, int]], int]:
        """What followed a string, or its longest suffix that something followed.

        Returns:
            That suffix, its ``most`` likeliest next tokens as (token, occurrences), more frequent ones first and of
            equals the more recent, and occurrences of all of its next tokens.

        Raises:
            ValueError: no place in this automaton.
        """

    def step(self, place: tuple[int, int], token: int) -> tuple[int, int]:
        """The string and one more token, cut to ``context`` tokens; the empty string where that never occurred.

        Raises:
            ValueError: no place in this automaton.
        """

    def copy(self, count: int) -> tuple[list[int], list[float]]:
        """``count`` tokens on from the end of the text, the likeliest each time, and its share of what followed."""
