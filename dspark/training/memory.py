"""How much memory a run will take at its peak, before its first step, and how much it took."""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from dspark.checkpoints import DrafterConfig


def predict(
    config: DrafterConfig,
    *,
    parameters: int,
    tokens: int,
    blocks: int,
    labels: int,
    length: int,
    half: bool,
    resident: int = 0,
) -> dict[str, int]:
    """Bytes of each part at the peak of a step, which comes as the backward pass begins.

    Args:
        config: the drafter.
        parameters: trained ones, held in float32.
        tokens: packed context tokens of the largest forward.
        blocks: blocks of it; for EAGLE-3, entries times steps.
        labels: labels whose losses are taken.
        length: mean length of its sequences.
        half: bfloat16 autocast.
        resident: what the process holds already: libraries, target, the drafter's weights.
    """
    c, x = config, 2 if half else 4
    d, inner, heads = c.hidden_size, c.intermediate_size, c.num_heads
    slots = blocks * (1 if c.eagle is not None else c.block_size)
    # Two residuals and two norms in float32, and what each product keeps of its input.
    layers = 0
    for layer in c.layers:
        kv, dim = layer.num_kv_heads, layer.head_dim
        wide = 2 * d if c.eagle is not None else d
        each = 4 * (2 * d + d + wide) + x * (2 * d + wide) + x * (heads + 2 * kv) * dim
        each += 4 * 4 * (heads + kv) * dim + 3 * x * heads * dim + 4 * x * inner
        scores = heads * (length + c.block_size) * 2 * x
        layers += slots * (each + scores) + tokens * 2 * kv * dim * (x + 8)
    taps = tokens * len(c.target_layer_ids) * c.target_hidden_size * (2 + 2 + 4 + x)
    vocabulary = labels * c.draft_vocab_size * 4 * x
    return {
        "resident": resident,
        "gradients and moments": 12 * parameters + (2 * parameters if half else 0),
        "features": taps + tokens * d * 16,
        "layers": layers,
        "vocabulary": vocabulary,
    }


def in_words(parts: Mapping[str, int]) -> str:
    """``1.70 GiB: 0.81 resident, 0.33 gradients and moments, ..``"""
    rest = ", ".join(f"{size / 2**30:.2f} {name}" for name, size in parts.items())
    return f"{sum(parts.values()) / 2**30:.2f} GiB ({rest})"


def resident_bytes(device: torch.device) -> int:
    """What this process holds now: of a GPU's memory there, of the machine's elsewhere; 0 where nobody says."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return _status("VmRSS")


def peak_bytes(device: torch.device) -> int:
    """The most that it has held so far."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    found = _status("VmHWM")
    if found:
        return found
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)


def give_back() -> bool:
    """Hand freed memory back to the system; False where the allocator is not glibc's.

    Batches differ in length, so freed blocks seldom fit what comes next: within tens of steps glibc's heap grows to
    twice what is in use. Between steps, not within one: pages are zeroed anew when they are asked for again.
    """
    trim = _malloc_trim()
    return trim is not None and bool(trim(0))


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's own; looked up once, as telling the libc reads the interpreter's file."""
    if platform.libc_ver()[0] != "glibc":
        return None
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    return trim


def _status(field: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)
