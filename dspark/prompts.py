"""Prompts as users write them: text, chats or token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dspark.errors import RequestError

Message = Mapping[str, Any]
Prompt = str | Sequence[Message] | Sequence[int]


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, whether one or several were given."""
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], (int, Mapping))):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def encode(prompt: Prompt, tokenizer: Any) -> list[int]:
    """Token ids of a prompt; chats go through the tokenizer's template, with its generation prompt.

    Raises:
        RequestError: for a text or chat without a tokenizer, or a chat without a template.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError("prompt: text needs a tokenizer, and this engine has none; give token ids")
        return [int(i) for i in tokenizer(prompt)["input_ids"]]
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise RequestError(f"prompt: expected text, messages or token ids, got {type(prompt).__name__}")
    if len(prompt) and isinstance(prompt[0], Mapping):
        return encode_chat(prompt, tokenizer)  # type: ignore[arg-type]
    try:
        return [int(i) for i in prompt]  # type: ignore[arg-type]
    except (TypeError, ValueError) as err:
        raise RequestError(f"prompt: expected text, messages or token ids: {err}") from err


def encode_chat(messages: Sequence[Message], tokenizer: Any) -> list[int]:
    """Token ids of a chat, ready for the assistant's turn."""
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise RequestError("prompt: a chat needs a tokenizer with a chat template; give text or token ids")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise RequestError(f"prompt: a message needs 'role' and 'content', got {message!r}")
    text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    return [int(i) for i in tokenizer(text, add_special_tokens=False)["input_ids"]]
