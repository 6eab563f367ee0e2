"""Worker threads of torch's CPU operations."""

from __future__ import annotations

import ctypes
import sys

_SOFT = 1  # omp_pause_soft of omp.h: nothing but threads is given up


def release_workers() -> bool:
    """Let the calling thread's OpenMP workers go. They come back with its next parallel operation.

    Each thread that runs torch operations has workers of its own. GNU OpenMP counts them all, and where they are more
    than the processors, they sleep at the end of each operation instead of waiting for the next one, which a decoding
    step of a small model has hundreds of. So who has loaded a model in one thread, to decode in another, lets the
    first one's workers go.

    Returns:
        whether there was an OpenMP runtime to do it (5.0 or later; on Linux, for that is where torch brings GNU's).
    """
    if sys.platform != "linux":
        return False
    try:
        pause = ctypes.CDLL(None).omp_pause_resource_all
    except (OSError, AttributeError):
        return False
    pause.argtypes, pause.restype = [ctypes.c_int], ctypes.c_int
    return bool(pause(_SOFT) == 0)
