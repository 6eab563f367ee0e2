"""``chat.json`` beside a drafter checkpoint: the chat template and the thinking mode that it was trained with.

Other readers ignore the file. A drafter loads without it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dspark.errors import CheckpointError

FILE_NAME = "chat.json"
FORMAT, VERSION = "dspark-chat", 1


@dataclass(frozen=True, slots=True)
class ChatRecord:
    """How the chats that a drafter was trained on were written.

    Attributes:
        template: hash of the chat template; None where there was none or where it is not known.
        args: variables that it was given, such as ``enable_thinking``.
    """

    template: str | None = None
    args: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """As written to ``chat.json``."""
        return {"format": FORMAT, "version": VERSION, "chat_template": self.template, "template_args": dict(self.args)}


def template_fingerprint(tokenizer: Any) -> str | None:
    """Hash of a tokenizer's chat template; None where it has none."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    return hashlib.sha256(str(tokenizer.get_chat_template()).encode()).hexdigest()[:16]


def read_chat(folder: Path) -> ChatRecord | None:
    """The record beside a checkpoint, or None where there is none.

    Raises:
        CheckpointError: the file is there and is none.
    """
    path = folder / FILE_NAME
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise CheckpointError(f"{path}: {err}") from err
    if not isinstance(value, dict) or value.get("format") != FORMAT or value.get("version") != VERSION:
        raise CheckpointError(f"{path}: expected format {FORMAT!r} version {VERSION}")
    template, args = value.get("chat_template"), value.get("template_args")
    if not (template is None or isinstance(template, str)) or not isinstance(args, dict):
        raise CheckpointError(f"{path}: expected a hash chat_template and an object template_args")
    return ChatRecord(template, args)


def write_chat(folder: Path, record: ChatRecord) -> None:
    """Write ``chat.json``, whole or not at all.

    Raises:
        CheckpointError: it can't be written.
    """
    new = folder / f"{FILE_NAME}.new"
    try:
        new.write_text(json.dumps(record.as_dict(), indent=2, sort_keys=True) + "\n", encoding="utf-8")
        new.replace(folder / FILE_NAME)
    except OSError as err:
        raise CheckpointError(f"{folder / FILE_NAME}: {err}") from err
