"""A drafter that turns useless while the engine runs, and good again: ``python -m benchmarks.swap --drafter auto``.

Requests are decoded greedily in three phases of as many tokens each. In a useless phase every drafted token is another
one than the drafter chose, so that drafting costs what it costs and brings nothing. The engine is not told: the gamma
policy ``adaptive`` has to find out from outcomes, go plain, and, once drafts are good again, from its probes.

Plain decoding, the good drafter throughout and both orders run on the same prompts, in turn. A phase is a range of
tokens of the run, the same in all of them. *Rounds to settle* count from each change to the first of
sixteen steps of which at least fourteen are plain, or draft.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks._common import Progress, describe, machine, prepare, table, write_json, write_section
from benchmarks.prompts import encode_chats, load_prompts

ORDERS = {"plain": "", "good": "ggg", "useless": "uuu", "good, useless, good": "gug", "useless, good, useless": "ugu"}
SETTLED, OF = 14, 16


class Spoiled:
    """A drafter's ``propose`` with a switch: while it is on, every drafted token is another one."""

    def __init__(self, drafter: Any, vocab_size: int) -> None:
        self.useless = False
        self._propose, self._vocab_size = drafter.propose, vocab_size
        drafter.propose = self

    def __call__(self, batch: Any, sampler: Any) -> Any:
        block = self._propose(batch, sampler)
        if not self.useless:
            return block
        return dataclasses.replace(block, token_ids=(block.token_ids + 1) % self._vocab_size)


@dataclasses.dataclass
class Step:
    """One step: tokens out before it, what it committed, how long it took and how many tokens were drafted a row."""

    before: int
    tokens: int
    seconds: float
    gamma: int


def decode(decoder: Any, prompts: list[list[int]], order: str, options: argparse.Namespace, c: int) -> list[Step]:
    """Keep ``c`` requests running until every phase has had its tokens."""
    from dspark.config import SamplingParams

    params = SamplingParams(max_tokens=options.max_tokens, ignore_eos=True)
    switch = Spoiled(decoder.engine.parts.drafter, decoder.engine.parts.target.vocab_size) if order else None
    engine, steps, out, live, next_prompt = decoder.engine, list[Step](), 0, set[str](), 0
    phase = options.tokens * c
    while out < 3 * phase:
        while len(live) < c:
            live.add(engine.submit(prompts[next_prompt % len(prompts)], params))
            next_prompt += 1
        if switch is not None:
            switch.useless = order[out // phase] == "u"
        gammas, began = dict(engine.stats.gammas), time.perf_counter()
        chunks = engine.step()
        took = time.perf_counter() - began
        for chunk in chunks:
            if chunk.error is not None:
                raise RuntimeError(f"a request failed: {chunk.error}")
            if chunk.finish_reason is not None:
                live.discard(chunk.request_id)
        made = sum(len(chunk.ids) for chunk in chunks)
        drafted = [g for g, n in engine.stats.gammas.items() if n > gammas.get(g, 0)]
        steps.append(Step(out, made, took, max(drafted, default=0)))
        out += made
    for request in live:
        engine.abort(request)
    return steps


def speeds(steps: Sequence[Step], phase: int) -> list[float]:
    """Tokens a second in each phase."""
    found = []
    for p in range(3):
        within = [s for s in steps if p * phase <= s.before < (p + 1) * phase]
        found.append(sum(s.tokens for s in within) / sum(s.seconds for s in within))
    return found


def settled(steps: Sequence[Step], phase: int, order: str) -> list[int | None]:
    """Steps from each change until the engine does what fits the phase; None where it never does."""
    found: list[int | None] = []
    for p in (1, 2):
        within = [s.gamma > 0 for s in steps if p * phase <= s.before < (p + 1) * phase]
        fits = [drafts == (order[p] == "g") for drafts in within]
        windows = (i for i in range(len(fits) - OF + 1) if sum(fits[i : i + OF]) >= SETTLED and fits[i])
        found.append(next(windows, None))
    return found


def measure(target: Any, prompts: list[list[int]], options: argparse.Namespace, tell: Progress) -> dict[str, Any]:
    """All orders at each concurrency, interleaved over the repetitions."""
    from dspark import SpeculativeDecoder

    found: dict[str, Any] = {}
    for c in options.concurrency:
        runs: dict[str, list[list[Step]]] = {name: [] for name in ORDERS}
        for turn in range(options.repeat):
            names = list(ORDERS)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                decoder = SpeculativeDecoder.from_pretrained(
                    target, options.drafter if ORDERS[name] else "none", max_slots=c, max_len=options.max_len,
                    prefix_cache=False,
                )  # fmt: skip
                runs[name].append(decode(decoder, prompts, ORDERS[name], options, c))
                decoder.close()
                tell(f"concurrency {c}, pass {turn + 1}: {name}")
        phase = options.tokens * c
        found[str(c)] = {
            name: {
                "speed": [statistics.median(column) for column in zip(*[speeds(s, phase) for s in taken], strict=True)],
                "settled": [settled(s, phase, ORDERS[name]) for s in taken] if len(set(ORDERS[name])) > 1 else [],
                "drafting": statistics.median(sum(s.gamma > 0 for s in steps) / len(steps) for steps in taken),
            }
            for name, taken in runs.items()
        }
    return found


def report(found: dict[str, Any], about: dict[str, Any]) -> str:
    """The section of the results page."""
    head = [
        "requests at once",
        "drafter",
        "over plain, by phase",
        "",
        "",
        "gain kept",
        "rounds to settle",
        "steps that draft",
    ]
    rows = []
    for c, runs in found.items():
        plain, good = runs["plain"]["speed"], runs["good"]["speed"]
        for name, run in runs.items():
            if name == "plain":
                continue
            kept = [
                (run["speed"][p] - plain[p]) / (good[p] - plain[p])
                for p, kind in enumerate(ORDERS[name])
                if kind == "g" and name != "good" and good[p] > plain[p]
            ]
            rounds = ["-" if r is None else str(r) for pair in run["settled"] for r in pair]
            rows.append([
                c, name, *[f"{a / b:.2f}x" for a, b in zip(run["speed"], plain, strict=True)],
                ", ".join(f"{100 * k:.0f} %" for k in kept), ", ".join(rounds), f"{100 * run['drafting']:.0f} %",
            ])  # fmt: skip
    return f"{table(head, rows, left=2)}\n\n{describe(about)}"


def main(arguments: Iterable[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.swap", description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--drafter", default="auto", help="a registered drafter or a checkpoint")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=512, help="of a phase, times the requests at once")
    parser.add_argument("--max-tokens", type=int, default=128, help="of a request")
    parser.add_argument("--max-len", type=int, default=1024, help="tokens of a slot")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--no-write", action="store_true", help="leave results/ and the results page alone")
    options = parser.parse_args(None if arguments is None else list(arguments))
    prepare()
    from dspark.targets.hf import HFTarget

    about = machine() | {k: v for k, v in vars(options).items() if k != "no_write"}
    target = HFTarget.from_pretrained(options.target, dtype=options.dtype, device="cpu")
    room = options.max_len - options.max_tokens
    prompts = [ids for ids in encode_chats(load_prompts(16), target.tokenizer) if len(ids) < room]
    found = measure(target, prompts, options, Progress())
    text = report(found, about)
    print(f"\n{text}\n")
    if not options.no_write:
        print(f"written: {write_json('swap', {'about': about, 'runs': found})}")
        write_section("swap", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
