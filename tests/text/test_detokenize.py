"""Incremental detokenisation equals decoding at once, and shows no half characters on the way."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspark.text import Detokenizer

SAMPLE = "naïve café 你好 😀👩‍👩‍👧 สวัสดี the fox.\n\n    x  y"
by_fixture = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def whole(tokenizer: Any, ids: Sequence[int], skip: bool = True) -> str:
    text: str = tokenizer.decode(list(ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    return text


def pieces(tokenizer: Any, ids: Sequence[int], skip: bool = True) -> tuple[list[str], str]:
    stream = Detokenizer(tokenizer, skip_special_tokens=skip)
    return [stream.push(i) for i in ids], stream.flush()


def encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


# ---- the promise, over any ids


@by_fixture
@given(data=st.data(), skip=st.booleans())
def test_joined_pieces_equal_decode(tokenizer: Any, data: st.DataObject, skip: bool) -> None:
    size = len(tokenizer)
    some = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=6))
    ids = data.draw(st.lists(st.sampled_from(some) | st.integers(0, size - 1), max_size=60))
    shown, rest = pieces(tokenizer, ids, skip)
    assert "".join(shown) + rest == whole(tokenizer, ids, skip)


@by_fixture
@given(text=st.text(alphabet=st.sampled_from([*"aéx y.\n", "好", "😀", "ส", "\u0301", "\u200d"]), max_size=40))
def test_text_streams_without_a_replacement_mark(tokenizer: Any, text: str) -> None:
    ids = encode(tokenizer, text)
    shown, rest = pieces(tokenizer, ids)
    assert "\ufffd" not in "".join(shown) + rest
    assert "".join(shown) + rest == whole(tokenizer, ids)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=st.lists(st.sampled_from([0x41, 0x82, 0xAC, 0xC3, 0xE2, 0xED, 0xA0, 0xF0, 0x9F, 0xFF]), max_size=80))
def test_broken_bytes(bpe: Any, raw: list[int]) -> None:
    """Any bytes, one a token: what is shown never has to be taken back, and little is held back."""
    vocab = bpe.get_vocab()
    names = byte_names()
    ids = [vocab[names[b]] for b in raw]
    stream, out = Detokenizer(bpe), ""
    for n, token in enumerate(ids, 1):
        out += stream.push(token)
        so_far = bytes(raw[:n]).decode("utf-8", errors="replace")
        assert so_far.startswith(out)
        assert len(so_far) - len(out) == so_far.endswith("\ufffd")
    assert out + stream.flush() == bytes(raw).decode("utf-8", errors="replace")


def byte_names() -> dict[int, str]:
    """How byte-level BPE spells each byte: printable ones as themselves, the others from U+0100 on, in order."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names = {b: chr(b) for b in plain}
    others = [b for b in range(256) if b not in names]
    return names | {b: chr(256 + i) for i, b in enumerate(others)}


# ---- characters split over tokens


def test_a_character_appears_with_its_last_byte(bpe: Any) -> None:
    ids = encode(bpe, "😀")
    assert len(ids) > 1
    shown, rest = pieces(bpe, ids)
    assert shown == [""] * (len(ids) - 1) + ["😀"]
    assert rest == ""


def test_an_unfinished_character_shows_only_at_the_end(bpe: Any) -> None:
    ids = encode(bpe, "a😀")[:-1]
    shown, rest = pieces(bpe, ids)
    assert "".join(shown) == "a"
    assert rest == "\ufffd"


def test_a_broken_character_is_shown_once_it_cannot_be_completed(bpe: Any) -> None:
    ids = [*encode(bpe, "😀")[:-1], *encode(bpe, "b")]
    shown, rest = pieces(bpe, ids)
    assert shown[:-1] == [""] * (len(ids) - 1)
    assert shown[-1] == "\ufffdb"
    assert rest == ""


def test_special_tokens_between_the_bytes_of_a_character(bpe: Any) -> None:
    first, *others = encode(bpe, "😀")
    shown, _ = pieces(bpe, [first, bpe.eos_token_id, *others])
    assert "".join(shown) == "😀"
    shown, _ = pieces(bpe, [first, bpe.eos_token_id, *others], skip=False)
    assert "".join(shown).startswith("\ufffd<|end|>")


def test_plain_text_is_shown_at_once(bpe: Any) -> None:
    ids = encode(bpe, "The quick brown fox")
    shown, rest = pieces(bpe, ids)
    assert all(shown)
    assert rest == ""


# ---- SentencePiece


