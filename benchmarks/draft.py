"""What a draft costs: ``python -m benchmarks.draft``.

Drafters with random weights of the shipped size (2 layers of width 576, 9 heads over 3, a pruned vocabulary of
8,192, r = 256) on SmolLM2 in bfloat16. A draft is everything from target features to q: what the last round added is
projected, the block is run, seven tokens are sampled. All cases are interleaved, repetition by repetition; figures are
medians, differences between drafters are medians of the differences within a repetition. Two things are called a round:
a draft and the target's forward over it, R * (1 + 7) tokens with all their logits; and a whole step of the engine with
a drafter without head, where drafts are verified and tokens committed as well.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from benchmarks._common import Progress, describe, machine, prepare, table, write_json, write_section
from dspark.checkpoints import Checkpoint, DrafterConfig, LayerConfig, RopeConfig, make_checkpoint, random_tensors
from dspark.config import EngineConfig, SamplingParams
from dspark.engine.build import build_engine, build_parts
from dspark.errors import DSparkWarning
from dspark.plugins.manager import load_plugins
from dspark.sampling.draft import RoundSampler
from dspark.sampling.draws import CounterDraws
from dspark.targets.hf import HFTarget
from dspark.tokens import TokenView
from dspark.types import BatchView, Committed, Mode, RequestView, VerifyLayout

TARGET = "smollm2"
GAMMA = 7
PRUNED, RANK = 8192, 256
DRAFTERS: dict[str, tuple[str, int | None]] = {
    "none": ("none", None),
    "markov": ("markov", None),
    "gated": ("gated", None),
    "rnn": ("rnn", None),
    "none, 64 candidates": ("none", 64),
    "markov, 64 candidates": ("markov", 64),
}
LIMITS_MS = {1: 6.0, 32: 45.0}
LIMIT_SHARE = 0.013
ROUND_TOKENS = 24
"""New tokens of a request where whole rounds are timed."""


def shipped(
    head: str, target: HFTarget, draft_ids: Sequence[int] | None, *, anchor_first: bool = True, gamma: int = GAMMA
) -> Checkpoint:
    """A random drafter of the shipped size for ``target``.

    Args:
        draft_ids: target ids of a pruned vocabulary, rising; None for all.
        anchor_first: the block layout: DSpark's, or DFlash's.
    """
    vocab_size, hidden, layers = target.vocab_size, target.model.config.hidden_size, target.num_layers
    config = DrafterConfig(
        source_format="deepspec",
        algorithm="dflash" if head == "none" else "dspark",
        family="llama",
        hidden_size=hidden,
        intermediate_size=1536,
        num_heads=9,
        vocab_size=vocab_size,
        draft_vocab_size=vocab_size if draft_ids is None else len(draft_ids),
        layers=(LayerConfig(3, 64, rope=RopeConfig(theta=100_000.0)),) * 2,
        target_layer_ids=(1, layers // 2, layers - 3),
        target_hidden_size=hidden,
        block_size=gamma if anchor_first else gamma + 1,
        sample_from_anchor=anchor_first,
        mask_token_id=0,
        head=head,
        markov_rank=0 if head == "none" else RANK,
        confidence=head != "none",
        confidence_with_markov=head != "none",
        rms_norm_eps=1e-5,
    )
    tensors = random_tensors(config, seed=0)
    if draft_ids is not None:
        ids = torch.tensor(draft_ids)
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    return make_checkpoint(config.validate("random"), tensors, source=f"random {head}")


@dataclass(slots=True)
class Case:
    """A drafter at a batch size and a mode, and its milliseconds a draft."""

    drafter: str
    rows: int
    mode: Mode
    run: Callable[[], object]
    ms: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.ms)


def requests(rows: int, mode: Mode, context: int) -> tuple[RequestView, ...]:
    """Requests whose anchors stand at ``context``, and whose last round added four tokens to what is cached."""
    params = SamplingParams(temperature=0.0 if mode is Mode.GREEDY else 1.0, seed=1 if mode is Mode.COUPLED else None)
    ids = list(range(100, 101 + context))
    return tuple(
        RequestView(f"r{i}", i, 1, TokenView(ids), context, context - 4, 64, params, mode, 1000 + i)
        for i in range(rows)
    )


def draft_case(name: str, drafter: Any, rows: int, mode: Mode, context: int, vocab_size: int) -> Case:
    """One draft after a round that committed four tokens."""
    batch = BatchView(requests(rows, mode, context), GAMMA)
    width = len(drafter.tap_layers) * drafter.checkpoint.config.target_hidden_size
    features = torch.randn(context, width, dtype=torch.bfloat16)

    def commit(new: int) -> None:
        for request in batch.requests:
            view = dataclasses.replace(request, num_cached=context - new)
            drafter.commit([Committed(view, -1, (), 0, 0, context, features[:new])])

    def run() -> object:
        commit(4)
        return drafter.propose(batch, RoundSampler(batch, CounterDraws(), vocab_size))

    for slot in range(rows):
        drafter.release(slot, 1)
    commit(context)
    return Case(name, rows, mode, run)


def forward(target: HFTarget, rows: int, length: int, context: int) -> Callable[[], object]:
    """The target over ``length`` tokens of each of ``rows`` requests, with all logits."""
    starts = np.full(rows, context, dtype=np.int64)
    total = rows * length
    layout = VerifyLayout(
        token_ids=torch.arange(total) % 1000 + 100,
        positions=(torch.arange(length) + context).repeat(rows),
        slots=np.arange(rows, dtype=np.int64),
        starts=starts,
        cu_query_lens=np.arange(rows + 1, dtype=np.int64) * length,
        logit_rows=np.arange(total, dtype=np.int64),
    )
    return lambda: target.forward(layout)


def milliseconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return 1000 * (time.perf_counter() - began)


def build_drafter(target: HFTarget, head: str, candidates: int | None, pack: bool) -> Any:
    ids = range(0, target.vocab_size, target.vocab_size // PRUNED)[:PRUNED]
    settings = {"checkpoint": shipped(head, target, ids), "candidates": candidates, "pack": pack}
    config = EngineConfig(drafter="dspark", drafter_config=settings, scheduler="fixed")
    return build_parts(config, load_plugins(config).catalog, target).drafter


def measure(target: HFTarget, options: argparse.Namespace, say: Progress) -> tuple[list[Case], dict[int, list[float]]]:
    """All cases, and the target's forwards by number of rows; interleaved."""
    modes = [Mode(name) for name in options.modes]
    built = {name: build_drafter(target, *DRAFTERS[name], options.pack) for name in options.drafters}
    say(f"{len(built)} drafters built")
    largest = max(options.batch)
    target.allocate(largest, options.context + GAMMA + 1)
    forwards = {rows: forward(target, rows, GAMMA + 1, options.context) for rows in options.batch}
    cases: list[Case] = []
    spent: dict[int, list[float]] = {rows: [] for rows in options.batch}
    for rows in options.batch:
        own = [
            draft_case(name, drafter, rows, mode, options.context, target.vocab_size)
            for name, drafter in built.items()
            for mode in modes
        ]
        for repetition in range(-2, options.repeat if rows > 1 else 4 * options.repeat):
            kept = repetition >= 0
            took = milliseconds(forwards[rows])
            spent[rows] += [took] if kept else []
            for case in own if repetition % 2 else own[::-1]:
                took = milliseconds(case.run)
                case.ms += [took] if kept else []
        cases += own
        drafts = ", ".join(f"{c.drafter} {c.mode.value} {c.median:.2f}" for c in own)
        say(f"batch {rows}: target {statistics.median(spent[rows]):.1f} ms; {drafts}")
    return cases, spent


