"""The chat template's variables: the server's settings, else what the drafter was trained with."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.checkpoints.chat import ChatRecord, read_chat, template_fingerprint
from dspark.engine.engine import Engine
from dspark.errors import CheckpointError, ConfigError, DSparkWarning
from dspark.prompts import encode_chat

_PROBE = [{"role": "user", "content": "x"}]


@dataclass(frozen=True, slots=True)
class ChatDefaults:
    """How chats are written.

    Attributes:
        args: variables of the template, for requests that set none.
        trained: those that the drafter was trained with; None where that is not known.
        notes: mismatches, in words.
    """

    args: Mapping[str, Any]
    trained: Mapping[str, Any] | None
    notes: tuple[str, ...] = ()


def chat_defaults(engine: Engine, wanted: Mapping[str, Any]) -> ChatDefaults:
    """The variables that hold for an engine's target and drafter; a mismatch warns.

    Args:
        engine: whose drafter's checkpoint is looked at.
        wanted: the server's own settings, which win.

    Raises:
        ConfigError: the target's template has no such variable.
    """
    template = str(getattr(engine.tokenizer, "chat_template", None) or "")
    for name in wanted:
        if name not in template:
            raise ConfigError(f"template_args: the target's chat template has no variable {name!r}")
    record, notes = _record(engine)
    if record is None:
        return ChatDefaults(dict(wanted), None, tuple(notes))
    drafter, own = engine.parts.name("drafter"), template_fingerprint(engine.tokenizer)
    if record.template is not None and record.template != own:
        notes.append(
            f"the drafter ({drafter}) was trained with another chat template than the target's tokenizer has: "
            "text is unaffected, but fewer drafts will be accepted"
        )
    trained = {name: value for name, value in record.args.items() if name in template}
    notes += [
        f"the drafter ({drafter}) was trained with {other}, and the server sets {wanted[name]!r}: "
        "text is as the server sets, but fewer drafts will be accepted"
        for name in wanted
        if (other := departs(engine.tokenizer, trained, name, wanted[name])) is not None
    ]
    for note in notes:
        warnings.warn(note, DSparkWarning, stacklevel=2)
    return ChatDefaults({**trained, **wanted}, trained, tuple(notes))


def departs(tokenizer: Any, trained: Mapping[str, Any], name: str, value: Any) -> str | None:
    """What a drafter was trained with, in words, where ``name = value`` is something else; None where it is not.

    A variable that the training left to the template is something else where a chat comes out otherwise by it.
    """
    if name in trained:
        return f"{name} = {trained[name]!r}" if trained[name] != value else None
    try:
        same = encode_chat(_PROBE, tokenizer, dict(trained)) == encode_chat(_PROBE, tokenizer, {**trained, name: value})
    except Exception:  # a template raises whatever its author chose; a request with it is told
        return None
    return None if same else f"the template's default of {name}"


def _record(engine: Engine) -> tuple[ChatRecord | None, list[str]]:
    """The drafter's record, where its checkpoint is a folder that has one."""
    path = getattr(getattr(engine.parts.drafter, "checkpoint", None), "path", None)
    if path is None:
        return None, []
    try:
        return read_chat(Path(path)), []
    except CheckpointError as err:
        warnings.warn(str(err), DSparkWarning, stacklevel=3)
        return None, [str(err)]
