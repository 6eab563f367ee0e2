"""The automaton against a search through the text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from dspark_drafter_suffix._suffix import Automaton


def followers(text: Sequence[int], suffix: Sequence[int]) -> list[tuple[int, int]]:
    """(position, token) of what followed each occurrence of ``suffix``."""
    n = len(suffix)
    return [(i + n, text[i + n]) for i in range(len(text) - n) if list(text[i : i + n]) == list(suffix)]


def longest(text: Sequence[int], string: Sequence[int], context: int) -> list[int]:
    """The longest suffix of ``string``, of at most ``context`` tokens, that something followed in ``text``."""
    for n in range(min(context, len(string)), 0, -1):
        if followers(text, string[len(string) - n :]):
            return list(string[len(string) - n :])
    return []


def expected(text: Sequence[int], suffix: Sequence[int]) -> list[tuple[int, int]]:
    """Next tokens and their counts, frequent and recent ones first."""
    found = followers(text, suffix)
    counts, last = Counter(t for _, t in found), {t: i for i, t in found}
    return sorted(counts.items(), key=lambda item: (item[1], last[item[0]]), reverse=True)


@pytest.mark.parametrize("vocab", [1, 2, 3, 6])
@pytest.mark.parametrize("context", [1, 2, 3, 8])
def test_it_finds_and_counts_what_a_search_finds(vocab: int, context: int) -> None:
    rng = np.random.default_rng([vocab, context])
    made, text = Automaton(context), []
    for _ in range(40):
        added = rng.integers(0, vocab, size=int(rng.integers(1, 3))).tolist()
        made.extend(added)
        text += added
        place, string = made.matched(), longest(text, text, context)
        assert place[1] == len(string)
        for _ in range(4):
            place, found, total = made.options(place, vocab)
            string = longest(text, string, context)
            assert place[1] == len(string)
            assert found == expected(text, string)
            assert total == sum(count for _, count in found)
            token = int(rng.choice([t for t, _ in found])) if found else 0
            place, string = made.step(place, token), [*string, token][-context:]
            if not found:
                break
            assert place[1] == len(string)
    assert len(made) == len(text)


def test_a_copy_takes_the_likeliest_and_goes_on_over_its_own_end() -> None:
    made = Automaton(8)
    made.extend([1, 2, 3, 1, 2, 4, 1, 2, 3, 9, 1, 2])
    tokens, shares = made.copy(3)
    assert tokens[0] == 3
    assert shares[0] == pytest.approx(2 / 3)
    loop = Automaton(8)
    loop.extend([5, 6, 7, 5, 6, 7, 5])
    assert loop.copy(7) == ([6, 7, 5, 6, 7, 5, 6], [1.0] * 7)


def test_one_token_again_and_again_is_quick_and_counted() -> None:
    made = Automaton(16)
    made.extend([3] * 50_000)
    place, found, total = made.options(made.matched(), 4)
    assert place[1] == 16
    assert found == [(3, 50_000 - 16)]
    assert total == 50_000 - 16


def test_an_empty_text_has_nothing_to_offer() -> None:
    made = Automaton(4)
    assert made.matched() == (0, 0)
    assert made.options((0, 0), 3) == ((0, 0), [], 0)
    assert made.copy(3) == ([], [])


def test_ids_are_32_bits_wide() -> None:
    made = Automaton(4)
    made.extend([2**32 - 1, 5, 2**32 - 1])
    assert made.copy(1) == ([5], [1.0])
    with pytest.raises(OverflowError):
        made.extend([2**32])
    with pytest.raises(OverflowError):
        made.extend([-1])


def test_what_can_not_be_is_refused() -> None:
    with pytest.raises(ValueError, match="context: expected 1 to 65536 tokens, got 0"):
        Automaton(0)
    made = Automaton(4)
    made.extend([1, 2, 1])
    for place in ((99, 1), (0, 1), (1, 7)):
        with pytest.raises(ValueError, match="is no place in this automaton"):
            made.options(place, 1)
        with pytest.raises(ValueError, match="is no place in this automaton"):
            made.step(place, 1)
