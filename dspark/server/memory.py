"""A steady allocator for a process that decodes all its life."""

from __future__ import annotations

import ctypes
import os
import platform

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of malloc.h
_MMAP_THRESHOLD, _TRIM_THRESHOLD = 1 << 25, (1 << 31) - 1  # the largest that glibc takes
_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES")


def keep_memory(*, one_arena: bool = False) -> bool:
    """Make glibc keep freed memory instead of giving it back; False where there is no glibc, or the user set it up.

    By default each tensor of some megabytes is mapped and unmapped anew, and its pages are zeroed again by the kernel
    at every step: several milliseconds a step for logits over a large vocabulary. The same as the environment
    ``MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=2147483647``.

    Args:
        one_arena: let all threads share the main arena (``MALLOC_ARENA_MAX=1``), as the others are given back whenever
            they are empty: for an engine that runs in a thread of its own. Before threads start.
    """
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in _VARIABLES):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    done = mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD) and mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD)
    return bool(done and (not one_arena or mallopt(_M_ARENA_MAX, 1)))
