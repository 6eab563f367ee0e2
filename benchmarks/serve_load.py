"""Load test of ``dspark serve``: what a crowd gets is what each gets alone, and nothing leaks.

    python -m benchmarks.serve_load [--requests 2000 --clients 64 --rate 8 --target smollm2]

Requests arrive by a Poisson process at one server in a process of its own. A tenth of them disconnect in mid-stream, a
twentieth are malformed, of fifty kinds. Every greedy and every seeded answer is compared with plain decoding of the
same request alone; where they part, the unmodified model says by which margin. Results go to
``benchmarks/results/serve-load.json``.
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

from benchmarks._common import Progress, machine, prepare, write_json
from benchmarks.margins import Finding, Reference
from benchmarks.prompts import load_prompts
from benchmarks.serve_cases import CHAT, Malformed, malformed
from benchmarks.serving import Server
from dspark.config import SamplingParams
from dspark.targets.load import load_model

MAX_LEN = 1024
RSS_GROWTH = 0.05
"""Most that memory may grow by after the warm-up."""
PATIENCE = 300.0


@dataclass(frozen=True, slots=True)
class Request:
    """One request of the crowd.

    Attributes:
        index: its place in the arrivals.
        prompt: token ids of a chat.
        messages: the chat.
        sampling: as sent.
        stream: as events.
        leave_after: disconnect after so many events; None to stay.
        wrong: what to send instead.
    """

    index: int
    prompt: tuple[int, ...] = ()
    messages: tuple[dict[str, str], ...] = ()
    sampling: tuple[tuple[str, Any], ...] = ()
    stream: bool = False
    leave_after: int | None = None
    wrong: Malformed | None = None

    @property
    def exact(self) -> bool:
        """True where its tokens are a function of the request."""
        if self.wrong is not None or self.leave_after is not None:
            return False
        return self.params.greedy or self.params.seed is not None

    @property
    def params(self) -> SamplingParams:
        """As the engine takes it."""
        return SamplingParams(**{"temperature": 1.0, **dict(self.sampling)})


@dataclass(slots=True)
class Outcome:
    """What happened to the crowd."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    statuses: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    left: int = 0
    retried: int = 0
    health_failures: int = 0


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
    parser.add_argument("--drafter", default="ngram")
    parser.add_argument("--cost", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="serve-load", help="of the result")
    arguments = parser.parse_args()
    prepare()
    result = run(arguments, Progress())
    path = write_json(arguments.name, {"machine": machine(), **result})
    print(json.dumps({k: v for k, v in result.items() if k != "differences"}, indent=1))
    print(f"written to {path}")
    sys.exit(0 if result["passed"] else 1)


