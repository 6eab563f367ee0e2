"""A server in a process of its own, as ``dspark serve`` runs it, and what can be seen of it from outside."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from benchmarks._common import ROOT


class Server:
    """``dspark serve TARGET ARGS``; a context manager that ends it.

    Args:
        target: as ``--target``.
        args: further arguments.
        model: the served name.
        wait: seconds until it must be up (the cost table may have to be measured).

    Attributes:
        url: its root.
        log: file of what it printed.
    """

    def __init__(self, target: str, args: Sequence[str] = (), *, model: str = "served", wait: float = 600) -> None:
        self.target, self.args, self.model, self.wait = target, list(args), model, wait
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = Path(tempfile.mkstemp(prefix="dspark-serve-", suffix=".log")[1])
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self.log.unlink(missing_ok=True)

    def start(self) -> None:
        """Start it and wait until it answers.

        Raises:
            RuntimeError: it ended, with what it printed.
        """
        command = [
            sys.executable, "-m", "dspark", "serve", "--target", self.target, "--port", str(self.port),
            "--model-name", self.model, *self.args,
        ]  # fmt: skip
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
            )  # fmt: skip
        ends = time.monotonic() + self.wait
        while not self.up():
            if self.process.poll() is not None or time.monotonic() > ends:
                raise RuntimeError(f"the server did not start: {self.output()}")
            time.sleep(0.1)

    def up(self) -> bool:
        """True where it takes requests."""
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def send(self, sig: int) -> None:
        """Send its process a signal."""
        if self.process is not None:
            self.process.send_signal(sig)

    def stop(self) -> int:
        """End it as a service manager would; its exit code."""
        if self.process is None:
            return 0
        if self.process.poll() is None:
            self.send(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait()

    def output(self) -> str:
        """What it printed."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def post(self, path: str, body: Any, timeout: float = 600) -> httpx.Response:
        """One request."""
        return httpx.post(f"{self.url}{path}", json=body, timeout=timeout)

    def metric(self, name: str) -> float:
        """A metric without labels."""
        found = re.search(rf"^{name} (\S+)$", httpx.get(f"{self.url}/metrics", timeout=30).text, re.MULTILINE)
        if found is None:
            raise RuntimeError(f"no metric {name}")
        return float(found.group(1))

    def resident_bytes(self) -> int:
        """Memory that its process holds (Linux)."""
        pid = 0 if self.process is None else self.process.pid
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
