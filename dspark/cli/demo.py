"""``dspark demo``: real prompts, decoded plainly and speculatively, with the difference measured and checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark.cli import _options as opt

if TYPE_CHECKING:
    from rich.console import Console

    from dspark.api import Generation, SpeculativeDecoder
    from dspark.cli._compare import Comparison, Judge
    from dspark.config import SamplingParams

SAMPLED_TOKENS = 32
"""Tokens of each output in the check of seeded sampling."""
VERDICTS = {"identical": "same", "tie": "tie", "different": "DIFFERS"}
"""In the table."""
TEMPERATURE = 0.8
SEED = 2026


@dataclass(slots=True)
class Run:
    """One prompt and its two greedy outputs. Seconds are those of engine steps, 0 where prompts shared them."""

    title: str
    prompt: list[int]
    plain: Any = None
    fast: Any = None
    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])
    greedy: Any = None
    sampled: Any = None


def demo(
    target: opt.TargetOption = opt.TARGET,
    revision: opt.RevisionOption = None,
    dtype: Annotated[
        str | None, typer.Option(help="auto, float32, bfloat16, ...; bfloat16 by default for smollm2, else auto.")
    ] = None,
    device: opt.DeviceOption = "auto",
    drafter: opt.DrafterOption = "ngram",
    scheduler: opt.SchedulerOption = None,
    estimator: opt.EstimatorOption = None,
    gamma: opt.GammaOption = None,
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens of each output.")] = 96,
    batch: Annotated[bool, typer.Option("--batch/--one-by-one", help="Decode all prompts together.")] = False,
    cost: opt.CostOption = "auto",
    settings: opt.SetOption = None,
) -> None:
    """Decode real prompts plainly and speculatively, and compare.

    Ends with exit code 1 where the outputs differ by more than rounding explains.
    """
    from dspark.cli._compare import Judge
    from dspark.cli._demo_prompts import PROMPTS, encoded_prompts
    from dspark.cli._render import console_for

    console = console_for()
    chosen = dtype or ("bfloat16" if target == opt.TARGET else "auto")
    options = opt.DecoderOptions(
        target, revision, chosen, device, drafter, scheduler, estimator, gamma, None, cost, settings or ()
    )
    with console.status("loading the target and measuring what its forwards cost"):
        fast = opt.build_decoder(options, defaults={"max_slots": len(PROMPTS)})
        plain = opt.plain_twin(fast)
        runs = [Run(title, ids) for title, ids in encoded_prompts(fast, tokens)]
        warm_up(runs, plain, fast)
    introduce(console, fast, runs, batch)
    stats = decode_greedily(console, runs, plain, fast, tokens, batch)
    with console.status("checking"):
        judge = Judge(fast.engine)
        for run in runs:
            run.greedy = judge.compare(run.prompt, run.plain.ids, run.fast.ids)
        check_sampling(runs, plain, fast, min(tokens, SAMPLED_TOKENS), judge)
    report(console, runs, stats, batch)
    if not conclude(console, runs, judge, fast.tokenizer):
        raise typer.Exit(1)


def warm_up(runs: Sequence[Run], *decoders: SpeculativeDecoder) -> None:
    """A few tokens, so that first-time costs are nobody's."""
    for decoder in decoders:
        decoder.generate(runs[0].prompt, max_tokens=4)
        decoder.reset_stats()


def introduce(console: Console, fast: SpeculativeDecoder, runs: Sequence[Run], batch: bool) -> None:
    """What is about to run, in two lines."""
    from dspark.cli._render import ACCEPTED

    parts = fast.engine.parts
    dtype = str(parts.target.dtype).removeprefix("torch.")
    together = "together" if batch else "one by one"
    console.print(
        f"target {parts.target.name}, {dtype} on {parts.target.device}; drafter {parts.name('drafter')} with gamma "
        f"{parts.gamma}; scheduler {parts.name('scheduler')}; {len(runs)} prompts {together}",
        markup=False,
    )
    if console.is_terminal:
        console.print(f"[{ACCEPTED}]green[/]: tokens that came from accepted drafts")
    console.print()


def decode_greedily(
    console: Console,
    runs: Sequence[Run],
    plain: SpeculativeDecoder,
    fast: SpeculativeDecoder,
    tokens: int,
    batch: bool,
) -> list[Any]:
    """Run everything in both decoders; returns their engines' statistics, the plain one's first.

    Turn by turn, prompt by prompt, so that a machine that gets busier is unfair to neither.
    """
    from dspark.cli._render import View
    from dspark.config import SamplingParams

    params = SamplingParams(max_tokens=tokens)
    for group in [list(runs)] if batch else [[run] for run in runs]:
        with View(console, [run.title for run in group], fast.tokenizer) as view:
            for lane, decoder in enumerate((plain, fast)):
                before = decoder.stats.phase_seconds["step"]
                results = decode(decoder, group, params, lambda i, chunk, lane=lane: view.feed(i, lane, chunk))
                seconds = decoder.stats.phase_seconds["step"] - before
                for i, (run, result) in enumerate(zip(group, results, strict=True)):
                    if lane == 0:
                        run.plain = result
                    else:
                        run.fast = result
                    if not batch:
                        run.seconds[lane] = seconds
                        view.note(i, lane, f"{len(result.ids) / seconds:.1f} tokens/s")
    return [plain.reset_stats(), fast.reset_stats()]


