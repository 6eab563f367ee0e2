"""Memory that is freed is kept: a step's tensors are not mapped and zeroed anew at the next one."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys, threading
from dspark.server.memory import keep_memory
print(keep_memory(one_arena=True) if sys.argv[1] == "keep" else None)

def steps(count):
    for _ in range(count):
        [b"x" * (20 << 20) for _ in range(4)]

def engine():
    steps(3)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    steps(20)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

thread = threading.Thread(target=engine)
thread.start()
thread.join()
"""
pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="its allocator is another one's")


def faults(what: str, **variables: str) -> tuple[str, int]:
    """What ``keep_memory`` said, and the pages that twenty steps of 80 MB were given anew."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, what], env={**clean, **variables}, capture_output=True, text=True, check=True
    )
    said, count = done.stdout.split()
    return said, int(count)


def test_pages_are_kept() -> None:
    said, kept = faults("keep")
    assert said == "True"
    _, default = faults("leave")
    assert default > 20 * 1024, "there is something to win"
    assert kept < default / 10


def test_what_the_user_sets_stays() -> None:
    assert faults("keep", MALLOC_ARENA_MAX="4")[0] == "False"
