"""What the server costs, and what clients wait: against the bare engine, with 1, 8 and 32 clients.

    python -m benchmarks.serve_overhead [--target smollm2 --tokens 64 --rounds 3]

Each measurement decodes the same greedy requests twice, in turn: through ``Engine.step`` alone, and by as many HTTP
clients, which stream from a server in another process; both keep the memory that they free. Throughput is output tokens
by wall-clock time; the overhead is the median over rounds of 1 - server / engine. Time to first token and inter-token
latency are the clients' (tokens of one event share its time). Everything is done without speculation and with it: three
drafts a round, all verified, so that both sides run the same rounds whatever these take. Results go to
``benchmarks/results/serve-overhead.json`` and, with ``--write``, into docs/results.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks._common import Progress, describe, machine, prepare, table, write_json, write_section
from benchmarks.prompts import chats_of_length
from benchmarks.serving import Server

PROMPT = 48
MAX_LEN = 1024
SLOTS = 32
DRAFTS = 3
FEWEST = 8
"""Fewest requests of a round, for percentiles of one client's."""


@dataclass(slots=True)
class Times:
    """What clients saw.

    Attributes:
        first: seconds to the first token, one a request.
        between: seconds between tokens, one a token.
        tokens, seconds: of all.
    """

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0

    @property
    def throughput(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def main() -> None:
    """Measure, store, and show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, default=2, help="of each client")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--write", action="store_true", help="put the tables into docs/results.md")
    arguments = parser.parse_args()
    prepare()
    say, rows = Progress(), []
    for drafter in (arguments.drafter, "none"):
        rows += measure(arguments, drafter, say)
    result = {"machine": machine(), "arguments": vars(arguments), "rows": rows}
    path = write_json("serve-overhead", result)
    text = report(result)
    print(text)
    if arguments.write:
        write_section("serve-overhead", text)
    print(f"written to {path}")


def measure(arguments: argparse.Namespace, drafter: str, say: Any) -> list[dict[str, Any]]:
    """One row a number of clients."""
    from dspark.api import SpeculativeDecoder

    settings: dict[str, Any] = {"max_slots": SLOTS, "max_len": MAX_LEN, "drafter": drafter, "cost": None}
    settings["prefix_cache"] = False  # rounds repeat their prompts, and a first token has to wait for its prompt
    if drafter != "none":
        settings |= {"scheduler": "fixed", "gamma": DRAFTS}
    decoder = SpeculativeDecoder.from_pretrained(arguments.target, dtype="float32", device="cpu", **settings)
    most = max(FEWEST, max(arguments.clients) * arguments.requests)
    chats = chats_of_length(PROMPT, most, decoder.tokenizer)
    args = ["--dtype", "float32", "--device", "cpu", "--drafter", drafter, "--max-slots", str(SLOTS)]
    args += ["--set", f"max_len={MAX_LEN}", "--set", "prefix_cache=false", "--cost", "none", "--log-level", "warning"]
    if drafter != "none":
        args += ["--set", "scheduler=fixed", "--set", f"gamma={DRAFTS}"]
    rows = []
    with Server(arguments.target, args) as server:
        for clients in arguments.clients:
            work = chats[: max(FEWEST, clients * arguments.requests)]
            through(server, work[:clients], clients, 8)
            bare(decoder, work[:clients], clients, 8)
            pairs = []
            for _ in range(arguments.rounds):
                pairs.append(
                    (bare(decoder, work, clients, arguments.tokens), through(server, work, clients, arguments.tokens))
                )
            row = summary(drafter, clients, pairs)
            say(f"{drafter}, {clients} clients: {row['server']:.1f} tokens/s, overhead {100 * row['overhead']:.1f} %")
            rows.append(row)
    decoder.close()
    return rows


def summary(drafter: str, clients: int, pairs: list[tuple[float, Times]]) -> dict[str, Any]:
    """Medians over rounds, and percentiles over all requests and tokens."""
    first = [t for _, times in pairs for t in times.first]
    between = [t for _, times in pairs for t in times.between]
    overheads = [1 - times.throughput / engine for engine, times in pairs]
    return {
        "drafter": drafter,
        "clients": clients,
        "engine": statistics.median(engine for engine, _ in pairs),
        "server": statistics.median(times.throughput for _, times in pairs),
        "overhead": statistics.median(overheads),
        "overheads": overheads,
        **{f"ttft_p{p}": float(np.percentile(first, p)) for p in (50, 99)},
        **{f"itl_p{p}": float(np.percentile(between, p)) for p in (50, 99)},
    }


def bare(decoder: Any, chats: list[list[int]], clients: int, tokens: int) -> float:
    """Tokens a second of the engine alone, at most ``clients`` requests at once."""
    from dspark.config import SamplingParams

    engine = decoder.engine
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    left, count = list(reversed(chats)), 0
    began = time.perf_counter()
    for _ in range(min(clients, len(left))):
        engine.submit(left.pop(), params)
    while engine.has_work:
        for chunk in engine.step():
            count += len(chunk.ids)
            if chunk.finish_reason is not None and left:
                engine.submit(left.pop(), params)
    return count / (time.perf_counter() - began)


def through(server: Server, chats: list[list[int]], clients: int, tokens: int) -> Times:
    """The same through HTTP."""
    times = Times()
    began = time.perf_counter()
    asyncio.run(ask_all(server.port, list(reversed(chats)), clients, tokens, times))
    times.seconds = time.perf_counter() - began
    return times


async def ask_all(port: int, left: list[list[int]], clients: int, tokens: int, times: Times) -> None:
    """``clients`` at once, each with the next chat, over a connection that it keeps."""

    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while left:
            await ask(reader, writer, left.pop(), tokens, times)
        writer.close()

    await asyncio.gather(*(one() for _ in range(clients)))


async def ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, prompt: list[int], tokens: int, times: Times
) -> None:
    """One stream. By hand, since the client is on the server's cores: what it takes would count as overhead.

    Raises:
        RuntimeError: another answer than a whole stream.
    """
    body = json.dumps({
        "model": "served", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "return_token_ids": True,
    }).encode()  # fmt: skip
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    last = began = time.perf_counter()
    writer.write(head.encode() + body)
    status, got = await reader.readline(), 0
    while line := await reader.readline():
        if line == b"0\r\n":  # the last chunk, and the line behind it
            await reader.readline()
            break
        if not line.startswith(b"data: {"):
            continue
        count = len(json.loads(line[6:])["choices"][0]["token_ids"])
        now = time.perf_counter()
        if not got:
            times.first.append(now - began)
        else:
            times.between += [(now - last) / count] * count
        last = now
        got += count
    if got != tokens or b" 200 " not in status:
        raise RuntimeError(f"{got} of {tokens} tokens; the server said {status!r}")
    times.tokens += got


def report(result: dict[str, Any]) -> str:
    """The tables as markdown."""
    rows = [
        [
            "plain" if r["drafter"] == "none" else r["drafter"], str(r["clients"]), f"{r['engine']:.1f}",
            f"{r['server']:.1f}", f"{100 * r['overhead']:.1f} %",
            *(f"{1000 * r[f'{name}_p{p}']:.0f}" for name in ("ttft", "itl") for p in (50, 99)),
        ]
        for r in result["rows"]
    ]  # fmt: skip
    head = [
        "drafter", "clients", "engine, tokens/s", "server, tokens/s", "overhead",
        "first token p50, ms", "p99", "between tokens p50, ms", "p99",
    ]  # fmt: skip
    return f"{describe(result['machine'])}\n\n{table(head, rows)}"


if __name__ == "__main__":
    main()
