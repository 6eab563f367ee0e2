"""Workers of OpenMP: a thread that lets its own go leaves the processors to the thread that decodes."""

import subprocess
import sys

import pytest
import torch

from dspark.ops.threads import release_workers

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="GNU OpenMP, as torch has it on Linux")

COUNT = """
import os, torch
from dspark.ops.threads import release_workers
torch.set_num_threads(2)
def threads(): return len(os.listdir("/proc/self/task"))
def work(): torch.ones(1 << 20).exp().sum()
work()
busy = threads()
released = release_workers()
work_after = [threads()]
work()
print(released, busy - work_after[0], threads() - work_after[0], torch.get_num_threads())
"""


@LINUX
def test_workers_go_and_come_back() -> None:
    got = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=True)
    released, gone, back, count = got.stdout.split()
    if released == "False":
        pytest.skip("torch has another OpenMP here")
    assert (gone, back, count) == ("1", "1", "2")


def test_results_stay() -> None:
    x = torch.arange(1 << 18, dtype=torch.float32)
    before = (x.sin() @ x).item()
    release_workers()
    assert (x.sin() @ x).item() == pytest.approx(before)


@LINUX
def test_where_no_runtime_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    assert release_workers() is False
