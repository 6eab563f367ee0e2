"""The header of a data set: how it was made, so that nothing made otherwise is added to it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dspark
from dspark.engine.engine import Engine
from dspark.errors import DataError
from dspark.protocols import Target
from dspark.training.chat_format import ChatFormat
from dspark.training.data_plan import DataConfig
from dspark.training.prompts_in import PromptFile
from dspark.training.selfprompt import SelfPromptConfig

FORMAT, VERSION = "dspark-responses", 1
_VALUES = 64
"""Of each weight, in its hash."""
NOT_COMPARED = ("input", "about")
"""Parts of a header that another run may say differently: ``input`` has a check of its own, ``about`` needs none."""


def read_header(path: Path) -> dict[str, Any] | None:
    """The header, or None where there is no file.

    Raises:
        DataError: it is no JSON object.
    """
    if not path.exists():
        return None
    try:
        header = json.loads(path.read_bytes())
    except (OSError, ValueError) as err:
        raise DataError(f"header {str(path)!r} can't be read: {err}") from err
    if not isinstance(header, dict):
        raise DataError(f"header {str(path)!r}: expected an object")
    return header


def write_header(path: Path, header: Mapping[str, Any]) -> None:
    """Write a header as a whole or not at all.

    Raises:
        DataError: it can't be written.
    """
    new = path.with_name(path.name + ".new")
    try:
        with new.open("w", encoding="utf-8") as file:
            json.dump(header, file, indent=2, ensure_ascii=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError as err:
        raise DataError(f"header {str(path)!r} can't be written: {err.strerror or err}") from err


def check_header(path: Path, kept: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on with other settings.

    Raises:
        DataError: naming every setting that differs.
    """
    old, new = _flat(kept), _flat(now)
    differing = [
        f"{key} was {_shown(old, key)}, is {_shown(new, key)}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]
    if differing:
        raise DataError(
            f"the data was begun with other settings ({str(path)!r}): {'; '.join(differing)}. "
            "Use the same, or another output"
        )


def _flat(header: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in header.items():
        if not prefix and key in NOT_COMPARED:
            continue
        if isinstance(value, Mapping) and value:
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def _shown(flat: Mapping[str, Any], key: str) -> str:
    return json.dumps(flat[key]) if key in flat else "not there"


def make_header(
    engine: Engine, config: DataConfig, chat: ChatFormat, prompts: PromptFile | None, written: SelfPromptConfig | None
) -> dict[str, Any]:
    """The header of a run.

    Args:
        prompts: their file, if there is one yet.
        written: how the target writes them, if it does.
    """
    fingerprint = engine.parts.target.fingerprint()
    sampling = ("samples", "max_tokens", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    return {
        "format": FORMAT,
        "version": VERSION,
        "target": {
            **{name: fingerprint.get(name) for name in ("model", "config", "dtype")},
            "weights": weights_hash(engine.parts.target),
        },
        "chat_template": chat.fingerprint if config.chat else None,
        "template_args": dict(config.template_args),
        "thinking": config.template_args.get("enable_thinking"),
        "system": config.system,
        "sampling": {
            "temperatures": list(config.temperatures),
            **{name: getattr(config, name) for name in sampling},
        },
        "max_prompt": config.max_prompt,
        "min_response": config.min_response,
        "self_prompts": None
        if written is None
        else {name: getattr(written, name) for name in ("temperature", "min_tokens", "max_tokens")},
        "input": None if prompts is None else describe_prompts(prompts),
        "about": {
            "dspark": dspark.__version__,
            "drafter": engine.parts.name("drafter"),
            **{name: fingerprint.get(name) for name in ("device", "torch", "transformers")},
        },
    }


def describe_prompts(prompts: PromptFile) -> dict[str, Any]:
    """What tells a file of prompts from others."""
    return {"file": prompts.path.name, "bytes": prompts.size, "sha256": prompts.digest()}


def weights_hash(target: Target) -> str | None:
    """Hash of a few values of each of the target's weights, so that a target trained further is noticed; else None."""
    model = getattr(target, "model", None)
    if model is None or not hasattr(model, "named_parameters"):
        return None
    found = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        values = weight.detach().flatten()
        some = values[:: max(1, len(values) // _VALUES)][:_VALUES]
        found.update(name.encode() + some.float().cpu().numpy().tobytes())
    return found.hexdigest()[:16]
