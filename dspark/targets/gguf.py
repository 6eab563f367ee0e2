"""GGUF files, converted once to float32 safetensors and cached by content."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from dspark.errors import TargetError

_FORMAT = 1
_CHUNK = 1 << 22


def gguf_inside(folder: Path) -> list[Path]:
    """The .gguf files of a folder, sorted; one level deep."""
    return sorted(p for p in folder.iterdir() if p.suffix.lower() == ".gguf") if folder.is_dir() else []


def cache_root() -> Path:
    """``DSPARK_CACHE``, or ``dspark`` under the platform's cache folder."""
    if chosen := os.environ.get("DSPARK_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
        return Path(base) / "dspark" / "cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "dspark"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dspark"


def converted(path: Path) -> Path:
    """The safetensors folder of a GGUF file; made on first use, keyed by the file's content and the versions.

    Raises:
        TargetError: if the ``gguf`` extra is missing or the file can't be converted.
    """
    import transformers

    key = hashlib.sha256(f"{_FORMAT}:{transformers.__version__}:{_content_hash(path)}".encode()).hexdigest()[:24]
    folder = cache_root() / "gguf" / f"{path.stem}-{key}"
    if (folder / "config.json").is_file():
        return folder
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise TargetError(f"{path.name}: GGUF files need {' and '.join(missing)}: pip install 'dspark[gguf]'")
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.stem}-", dir=folder.parent))
    try:
        _convert(path, scratch)
        # atomic: whoever loses the race against another process uses the winner's folder
        with contextlib.suppress(OSError):
            scratch.rename(folder)
        if not (folder / "config.json").is_file():
            raise TargetError(f"{path.name}: its conversion can't be stored at {folder}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _convert(path: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {"gguf_file": path.name}
    try:
        loaded = AutoModelForCausalLM.from_pretrained(str(path.parent), dtype=torch.float32, **where)
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), **where)
    except Exception as err:  # the reader raises whatever a malformed file leads to
        raise TargetError(f"{path.name}: transformers can't read this GGUF file: {type(err).__name__}: {err}") from err
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # a fresh model: the loaded one remembers its quantiser and would refuse to be saved
    config.dtype = torch.float32
    make: Any = AutoModelForCausalLM.from_config
    model = make(config)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    if model.generation_config.eos_token_id is None:
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _content_hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
