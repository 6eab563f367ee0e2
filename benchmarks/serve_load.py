"""Load test of ``dspark serve``: what a crowd gets is what each gets alone, and nothing leaks.

    python -m benchmarks.serve_load [--requests 2000 --clients 64 --rate 8 --target smollm2 --drafter auto]

Requests arrive by a Poisson process at one server in a process of its own. A tenth of them disconnect in mid-stream, a
twentieth are malformed, of fifty kinds. Every greedy and every seeded answer is compared with plain decoding of the
same request alone; where they part, the unmodified model says by which margin. Requests recur (``--distinct``), so that
each is decoded alone once. The scheduler is ``threshold`` unless told otherwise: a cost table of a machine on which
drafting does not pay would have nothing verified, and nothing tested. Results go to
``benchmarks/results/serve-load.json`` and, with ``--write``, into docs/results.md; ``--show NAME`` does that with a
result that is there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from benchmarks._common import Progress, describe, machine, prepare, read_json, table, write_json, write_section
from benchmarks.margins import Finding, Reference
from benchmarks.serve_cases import CHAT, Malformed
from benchmarks.serve_crowd import MAX_LEN, Request, crowd, longest
from benchmarks.serving import Server
from dspark.targets.load import load_model

RSS_GROWTH = 0.05
"""Most that memory may grow by after the warm-up."""
PATIENCE = 300.0


@dataclass(slots=True)
class Outcome:
    """What happened to the crowd."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    statuses: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    left: int = 0
    retried: int = 0
    health_failures: int = 0
    memory: list[int] = field(default_factory=list)


