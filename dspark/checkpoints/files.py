"""Writing a checkpoint's folder: all of it appears at once, or nothing does."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.errors import CheckpointError


@contextmanager
def new_folder(folder: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A temporary folder beside ``folder`` that takes its name when the block ends, and is removed if it raises.

    Args:
        folder: where the files are to be.
        overwrite: replace a folder that exists; it stays whole until the new one is complete.

    Raises:
        CheckpointError: ``folder`` exists and is not empty, or can't be written.
    """
    final = Path(folder).expanduser()
    if final.exists() and not final.is_dir():
        raise CheckpointError(f"{final}: is a file; name a folder")
    if final.is_dir() and any(final.iterdir()) and not overwrite:
        raise CheckpointError(f"{final}: exists and is not empty; name a new folder, or ask to overwrite it")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
    except OSError as err:
        raise CheckpointError(f"{final}: {err}") from err
    try:
        new = work / "new"
        new.mkdir()  # with the permissions of any folder; mkdtemp's are the owner's alone
        yield new
        if final.is_dir():
            final.rename(work / "old")
        new.rename(final)
    except OSError as err:
        raise CheckpointError(f"{final}: {err}") from err
    finally:
        if (work / "old").is_dir() and not final.exists():
            (work / "old").rename(final)
        shutil.rmtree(work, ignore_errors=True)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """A JSON object, indented, keys sorted as transformers sorts them."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file. Views and tensors that share memory are stored apart, as safetensors asks."""
    from safetensors.torch import save_file

    seen: set[int] = set()
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().to("cpu").contiguous()
        memory = plain.untyped_storage()
        if memory.data_ptr() in seen or memory.nbytes() != plain.nbytes:
            plain = plain.clone()
        seen.add(memory.data_ptr())
        out[name] = plain
    path.touch()
    mode = path.stat().st_mode
    save_file(out, path, metadata={"format": "pt"})
    path.chmod(mode)  # safetensors makes a file that its owner alone may read


def dtype_name(tensors: Mapping[str, Tensor]) -> str:
    """The floating dtype that most values have, as config.json spells it."""
    counts: dict[torch.dtype, int] = {}
    for tensor in tensors.values():
        if tensor.is_floating_point():
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.numel()
    top = max(counts, key=lambda dtype: counts[dtype], default=torch.float32)
    return str(top).removeprefix("torch.")