def whole_rounds(target: HFTarget, options: argparse.Namespace, say: Progress) -> dict[tuple[int, str], float]:
    """Milliseconds of an engine's step with a drafter without head, every draft verified, by (batch, mode)."""
    found: dict[tuple[int, str], float] = {}
    checkpoint = shipped("none", target, range(0, target.vocab_size, target.vocab_size // PRUNED)[:PRUNED])
    for rows in options.batch:
        config = EngineConfig(drafter="dspark", drafter_config={"checkpoint": checkpoint}, scheduler="fixed",
                              max_slots=rows, max_len=options.context + ROUND_TOKENS + GAMMA)  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DSparkWarning)  # random weights predict nothing, and that is said
            engine = build_engine(config, target=target)
        for mode in options.modes:
            params = SamplingParams(temperature=0.0 if mode == "greedy" else 1.0, max_tokens=ROUND_TOKENS,
                                    seed=1 if mode == "coupled" else None, ignore_eos=True)  # fmt: skip
            for row in range(rows):
                engine.submit([100 + row + i for i in range(options.context)], params)
            steps: list[float] = []
            while engine.has_work:
                rounds = engine.stats.acceptance.rounds
                took = milliseconds(engine.step)
                # whole steps alone: while prompts are read, or after the first request ended, fewer rows draft
                steps += [took] if engine.stats.acceptance.rounds - rounds == rows else []
            found[rows, mode] = statistics.median(steps)
        engine.close()
        say(f"batch {rows}: a whole round {', '.join(f'{m} {found[rows, m]:.1f} ms' for m in options.modes)}")
    return found


def share_of_round(case: Case, plain: Case, target_ms: float) -> float:
    """What ``case`` costs beyond ``plain``, as a share of ``plain``'s round."""
    more = statistics.median(a - b for a, b in zip(case.ms, plain.ms, strict=True))
    return more / (plain.median + target_ms)


def report(
    cases: Sequence[Case],
    spent: dict[int, list[float]],
    rounds: dict[tuple[int, str], float],
    about: dict[str, Any],
    options: argparse.Namespace,
) -> tuple[dict[str, Any], str]:
    """The result for JSON, and its section of the results page."""
    target_ms = {rows: statistics.median(values) for rows, values in spent.items()}
    entries, lines = [], []
    for case in cases:
        plain = next((c for c in cases if (c.drafter, c.rows, c.mode) == ("none", case.rows, case.mode)), None)
        share = whole = None
        if plain is not None and plain is not case:
            share = share_of_round(case, plain, target_ms[case.rows])
            whole = share * (plain.median + target_ms[case.rows]) / rounds[case.rows, case.mode.value]
        entries.append(
            {"drafter": case.drafter, "batch": case.rows, "mode": case.mode.value, "ms": case.median,
             "least_ms": min(case.ms), "share_over_none": share, "share_of_whole": whole,
             "target_ms": target_ms[case.rows], "round_ms": rounds[case.rows, case.mode.value]}
        )  # fmt: skip
        words = ["" if x is None else f"{100 * x:+.2f} %" for x in (share, whole)]
        lines.append(
            [
                case.drafter,
                str(case.rows),
                case.mode.value,
                f"{case.median:.2f}",
                f"{target_ms[case.rows]:.1f}",
                f"{rounds[case.rows, case.mode.value]:.1f}",
                *words,
            ]
        )
    goals = ", ".join(f"at most {ms:g} ms at batch {rows}" for rows, ms in LIMITS_MS.items())
    text = [
        f"A draft of {GAMMA} with random weights of the shipped size, context {options.context}, bfloat16; medians of "
        f"{options.repeat} ({4 * options.repeat} at batch 1). Goals: {goals}; the Markov head at most "
        f"{100 * LIMIT_SHARE:g} % of a round over no head at batch 32.",
        "",
        describe(about),
        "",
        table(
            [
                "drafter",
                "batch",
                "mode",
                "draft, ms",
                "target, ms",
                "whole round, ms",
                "over no head, of draft and target",
                "of a whole round",
            ],
            lines,
        ),
    ]
    result = {"machine": about, "target": TARGET, "gamma": GAMMA, "context": options.context, "pack": options.pack,
              "cases": entries}  # fmt: skip
    return result, "\n".join(text)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.draft", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--batch", default="1,32", help="batch sizes, separated by commas")
    parser.add_argument("--context", type=int, default=200, help="cached tokens of each request")
    parser.add_argument("--repeat", type=int, default=15, help="repetitions; four times as many at batch 1")
    parser.add_argument("--modes", default="greedy,rejection,coupled", help="separated by commas")
    parser.add_argument("--drafters", default=";".join(DRAFTERS), help="separated by semicolons")
    parser.add_argument("--no-pack", dest="pack", action="store_false", help="without weights in oneDNN's layout")
    parser.add_argument("--no-write", action="store_true", help="leave results/ and the results page alone")
    options = parser.parse_args(arguments)
    options.batch = [int(n) for n in options.batch.split(",")]
    options.modes, options.drafters = options.modes.split(","), options.drafters.split(";")
    return options


def main(arguments: Iterable[str] | None = None) -> int:
    """Measure and print; it states figures and judges nothing."""
    options = parse(None if arguments is None else list(arguments))
    prepare()
    about, say = machine(), Progress()
    target = HFTarget.from_pretrained(TARGET, dtype="bfloat16", device="cpu")
    say(describe(about))
    cases, spent = measure(target, options, say)
    rounds = whole_rounds(target, options, say)
    result, text = report(cases, spent, rounds, about, options)
    print(f"\n{text}\n")
    if not options.no_write:
        print(f"written: {write_json('draft', result)}")
        write_section("draft", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