def main() -> None:
    """Run and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rate", type=float, default=8.0, help="arrivals a second")
    parser.add_argument("--distinct", type=int, default=200, help="different requests among them")
    parser.add_argument("--tokens", type=int, default=32, help="most tokens of an answer")
    parser.add_argument("--max-slots", type=int, default=16)
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--scheduler", default="threshold", help="auto for the server's own")
    parser.add_argument("--cost", default="none")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the engine")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="serve-load", help="of the result")
    parser.add_argument("--write", action="store_true", help="put the table into docs/results.md")
    parser.add_argument("--show", metavar="NAME", help="run nothing: show the stored result of this name")
    arguments = parser.parse_args()
    result = read_json(arguments.show) if arguments.show else None
    if result is None:
        prepare()
        result = {"machine": machine(), **run(arguments, Progress())}
        path = write_json(arguments.name, result)
        print(json.dumps({k: v for k, v in result.items() if k != "differences"}, indent=1))
        print(f"written to {path}")
    text = report(result)
    print(text)
    if arguments.write:
        write_section("serve-load", text)
    sys.exit(0 if result["passed"] else 1)


def run(arguments: argparse.Namespace, say: Any) -> dict[str, Any]:
    """The whole test, as plain values; ``passed`` sums it up."""
    decoder = plain_decoder(arguments.target)
    requests = crowd(arguments, decoder)
    server_args = ["--dtype", "float32", "--drafter", arguments.drafter, "--cost", arguments.cost]
    server_args += ["--max-slots", str(arguments.max_slots), "--set", f"max_len={MAX_LEN}"]
    server_args += [] if arguments.scheduler == "auto" else ["--scheduler", arguments.scheduler]
    server_args += [word for pair in arguments.set for word in ("--set", pair)]
    server_args += ["--queue-timeout", str(PATIENCE), "--log-level", "warning"]
    with Server(arguments.target, server_args) as server:
        say("server up; filling every slot as far as the crowd will")
        asyncio.run(drive(server, longest(requests, 4 * arguments.max_slots), arguments, Outcome()))
        say(f"{len(requests)} requests from {arguments.clients} clients")
        warm = max(arguments.clients, len(requests) // 10)
        outcome, began = Outcome(), time.monotonic()
        asyncio.run(drive(server, requests[:warm], arguments, outcome))
        before = settled(server)
        say(f"warm: {before}")
        outcome.memory.clear()
        asyncio.run(drive(server, requests[warm:], arguments, outcome))
        took = time.monotonic() - began
        after = settled(server)
        say(f"done: {after}")
        up = server.up() and outcome.health_failures == 0
        accepted = server.metric("dspark_accepted_tokens_total")
        verified = server.metric("dspark_verified_tokens_total")
    say("decoding each alone")
    findings = compare(arguments.target, decoder, requests, outcome)
    exact = [r for r in requests if r.exact and r.index in outcome.tokens]
    growth = after["resident_bytes"] / before["resident_bytes"] - 1
    faults = [f.as_dict() for f in findings if not f.rounding]
    checks = {
        "exact": not faults,
        "malformed refused by name": not outcome.faults,
        "nothing left in slots or queue": after["running"] == after["waiting"] == 0,
        "no task left": after["tasks"] <= before["tasks"],
        "memory": growth <= RSS_GROWTH,
        "up throughout": up,
        "drafts were accepted": accepted > 0,
    }
    return {
        "requests": len(requests),
        "clients": arguments.clients,
        "rate": arguments.rate,
        "drafter": arguments.drafter,
        "scheduler": arguments.scheduler,
        "cost": arguments.cost,
        "distinct": arguments.distinct,
        "seconds": round(took, 1),
        "compared": len(exact),
        "greedy": sum(r.params.greedy for r in exact),
        "seeded": sum(not r.params.greedy for r in exact),
        "tokens_compared": sum(len(outcome.tokens[r.index]) for r in exact),
        "decoded_alone": len({(r.prompt, r.sampling) for r in exact}),
        "disconnected": outcome.left,
        "malformed": sum(r.wrong is not None for r in requests),
        "kinds_of_malformed": len({r.wrong.name for r in requests if r.wrong is not None}),
        "statuses": dict(sorted(outcome.statuses.items())),
        "retried_after_429": outcome.retried,
        "verified_drafts": verified,
        "accepted_drafts": accepted,
        "within_rounding": len(findings) - len(faults),
        "differences": [f.as_dict() for f in findings],
        "complaints": outcome.faults[:20],
        "before": before,
        "after": after,
        "memory_growth": growth,
        "resident_bytes_by_tenth": [int(np.max(part)) for part in np.array_split(outcome.memory, 10) if len(part)],
        "checks": checks,
        "passed": all(checks.values()),
    }


def plain_decoder(target: str) -> Any:
    """Plain decoding of one request at a time, in float32."""
    from dspark.api import SpeculativeDecoder

    return SpeculativeDecoder.from_pretrained(
        target, drafter="none", dtype="float32", device="cpu", cost=None, max_slots=1, max_len=MAX_LEN
    )


# the clients --------------------------------------------------------------------------------------------------------


async def drive(server: Server, requests: list[Request], arguments: argparse.Namespace, outcome: Outcome) -> None:
    """Send all requests at Poisson times; at most ``clients`` are open at once."""
    rng = np.random.default_rng(arguments.seed + 1 + requests[0].index)
    places = asyncio.Semaphore(arguments.clients)
    done = asyncio.Event()
    limits = httpx.Limits(max_connections=arguments.clients + 4, max_keepalive_connections=arguments.clients)
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE, limits=limits) as client:
        watcher = asyncio.create_task(watch(client, server, done, outcome))
        tasks = []
        for request in requests:
            await asyncio.sleep(float(rng.exponential(1 / arguments.rate)))
            await places.acquire()
            task = asyncio.create_task(one(client, request, outcome))
            task.add_done_callback(lambda _: places.release())
            tasks.append(task)
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, BaseException):
                outcome.faults.append(f"{type(result).__name__}: {result}")
        done.set()
        await watcher


async def watch(client: httpx.AsyncClient, server: Server, done: asyncio.Event, outcome: Outcome) -> None:
    """Look whether the server is up, all the time, and what it holds."""
    while not done.is_set():
        outcome.memory.append(server.resident_bytes())
        try:
            if (await client.get("/health", timeout=30)).status_code != 200:
                outcome.health_failures += 1
        except httpx.HTTPError:
            outcome.health_failures += 1
        try:
            await asyncio.wait_for(done.wait(), 0.5)
        except TimeoutError:
            continue


async def one(client: httpx.AsyncClient, request: Request, outcome: Outcome) -> None:
    """Send one request, as often as it is asked to come back."""
    if request.wrong is not None:
        await send_malformed(client, request.wrong, outcome)
        return
    body = {
        "model": "served", "messages": list(request.messages), "return_token_ids": True, "stream": request.stream,
        **dict(request.sampling),
    }  # fmt: skip
    while True:
        status, wait = await (stream if request.stream else whole)(client, request, body, outcome)
        outcome.statuses[str(status)] += 1
        if status != 429:
            break
        outcome.retried += 1
        await asyncio.sleep(wait)
    if status != 200:
        outcome.faults.append(f"request {request.index}: status {status}")


async def whole(client: httpx.AsyncClient, request: Request, body: Any, outcome: Outcome) -> tuple[int, float]:
    """As one object; (status, seconds to wait)."""
    answer = await client.post(CHAT, json=body)
    if answer.status_code == 200:
        outcome.tokens[request.index] = answer.json()["choices"][0]["token_ids"]
    return answer.status_code, float(answer.headers.get("retry-after", 0))


async def stream(client: httpx.AsyncClient, request: Request, body: Any, outcome: Outcome) -> tuple[int, float]:
    """As events, leaving where the request does."""
    ids: list[int] = []
    ended = False
    async with client.stream("POST", CHAT, json=body) as answer:
        if answer.status_code != 200:
            return answer.status_code, float(answer.headers.get("retry-after", 0))
        events = 0
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                ended = True
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    outcome.faults.append(f"request {request.index}: {event['error']['message']}")
                    return 200, 0.0
                ids += event["choices"][0]["token_ids"]
                events += 1
                if request.leave_after is not None and events >= request.leave_after:
                    outcome.left += 1
                    return 200, 0.0
    if not ended:
        outcome.faults.append(f"request {request.index}: the stream has no end")
    elif request.leave_after is None:
        outcome.tokens[request.index] = ids
    return 200, 0.0


async def send_malformed(client: httpx.AsyncClient, case: Malformed, outcome: Outcome) -> None:
    """It must get a 4xx whose message names the field."""
    answer = await client.post(case.path, content=case.content, headers=dict(case.headers))
    outcome.statuses[str(answer.status_code)] += 1
    message = answer.json()["error"]["message"] if answer.status_code >= 400 else ""
    if not 400 <= answer.status_code < 500 or case.field not in message:
        outcome.faults.append(f"malformed ({case.name}): {answer.status_code} {message!r}")


# afterwards ---------------------------------------------------------------------------------------------------------


def settled(server: Server, seconds: float = 60) -> dict[str, float]:
    """What the server holds once it is idle."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends and server.metric("dspark_running") + server.metric("dspark_waiting") > 0:
        time.sleep(0.2)
    time.sleep(1.0)  # connections that were left are closed
    return {
        "running": server.metric("dspark_running"),
        "waiting": server.metric("dspark_waiting"),
        "tasks": server.metric("dspark_tasks"),
        "resident_bytes": float(server.resident_bytes()),
    }


