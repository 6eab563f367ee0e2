"""A target's chat template: what it makes of messages, and where in it a user's words stand."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dspark.errors import ConfigError
from dspark.prompts import Message, encode_chat

_MARK = "zqxuserwordszqx"
"""Stands for a user's words while their place in the template is looked up."""


@dataclass(frozen=True, slots=True)
class UserTurn:
    """A user's turn as the template writes it.

    Attributes:
        opening: token ids of everything before the user's words.
        end_ids: the special token that closes them; empty where the template closes them by text.
        end_text: that text; empty where there is a token.
        special_ids: ids that no user writes.
    """

    opening: tuple[int, ...]
    end_ids: tuple[int, ...]
    end_text: str
    special_ids: frozenset[int]


class ChatFormat:
    """A tokenizer's chat template and the variables that it is given.

    Args:
        tokenizer: of the target, or None.
        args: variables of the template, such as ``enable_thinking``.

    Raises:
        ConfigError: the template does not know a variable.
    """

    def __init__(self, tokenizer: Any, args: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self.args = dict(args or {})
        has_template = bool(getattr(tokenizer, "chat_template", None))
        self.template: str | None = tokenizer.get_chat_template() if has_template else None
        for name in self.args:
            if name not in (self.template or ""):
                raise ConfigError(f"the target's chat template has no variable {name!r}; leave it out")

    @property
    def fingerprint(self) -> str | None:
        """Hash of the template; None where there is none."""
        return None if self.template is None else hashlib.sha256(self.template.encode()).hexdigest()[:16]

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a chat, ready for the assistant's turn.

        Raises:
            RequestError: there is no template. The template itself raises whatever its author chose.
        """
        return encode_chat(messages, self._tokenizer, self.args)

    def user_turn(self, system: str | None = None) -> UserTurn:
        """Where a user's words stand in a chat of one message.

        Raises:
            ConfigError: there is no template, or it does not show where they begin and end.
        """
        if self.template is None:
            raise ConfigError(
                "the target has no chat template, so it can't write a user's turn: give a file of prompts"
            )
        first = [] if system is None else [{"role": "system", "content": system}]
        text = self._tokenizer.apply_chat_template(
            [*first, {"role": "user", "content": _MARK}], add_generation_prompt=True, tokenize=False, **self.args
        )
        before, found, after = text.partition(_MARK)
        if not found or _MARK in after or not before or not after.strip():
            raise ConfigError("the target's chat template does not show where a user's turn begins and ends")
        special = self._special_ids()
        end = self._ids(after.lstrip())[0]
        closed = end in special
        return UserTurn(
            opening=tuple(self._ids(before)),
            end_ids=(end,) if closed else (),
            end_text="" if closed else after.strip(),
            special_ids=special,
        )

    def _ids(self, text: str) -> list[int]:
        return [int(i) for i in self._tokenizer(text, add_special_tokens=False)["input_ids"]]

    def _special_ids(self) -> frozenset[int]:
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        marked = {i for i, token in added.items() if token.special}
        return frozenset(marked | set(self._tokenizer.all_special_ids))
