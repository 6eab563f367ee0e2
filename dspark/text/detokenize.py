"""Incremental detokenisation: token ids in, text out, never half a character.

The promise: the pieces of one request, joined, equal ``tokenizer.decode(ids, skip_special_tokens=...,
clean_up_tokenization_spaces=False)`` of its output ids. (Clean-up takes spaces back that were shown already; it can't
be streamed.)

How: a window of the last few tokens is decoded again for each new one, and what it adds is new text. Three things are
held back, since what follows may change them:
- U+FFFD at the end: the first bytes of a character that the next token may complete. At most one such mark is
  undecided, as decoders replace a cut-off sequence by one mark; marks before it are final.
- a run of SentencePiece byte tokens (``<0xE2>``): decoders take a run as a whole, and one bad byte spoils all of it.
- what the tokenizer itself does not show yet, such as trailing spaces that it strips.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

_MARK = "\ufffd"
_KEEP = 5
"""Tokens kept as context: a cut-off character spans at most 3 tokens, and one before it carries its leading space."""
_LIMIT = 16
"""Window length that triggers a cut, so that a cut is paid once for ``_LIMIT - _KEEP`` tokens."""


class _TokenKinds:
    """Which ids a tokenizer skips, and which are SentencePiece byte tokens."""

    __slots__ = ("byte_ids", "size", "special_ids")

    def __init__(self, tokenizer: Any) -> None:
        self.size = len(tokenizer)
        added = getattr(tokenizer, "added_tokens_decoder", {})
        candidates = {i for i, token in added.items() if token.special} | set(tokenizer.all_special_ids)
        # Fast and slow tokenizers disagree on what is special, so each candidate is asked.
        self.special_ids = frozenset(
            i for i in candidates if i is not None and not tokenizer.decode([i], skip_special_tokens=True)
        )
        vocab = tokenizer.get_vocab()
        names = (f"<0x{byte:02X}>" for byte in range(256))
        self.byte_ids = frozenset(vocab[name] for name in names if name in vocab)


_kinds: weakref.WeakKeyDictionary[Any, _TokenKinds] = weakref.WeakKeyDictionary()


def _kinds_of(tokenizer: Any) -> _TokenKinds:
    """Kinds of a tokenizer's tokens, computed once and again when tokens were added."""
    kinds = _kinds.get(tokenizer)
    if kinds is None or kinds.size != len(tokenizer):
        kinds = _kinds[tokenizer] = _TokenKinds(tokenizer)
    return kinds


class Detokenizer:
    """Streams the text of one request.

    Args:
        tokenizer: a transformers tokenizer, fast or slow, byte-level or SentencePiece.
        skip_special_tokens: leave special tokens out of the text.
    """

    __slots__ = ("_byte_ids", "_decode", "_shown", "_skip", "_special_ids", "_window")

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        kinds = _kinds_of(tokenizer)
        self._decode = tokenizer.decode
        self._skip = skip_special_tokens
        self._special_ids = kinds.special_ids if skip_special_tokens else frozenset()
        self._byte_ids = kinds.byte_ids
        self._window: list[int] = []
        self._shown = 0  # characters of the decoded window that are out

    def push(self, token_id: int) -> str:
        """Text that becomes certain with one more token; often empty, sometimes several tokens' worth."""
        if token_id in self._special_ids:
            return ""
        window = self._window
        window.append(token_id)
        if token_id in self._byte_ids:
            return ""
        text = self._text(window)
        certain = len(text) - text.endswith(_MARK)
        if certain <= self._shown:
            return ""
        piece = text[self._shown : certain]
        self._shown = certain
        if len(window) > _LIMIT:
            self._cut(held=len(text) - certain)
        return piece

    def add(self, token_ids: Iterable[int]) -> str:
        """``push`` of several tokens."""
        return "".join([self.push(token_id) for token_id in token_ids])

    def flush(self) -> str:
        """What was held back, as it stands: the request is over. An unfinished character shows as U+FFFD."""
        piece = self._text(self._window)[self._shown :] if self._window else ""
        self._window, self._shown = [], 0
        return piece

    def _text(self, ids: list[int]) -> str:
        text: str = self._decode(ids, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False)
        return text

    def _cut(self, held: int) -> None:
        """Shorten the window, keeping the tokens that what is held back, or stripped at a start, depends on."""
        window = self._window[-_KEEP:]
        text = self._text(window)
        if len(text) > held and (not held or text.endswith(_MARK)):
            self._window = window
            self._shown = len(text) - held
