"""What is written beside a trained drafter about its chats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dspark.checkpoints.chat import ChatRecord, template_fingerprint
from dspark.training.chat_record import chat_record


def data(folder: Path, name: str, header: dict[str, Any] | None) -> Path:
    path = folder / f"{name}.jsonl"
    path.write_text("")
    if header is not None:
        (folder / f"{name}.meta.json").write_text(json.dumps(header))
    return path


def test_messages_are_written_with_the_targets_template(tmp_path: Path, tiny_tokenizer: Any) -> None:
    record = chat_record(tiny_tokenizer, {"enable_thinking": False}, [data(tmp_path, "a", None)])
    assert record == ChatRecord(template_fingerprint(tiny_tokenizer), {"enable_thinking": False})


def test_responses_say_how_they_were_made(tmp_path: Path, tiny_tokenizer: Any) -> None:
    header = {"chat_template": "abc", "template_args": {"enable_thinking": True}}
    assert chat_record(tiny_tokenizer, {}, [data(tmp_path, "a", header)]) == ChatRecord(
        "abc", {"enable_thinking": True}
    )


def test_what_files_disagree_about_is_left_out(tmp_path: Path) -> None:
    one = data(tmp_path, "a", {"chat_template": "abc", "template_args": {"enable_thinking": True, "x": 1}})
    two = data(tmp_path, "b", {"chat_template": "def", "template_args": {"enable_thinking": False, "x": 1}})
    assert chat_record(None, {}, [one, two]) == ChatRecord(None, {"x": 1})
