"""What a drafter learns about chats, for ``chat.json`` beside its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark.checkpoints.chat import ChatRecord, template_fingerprint
from dspark.training.data_header import read_header
from dspark.training.data_output import DataFiles


def chat_record(tokenizer: Any, chat_args: Mapping[str, Any], files: Sequence[Path]) -> ChatRecord:
    """Chat template and variables of the data.

    Files of token ids have a header that says how their chats were written; files of messages are written with the
    target's template and ``chat_args``. Variables that files disagree about are left out.

    Raises:
        DataError: a header can't be read.
    """
    own = template_fingerprint(tokenizer)
    records = []
    for file in files:
        header = read_header(DataFiles(file).header)
        if header is None:
            records.append(ChatRecord(own, dict(chat_args)))
        else:
            records.append(ChatRecord(header.get("chat_template"), dict(header.get("template_args") or {})))
    if not records:
        return ChatRecord(own, dict(chat_args))
    first, *rest = records
    args = {k: v for k, v in first.args.items() if all(k in r.args and r.args[k] == v for r in rest)}
    return ChatRecord(first.template if all(r.template == first.template for r in rest) else None, args)