def compare(target: str, decoder: Any, requests: list[Request], outcome: Outcome) -> list[Finding]:
    """Every greedy and seeded answer against plain decoding alone; each different request is decoded once."""
    alone: dict[tuple[Any, Any], list[int]] = {}
    reference: Reference | None = None
    findings = []
    for request in requests:
        if not request.exact or request.index not in outcome.tokens:
            continue
        key = (request.prompt, request.sampling)
        if key not in alone:
            alone[key] = decoder.generate([list(request.prompt)], request.params)[0].ids
        got = outcome.tokens[request.index]
        if got == alone[key]:
            continue
        reference = reference or Reference(load_model(target, dtype="float32", device="cpu")[0])
        where, source = f"request {request.index}", str(request.messages[0]["content"])[:40]
        found = reference.compare(request.prompt, alone[key], got, request.params, where=where, source=source)
        if found is not None:
            findings.append(found)
    return findings


def report(result: dict[str, Any]) -> str:
    """The outcome as markdown."""
    differing = len(result["differences"])
    rows = [
        ["requests; clients; arrivals a second", f"{result['requests']:,}; {result['clients']}; {result['rate']:g}"],
        ["greedy answers; seeded answers", f"{result['greedy']:,}; {result['seeded']:,}"],
        ["requests decoded alone, for these", f"{result['decoded_alone']:,}"],
        ["tokens compared", f"{result['tokens_compared']:,}"],
        ["answers that differ; by margins under 1e-4", f"{differing}; {result['within_rounding']}"],
        ["left in mid-stream", f"{result['disconnected']:,}"],
        ["malformed; kinds; refused by name", _malformed(result)],
        ["drafts verified; accepted", f"{result['verified_drafts']:,.0f}; {result['accepted_drafts']:,.0f}"],
        ["in slots or queue at the end", f"{result['after']['running'] + result['after']['waiting']:.0f}"],
        ["tasks after the warm-up; at the end", f"{result['before']['tasks']:.0f}; {result['after']['tasks']:.0f}"],
        ["memory since the warm-up", f"{100 * result['memory_growth']:+.1f} %"],
        ["up throughout", "yes" if result["checks"]["up throughout"] else "NO"],
    ]
    said = f"Drafter `{result['drafter']}`, scheduler `{result['scheduler']}`, float32."
    return f"{describe(result['machine'])} {said}\n\n{table(['what', 'outcome'], rows)}"


def _malformed(result: dict[str, Any]) -> str:
    refused = sum(n for status, n in result["statuses"].items() if status.startswith("4") and status != "429")
    return f"{result['malformed']}; {result['kinds_of_malformed']}; {refused - len(result['complaints'])}"


if __name__ == "__main__":
    main()