def run(arguments: argparse.Namespace, say: Any) -> dict[str, Any]:
    """The whole test, as plain values; ``passed`` sums it up."""
    decoder = plain_decoder(arguments.target)
    requests = crowd(arguments, decoder)
    server_args = ["--dtype", "float32", "--drafter", arguments.drafter, "--cost", arguments.cost]
    server_args += ["--max-slots", str(arguments.max_slots), "--set", f"max_len={MAX_LEN}"]
    server_args += ["--queue-timeout", str(PATIENCE), "--log-level", "warning"]
    with Server(arguments.target, server_args) as server:
        say(f"server up; {len(requests)} requests from {arguments.clients} clients")
        warm = max(arguments.clients, len(requests) // 10)
        outcome = Outcome()
        asyncio.run(drive(server, requests[:warm], arguments, outcome))
        before = settled(server)
        say(f"warm: {before}")
        asyncio.run(drive(server, requests[warm:], arguments, outcome))
        after = settled(server)
        say(f"done: {after}")
        up = server.up() and outcome.health_failures == 0
        accepted = server.metric("dspark_accepted_tokens_total")
        verified = server.metric("dspark_verified_tokens_total")
    say("decoding each alone")
    findings = compare(arguments.target, decoder, requests, outcome)
    growth = after["resident_bytes"] / before["resident_bytes"] - 1
    faults = [f.as_dict() for f in findings if not f.rounding]
    checks = {
        "exact": not faults,
        "malformed refused by name": not outcome.faults,
        "nothing left in slots or queue": after["running"] == after["waiting"] == 0,
        "no task left": after["tasks"] <= before["tasks"],
        "memory": growth <= RSS_GROWTH,
        "up throughout": up,
        "drafts were verified": verified > 0,
    }
    return {
        "requests": len(requests),
        "clients": arguments.clients,
        "rate": arguments.rate,
        "compared": sum(r.index in outcome.tokens for r in requests if r.exact),
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
        "checks": checks,
        "passed": all(checks.values()),
    }


def plain_decoder(target: str) -> Any:
    """Plain decoding of one request at a time, in float32."""
    from dspark.api import SpeculativeDecoder

    return SpeculativeDecoder.from_pretrained(
        target, drafter="none", dtype="float32", device="cpu", cost=None, max_slots=1, max_len=MAX_LEN
    )


# the crowd ----------------------------------------------------------------------------------------------------------


def crowd(arguments: argparse.Namespace, decoder: Any) -> list[Request]:
    """All requests in order of arrival: a tenth leave, a twentieth are malformed, the rest in equal shares greedy,
    seeded and (a sixth) unseeded."""
    rng = np.random.default_rng(arguments.seed)
    pool = distinct(arguments, decoder, rng)
    kinds = malformed("served", MAX_LEN)
    count = arguments.requests
    fates = np.array(["stay"] * count, dtype=object)
    order = rng.permutation(count)
    leaving, wrong = round(count / 10), round(count / 20)
    fates[order[:leaving]] = "leave"
    fates[order[leaving : leaving + wrong]] = "wrong"
    requests, seen = [], 0
    for i in range(count):
        if fates[i] == "wrong":
            requests.append(Request(i, wrong=kinds[seen % len(kinds)]))
            seen += 1
            continue
        messages, prompt, sampling = pool[int(rng.integers(len(pool)))]
        if rng.random() < 1 / 6:
            sampling = tuple((k, v) for k, v in sampling if k != "seed")
            sampling = tuple((k, 1.0 if k == "temperature" else v) for k, v in sampling)
        leave = int(rng.integers(1, 6)) if fates[i] == "leave" else None
        requests.append(Request(i, prompt, messages, sampling, leave is not None or rng.random() < 0.5, leave))
    return requests


def distinct(arguments: argparse.Namespace, decoder: Any, rng: Any) -> list[tuple[Any, tuple[int, ...], Any]]:
    """(messages, token ids, sampling) of the requests that the crowd is drawn from."""
    from dspark.prompts import encode

    texts = [p.text for p in load_prompts(8)]
    pool = []
    for i in range(arguments.distinct):
        text = f"{texts[i % len(texts)][:400]} ({i})"
        messages = ({"role": "user", "content": text},)
        tokens = int(rng.integers(max(2, arguments.tokens // 2), arguments.tokens + 1))
        sampling: dict[str, Any] = {"max_tokens": tokens, "temperature": 0.0}
        if i % 2:
            sampling = {"max_tokens": tokens, "temperature": 0.8, "top_p": 0.95, "seed": i}
        pool.append((messages, tuple(encode(list(messages), decoder.tokenizer)), tuple(sampling.items())))
    return pool


# the clients --------------------------------------------------------------------------------------------------------


async def drive(server: Server, requests: list[Request], arguments: argparse.Namespace, outcome: Outcome) -> None:
    """Send all requests at Poisson times; at most ``clients`` are open at once."""
    rng = np.random.default_rng(arguments.seed + 1 + requests[0].index)
    places = asyncio.Semaphore(arguments.clients)
    done = asyncio.Event()
    limits = httpx.Limits(max_connections=arguments.clients + 4, max_keepalive_connections=arguments.clients)
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE, limits=limits) as client:
        watcher = asyncio.create_task(watch(client, done, outcome))
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


async def watch(client: httpx.AsyncClient, done: asyncio.Event, outcome: Outcome) -> None:
    """Look whether the server is up, all the time."""
    while not done.is_set():
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


if __name__ == "__main__":
    main()