def test_spaces_between_words_survive_and_the_first_is_dropped(llama: Any) -> None:
    ids = [llama.convert_tokens_to_ids(t) for t in ("▁the", "▁fox", "▁", "▁▁", "x")]
    shown, rest = pieces(llama, ids)
    assert shown == ["the", " fox", " ", "  ", "x"]
    assert rest == ""


def test_a_run_of_byte_tokens_is_shown_when_it_ends(llama: Any) -> None:
    run = [llama.convert_tokens_to_ids(f"<0x{b:02X}>") for b in "é😀".encode()]
    x = llama.convert_tokens_to_ids("x")
    shown, rest = pieces(llama, [*run, x])
    assert shown == [""] * len(run) + ["é😀x"]
    assert rest == ""
    shown, rest = pieces(llama, run)
    assert not any(shown)
    assert rest == "é😀"


def test_one_bad_byte_spoils_its_run_as_it_does_in_decode(llama: Any) -> None:
    run = [llama.convert_tokens_to_ids(t) for t in ("x", "<0x41>", "<0xFF>", "y")]
    shown, rest = pieces(llama, run)
    assert "".join(shown) + rest == whole(llama, run) == "x\ufffd\ufffdy"


def test_bytes_around_a_skipped_special_token_are_one_run(llama: Any) -> None:
    a, b = (llama.convert_tokens_to_ids(f"<0x{c:02X}>") for c in "é".encode())
    x = llama.convert_tokens_to_ids("x")
    shown, rest = pieces(llama, [a, llama.eos_token_id, b, x])
    assert "".join(shown) + rest == "éx"


# ---- bookkeeping


class Counted:
    """A tokenizer that counts the ids it decodes."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.decoded = inner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return len(self.inner)

    def decode(self, ids: list[int], **options: Any) -> str:
        self.decoded += len(ids)
        return str(self.inner.decode(ids, **options))


@pytest.mark.parametrize("text", ["the fox. " * 400, "\n" * 1000, "😀é" * 300], ids=["words", "newlines", "emoji"])
def test_work_per_token_does_not_grow_with_the_text(tokenizer: Any, text: str) -> None:
    counted = Counted(tokenizer)
    ids = encode(tokenizer, text)
    stream = Detokenizer(counted)
    counted.decoded = 0
    out = stream.add(ids) + stream.flush()
    assert out == whole(tokenizer, ids)
    if whole(tokenizer, ids):  # spaces that a tokenizer strips can't be cut from the window: they may yet show
        assert counted.decoded <= 20 * len(ids) + 100


def test_tokens_added_later_are_known(llama: Any) -> None:
    tokenizer = copy.deepcopy(llama)
    x = tokenizer.convert_tokens_to_ids("x")
    assert pieces(tokenizer, [x])[0] == ["x"]
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|extra|>"]})
    extra = tokenizer.convert_tokens_to_ids("<|extra|>")
    good, bad = (tokenizer.convert_tokens_to_ids(f"<0x{c:02X}>") for c in (0x41, 0xFF))
    shown, rest = pieces(tokenizer, [good, extra, bad, x])
    assert "".join(shown) + rest == "\ufffd\ufffdx"


def test_add_and_flush_of_nothing(bpe: Any) -> None:
    stream = Detokenizer(bpe)
    assert stream.flush() == ""
    assert stream.add([]) == ""
    assert stream.add(encode(bpe, "the lazy dog")) == "the lazy dog"
    assert stream.flush() == ""


def test_ids_beyond_the_vocabulary_show_nothing(bpe: Any) -> None:
    """Targets pad their vocabulary; such an id has no text."""
    ids = [*encode(bpe, "ab"), len(bpe) + 5, *encode(bpe, "c")]
    shown, rest = pieces(bpe, ids)
    assert "".join(shown) + rest == "abc"


@pytest.mark.real
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ids=st.lists(st.integers(0, 49151), max_size=80))
def test_real_tokenizer_random_ids(real_tokenizer: Any, ids: list[int]) -> None:
    for skip in (True, False):
        shown, rest = pieces(real_tokenizer, ids, skip)
        assert "".join(shown) + rest == whole(real_tokenizer, ids, skip)


@pytest.mark.real
def test_real_tokenizer_text(real_tokenizer: Any) -> None:
    shown, rest = pieces(real_tokenizer, encode(real_tokenizer, SAMPLE))
    assert "".join(shown) + rest == SAMPLE
    assert not any("\ufffd" in piece for piece in shown)
