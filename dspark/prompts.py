"""Prompts as users write them: text, chats or token ids."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from dspark.errors import RequestError

Message = Mapping[str, Any]
Prompt = str | Sequence[Message] | Sequence[int]


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, whether one or several were given.

    Raises:
        RequestError: for what is neither.
    """
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, (bytes, Mapping)) or not hasattr(prompts, "__getitem__") or not hasattr(prompts, "__len__"):
        raise RequestError(f"prompts: expected text, messages, token ids or a list of these, got {prompts!r:.80}")
    one = len(prompts) > 0 and isinstance(prompts[0], (Integral, Mapping))
    return [prompts] if one else list(prompts)  # type: ignore[list-item, arg-type]


def encode(prompt: Prompt, tokenizer: Any) -> list[int]:
    """Token ids of a prompt; chats go through the tokenizer's template, with its generation prompt.

    Raises:
        RequestError: for a text or chat without a tokenizer, or a chat without a template.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestError("prompt: text needs a tokenizer, and this engine has none; give token ids")
        return [int(i) for i in tokenizer(prompt)["input_ids"]]
    if isinstance(prompt, Sequence) and len(prompt) and isinstance(prompt[0], Mapping):
        return encode_chat(prompt, tokenizer)  # type: ignore[arg-type]
    try:
        if isinstance(prompt, (bytes, Mapping)):
            raise TypeError(f"got {type(prompt).__name__}")
        return [operator.index(i) for i in prompt]  # type: ignore[arg-type]
    except TypeError as err:
        raise RequestError(f"prompt: expected text, messages or token ids: {err}") from err


def encode_chat(
    messages: Sequence[Message], tokenizer: Any, template_args: Mapping[str, Any] | None = None
) -> list[int]:
    """Token ids of a chat, ready for the assistant's turn; ``template_args`` are variables of the chat template."""
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise RequestError("prompt: a chat needs a tokenizer with a chat template; give text or token ids")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise RequestError(f"prompt: a message needs 'role' and 'content', got {message!r}")
    text = tokenizer.apply_chat_template(
        list(messages), add_generation_prompt=True, tokenize=False, **(template_args or {})
    )
    return [int(i) for i in tokenizer(text, add_special_tokens=False)["input_ids"]]
