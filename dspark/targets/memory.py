"""How much memory a key-value cache may take, and how it is asked for."""

from __future__ import annotations

import math
import os

import torch
from torch import Tensor

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def available_bytes(device: torch.device) -> int | None:
    """Memory that ``device`` can still give, in bytes; None where the platform does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "mps":
        limit = int(torch.mps.recommended_max_memory())
        return max(0, limit - int(torch.mps.driver_allocated_memory()))
    return _available_host_bytes()


def _available_host_bytes() -> int | None:
    known = [size for size in (_system_bytes(), _group_bytes()) if size is not None]
    return min(known) if known else None


def _system_bytes() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    names = getattr(os, "sysconf_names", {})
    for pages in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"):
        if pages in names and "SC_PAGE_SIZE" in names:
            count, size = os.sysconf(pages), os.sysconf("SC_PAGE_SIZE")
            if count > 0 and size > 0:
                return count * size
    return None


def _group_bytes(folder: str = "/sys/fs/cgroup") -> int | None:
    """What a container's control group has left, counting its page cache as free; None without a limit."""
    try:
        limit, used = (int(_read(f"{folder}/memory.{name}")) for name in ("max", "current"))
        stat = dict(line.split() for line in _read(f"{folder}/memory.stat").splitlines())
        return max(0, limit - used + int(stat.get("file", 0)))
    except (OSError, ValueError):  # no control group, or "max"
        return None


def _read(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read()


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU their pages are not touched before they are written.

    Zeros rather than ``torch.empty``: a masked weight of 0 times whatever NaN the memory held would still be NaN.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    import numpy as np

    size = max(1, math.prod(shape)) * dtype.itemsize
    flat = torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(dtype)  # calloc: untouched pages read as zero
    return flat[: math.prod(shape)].view(shape)


def human_bytes(count: float) -> str:
    """``1536`` -> ``1.5 KiB``."""
    power = 0
    while abs(count) >= 1024 and power < len(_UNITS) - 1:
        count, power = count / 1024, power + 1
    return f"{count:.0f} B" if power == 0 else f"{count:.1f} {_UNITS[power]}"
