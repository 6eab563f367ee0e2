"""The text of single tokens, as log-probabilities show them."""

from __future__ import annotations

import functools
import re
from typing import Any

_BYTE = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")


class Pieces:
    """Bytes and text of token ids; a token may hold a part of a character.

    Args:
        tokenizer: a transformers tokenizer, or None, which shows ids.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(getattr(tokenizer, "all_special_ids", ()))
        self.bytes_of = functools.lru_cache(maxsize=1 << 16)(self._bytes)

    def text_of(self, token_id: int) -> str:
        """The token as text; ``bytes:\\xe2\\x82`` where it is a part of a character."""
        raw = self.bytes_of(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)

    def _bytes(self, token_id: int) -> bytes:
        if self._tokenizer is None:
            return str(token_id).encode()
        piece = self._tokenizer.convert_ids_to_tokens(token_id)
        if piece is None:
            return b""
        if token_id not in self._special and self._byte_level:
            table = byte_of_character()
            if all(c in table for c in piece):
                return bytes(table[c] for c in piece)
        found = _BYTE.match(piece)
        if found:
            return bytes([int(found.group(1), 16)])
        return (
            str(self._tokenizer.decode([token_id])).encode() if "▁" not in piece else piece.replace("▁", " ").encode()
        )

    @functools.cached_property
    def _byte_level(self) -> bool:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        return "ByteLevel" in repr(getattr(backend, "decoder", ""))


@functools.cache
def byte_of_character() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for: printable ones themselves, others by rank."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in plain]
    return {**{chr(b): b for b in plain}, **{chr(256 + i): b for i, b in enumerate(others)}}