def decode(
    decoder: SpeculativeDecoder, runs: Sequence[Run], params: SamplingParams, on_chunk: Any = None
) -> Sequence[Generation]:
    """Decode prompts together.

    Raises:
        DSparkError: what ended one of them.
    """
    from dspark.cli._control import finished

    return finished(decoder.generate([run.prompt for run in runs], params, on_chunk=on_chunk))


def check_sampling(
    runs: Sequence[Run], plain: SpeculativeDecoder, fast: SpeculativeDecoder, tokens: int, judge: Judge
) -> None:
    """Sample with a seed (``coupled``), all prompts together: with and without drafts, the tokens must be the same."""
    from dspark.cli._compare import Rule
    from dspark.config import SamplingParams

    params = SamplingParams(max_tokens=tokens, temperature=TEMPERATURE, seed=SEED)
    left, right = (decode(decoder, runs, params) for decoder in (plain, fast))
    rule = Rule(TEMPERATURE, SEED)
    for run, a, b in zip(runs, left, right, strict=True):
        run.sampled = (judge.compare(run.prompt, a.ids, b.ids, rule), len(b.ids))


def report(console: Console, runs: Sequence[Run], stats: Sequence[Any], batch: bool) -> None:
    """The table: a line a prompt, and the whole."""
    from dspark.cli._render import table_for

    table = table_for(
        console, "prompt", "tokens", "plain\ntokens/s", "spec.\ntokens/s", "speed-up", "accepted\nlength",
        "verify\nbudget", "greedy", "seeded",
    )  # fmt: skip
    for run in runs:
        acceptance = run.fast.stats.acceptance
        speeds = ["-"] * 3 if batch else speed_cells(len(run.plain.ids), len(run.fast.ids), *run.seconds)
        budget = sum(acceptance.offered) / max(1, acceptance.rounds)
        table.add_row(
            run.title, str(len(run.fast.ids)), *speeds, f"{acceptance.accepted_length:.2f}", f"{budget:.2f}",
            VERDICTS[run.greedy.verdict], VERDICTS[run.sampled[0].verdict],
        )  # fmt: skip
    table.add_section()
    counts = [s.acceptance.committed for s in stats]
    seconds = [s.phase_seconds["step"] for s in stats]
    table.add_row(
        "all", str(counts[1]), *speed_cells(*counts, *seconds), f"{stats[1].acceptance.accepted_length:.2f}",
        f"{stats[1].verify_budget:.2f}", "", "", style="bold",
    )  # fmt: skip
    console.print(table)
    reasons = [*stats[1].states, *stats[1].faults]
    if reasons:
        console.print(f"states: {', '.join(reasons)}", markup=False)


def speed_cells(plain_tokens: int, fast_tokens: int, plain_seconds: float, fast_seconds: float) -> list[str]:
    """Tokens per second of both, and their ratio."""
    plain, fast = plain_tokens / max(plain_seconds, 1e-9), fast_tokens / max(fast_seconds, 1e-9)
    return [f"{plain:.1f}", f"{fast:.1f}", f"{fast / max(plain, 1e-9):.2f}x"]


def conclude(console: Console, runs: Sequence[Run], judge: Judge, tokenizer: Any = None) -> bool:
    """Print what differs and the verdict; True where all is lossless."""
    from dspark.cli._compare import summarise
    from dspark.cli._render import verdict_text

    greedy: list[Comparison] = [run.greedy for run in runs]
    sampled: list[Comparison] = [run.sampled[0] for run in runs]
    for kind, found in (("greedy", greedy), ("seeded", sampled)):
        for run, one in zip(runs, found, strict=True):
            if one.position is not None:
                console.print(f"  {kind}, {run.title}: {one.in_words(tokenizer)}", markup=False)
    ok = all(c.ok for c in (*greedy, *sampled))
    identical = all(c.verdict == "identical" for c in (*greedy, *sampled))
    word = "yes" if identical else f"yes, up to rounding in {judge.dtype}" if ok else "FAILED"
    console.print(verdict_text("lossless", word, ok))
    console.print(f"  greedy: {summarise(greedy, sum(len(run.fast.ids) for run in runs))}", markup=False)
    drawn = sum(run.sampled[1] for run in runs)
    console.print(
        f"  seeded: {summarise(sampled, drawn)} (temperature {TEMPERATURE}, seed {SEED}, verifier coupled)",
        markup=False,
    )
    return ok
