"""Stop strings in streamed text: found wherever they lie, and nothing at or after their start is shown."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspark.errors import ConfigError
from dspark.text import StopMatcher, TextStream


def match(stops: Sequence[str], pieces: Sequence[str]) -> tuple[str, str | None, int | None]:
    """Everything shown, the stop string, and the piece that completed it."""
    matcher, out = StopMatcher(stops), ""
    for i, piece in enumerate(pieces):
        shown, hit = matcher.push(piece)
        out += shown
        if hit is not None:
            return out + matcher.flush(), hit, i
    return out + matcher.flush(), None, None


def first_complete(text: str, stops: Sequence[str]) -> tuple[int, int, str] | None:
    """(end, start, stop) of the first stop string to complete; the longest of those that complete together."""
    found = [(text.find(s) + len(s), text.find(s), s) for s in stops if s in text]
    return min(found) if found else None


# ---- matching


def test_found_when_split_over_pieces() -> None:
    assert match(["STOP"], ["ab S", "TO", "P cd"]) == ("ab ", "STOP", 2)


def test_a_beginning_that_comes_to_nothing_is_shown() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.push("ST") == ("", None)
    assert matcher.push("OR") == ("STOR", None)
    assert matcher.push("S") == ("", None)
    assert matcher.flush() == "S"


def test_a_restart_inside_a_beginning_is_kept() -> None:
    """After "aab" the text "aaab" still holds a start two characters in."""
    assert match(["aab"], list("aaab")) == ("a", "aab", 3)
    assert match(["abac"], list("ababac")) == ("ab", "abac", 5)


def test_the_first_to_complete_wins_however_the_text_is_cut() -> None:
    assert match(["abcd", "bc"], ["abcd"])[:2] == ("a", "bc")
    assert match(["abcd", "bc"], list("abcd"))[:2] == ("a", "bc")
    assert match(["cd", "abcd"], ["xabcd"])[:2] == ("x", "abcd")


def test_a_stop_string_that_may_pass_is_not_held_back() -> None:
    matcher = StopMatcher(["ab", "longer"])
    assert matcher.push("xab", check=False) == ("xab", None)
    assert matcher.push("ab") == ("", "ab")


def test_after_a_match_nothing_comes() -> None:
    matcher = StopMatcher(["x"])
    assert matcher.push("axbx") == ("a", "x")
    assert matcher.push("more") == ("", "x")
    assert matcher.flush() == ""


def test_without_stop_strings_text_passes() -> None:
    assert match([], ["a", "", "b"]) == ("ab", None, None)


@pytest.mark.parametrize("stops", ["abc", [""], [3]])
def test_bad_stop_strings_are_refused(stops: Any) -> None:
    with pytest.raises(ConfigError, match="stop"):
        StopMatcher(stops)


texts = st.text(alphabet="abc", max_size=30)


@settings(max_examples=300)
@given(text=texts, stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=3), data=st.data())
def test_any_cut_of_any_text(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    bounds = [0, *cuts, len(text)]
    matcher, out = StopMatcher(stops), ""
    best = first_complete(text, stops)
    for start, end in pairwise(bounds):
        shown, hit = matcher.push(text[start:end])
        out += shown
        # never more than what no stop string can take back, and found as soon as it is there
        assert text.startswith(out)
        if best is not None:
            assert len(out) <= best[1]
            assert (hit == best[2]) == (end >= best[0])
    rest = matcher.flush()
    assert out + rest == (text if best is None else text[: best[1]])


@given(text=texts, stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
def test_only_a_possible_start_is_held_back(text: str, stops: list[str]) -> None:
    if first_complete(text, stops):
        return
    shown, _ = StopMatcher(stops).push(text)
    held = text[len(shown) :]
    assert held == "" or any(s.startswith(held) for s in stops)


@settings(max_examples=300)
@given(
    pieces=st.lists(st.text("abc", max_size=3), max_size=8),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    free=st.integers(0, 8),
)
def test_unchecked_pieces_complete_nothing(pieces: list[str], stops: list[str], free: int) -> None:
    """The first ``free`` pieces may hold whole stop strings; a match must end after them, and may begin in them."""
    matcher, out, hit = StopMatcher(stops), "", None
    for i, piece in enumerate(pieces):
        shown, hit = matcher.push(piece, check=i >= free)
        out += shown
        if hit:
            break
    out += matcher.flush()
    text, floor = "".join(pieces), len("".join(pieces[:free]))
    ends = [
        (start + len(s), start, s)
        for s in stops
        for start in range(len(text))
        if text.startswith(s, start) and start + len(s) > floor
    ]
    best = min(ends, default=None)
    assert hit == (best[2] if best else None)
    assert out == (text[: best[1]] if best else text)


# ---- tokens: TextStream


def feed(stream: TextStream, ids: Sequence[int]) -> tuple[str, int | None]:
    """As a commit does: token by token, cut at the one that completes a stop string."""
    out = ""
    for i, token in enumerate(ids):
        text, hit = stream.push(token)
        out += text
        if hit is not None:
            return out + stream.flush(), i
    return out + stream.flush(), None


def encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def test_a_stop_string_over_two_tokens(bpe: Any) -> None:
    ids = [*encode(bpe, "The quick"), *encode(bpe, "\n"), *encode(bpe, "\n"), *encode(bpe, "fox")]
    out, index = feed(TextStream(bpe, ["\n\n"]), ids)
    assert out == "The quick"
    assert bpe.decode(ids[: index + 1]) == "The quick\n\n"


def test_a_stop_string_that_begins_before_the_block(bpe: Any) -> None:
    """Blocks are committed in turn; the start lies in an earlier one, and its text was never shown."""
    stream = TextStream(bpe, ["fox jumps"])
    earlier = "".join(stream.push(i)[0] for i in encode(bpe, "The quick brown fox"))
    assert earlier == "The quick brown "
    block = encode(bpe, " jumps over")
    hits = [stream.push(i) for i in block]
    assert all(text == "" for text, _ in hits)
    assert hits[-1][1] == stream.matched == "fox jumps"
    assert stream.flush() == ""


def test_a_stop_string_within_one_token(bpe: Any) -> None:
    ids = encode(bpe, " fox") + encode(bpe, " dog")
    out, index = feed(TextStream(bpe, ["o"]), ids)
    assert out == " f"
    assert index is not None
    assert index < len(ids) - 1


def test_a_stop_character_of_several_tokens(bpe: Any) -> None:
    ids = encode(bpe, "a😀b")
    out, index = feed(TextStream(bpe, ["😀"]), ids)
    assert out == "a"
    assert index == len(ids) - 2


def test_special_tokens_are_no_text(bpe: Any) -> None:
    ids = [*encode(bpe, "ab"), bpe.eos_token_id, *encode(bpe, "cd")]
    assert feed(TextStream(bpe, ["bc"]), ids)[0] == "a"
    assert feed(TextStream(bpe, ["bc"], skip_special_tokens=False), ids) == ("ab<|end|>cd", None)
    assert feed(TextStream(bpe, ["<|end|>"], skip_special_tokens=False), ids)[0] == "ab"


def test_min_tokens(bpe: Any) -> None:
    ids = [bpe.convert_tokens_to_ids(c) for c in "xaxbxa"]
    assert feed(TextStream(bpe, ["x"]), ids) == ("", 0)
    assert feed(TextStream(bpe, ["x"], min_tokens=1), ids) == ("xa", 2)
    assert feed(TextStream(bpe, ["x"], min_tokens=3), ids) == ("xaxb", 4)
    assert feed(TextStream(bpe, ["x"], min_tokens=5), ids) == ("xaxbxa", None)
    # one that begins within the first tokens and completes after them does stop
    assert feed(TextStream(bpe, ["axb"], min_tokens=3), ids) == ("x", 3)


def test_the_end_shows_a_beginning_that_was_held_back(bpe: Any) -> None:
    stream = TextStream(bpe, ["abc"])
    assert [stream.push(i)[0] for i in encode(bpe, "xab")][-1] == ""
    assert stream.flush() == "ab"
    assert stream.matched is None


def test_a_stop_string_in_held_back_bytes_is_cut_at_the_end(llama: Any) -> None:
    run = [llama.convert_tokens_to_ids(t) for t in ("x", "<0x41>", "<0x42>", "<0x43>")]
    stream = TextStream(llama, ["BC"])
    shown = "".join(stream.push(i)[0] for i in run)
    assert shown + stream.flush() == "xA"
    assert stream.matched == "BC"


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_tokens_any_stop(tokenizer: Any, data: st.DataObject) -> None:
    """Shown text is the decoded text up to the stop string, whatever the tokens."""
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), min_size=1, max_size=30))
    text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    start = data.draw(st.integers(0, max(0, len(text) - 1)))
    stop = text[start : start + data.draw(st.integers(1, 4))] or "zz"
    out, index = feed(TextStream(tokenizer, [stop]), ids)
    best = first_complete(text, [stop])
    assert out == (text if best is None else text[: best[1]])
    if index is not None:
        upto = tokenizer.decode(ids[: index + 1], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert stop in upto


@pytest.mark.real
def test_real_tokenizer_stops(real_tokenizer: Any) -> None:
    ids = encode(real_tokenizer, "Question: what?\nAnswer: naïve café\nQuestion: more")
    out, index = feed(TextStream(real_tokenizer, ["\nQuestion:"]), ids)
    assert out == "Question: what?\nAnswer: naïve café"
    assert index is not None
    assert real_tokenizer.decode(ids[: index + 1]).endswith("\nQuestion:")
