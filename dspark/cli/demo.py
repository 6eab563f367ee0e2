"""``dspark demo``: real prompts, decoded plainly and speculatively, with the difference measured and checked."""

from __future__ import annotations

import dataclasses
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
class Output:
    """One output of a prompt. Seconds are those of its engine's steps, 0 where prompts shared them."""

    generation: Any
    seconds: float = 0.0
    greedy: Any = None
    sampled: Any = None
    sampled_tokens: int = 0


@dataclass(slots=True)
class Run:
    """One prompt and its outputs by lane; lane 0 is plain."""

    title: str
    prompt: list[int]
    outputs: list[Output] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Lane:
    """A way to decode, and what it is called."""

    name: str
    decoder: SpeculativeDecoder


def demo(
    target: opt.TargetOption = opt.TARGET,
    revision: opt.RevisionOption = None,
    dtype: Annotated[
        str | None, typer.Option(help="auto, float32, bfloat16, ...; bfloat16 by default for smollm2, else auto.")
    ] = None,
    device: opt.DeviceOption = "auto",
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            "--drafter",
            "-d",
            help="A registered drafter, a checkpoint's folder or hub id, or auto. May be repeated. By default ngram, "
            "and the target's own drafter where a preset names one.",
        ),
    ] = None,
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
    from dspark.cli._demo_prompts import encoded_prompts
    from dspark.cli._render import console_for

    console = console_for()
    chosen = dtype or ("bfloat16" if target == opt.TARGET else "auto")
    options = opt.DecoderOptions(
        target, revision, chosen, device, (drafter or ["ngram"])[0], scheduler, estimator, gamma, None, cost,
        settings or (),
    )  # fmt: skip
    with console.status("loading the target and measuring what its forwards cost"):
        lanes = build_lanes(options, drafter)
        first = lanes[1].decoder
        runs = [Run(title, ids) for title, ids in encoded_prompts(first, tokens)]
        warm_up(runs, lanes)
    introduce(console, lanes, runs, batch)
    stats = decode_greedily(console, runs, lanes, tokens, batch)
    with console.status("checking"):
        judge = Judge(first.engine)
        for run in runs:
            for output in run.outputs[1:]:
                output.greedy = judge.compare(run.prompt, run.outputs[0].generation.ids, output.generation.ids)
        check_sampling(runs, lanes, min(tokens, SAMPLED_TOKENS), judge)
    report(console, runs, lanes, stats, batch)
    if not conclude(console, runs, lanes, judge, first.tokenizer):
        raise typer.Exit(1)


def build_lanes(options: opt.DecoderOptions, drafters: Sequence[str] | None) -> list[Lane]:
    """Plain decoding and one lane a drafter, all on one target; ``drafters`` None takes ngram and the target's own."""
    from dspark.cli._demo_prompts import PROMPTS
    from dspark.engine.choices import find_preset
    from dspark.plugins import load_plugins

    defaults = {"max_slots": len(PROMPTS)}
    first = opt.build_decoder(options, defaults=defaults)
    if drafters is None:
        found = find_preset(load_plugins(first.engine.config).catalog, first.engine.parts.target)
        drafters = [options.drafter] if found is None else [options.drafter, "auto"]
    lanes = [Lane("plain", opt.plain_twin(first)), Lane(first.engine.parts.name("drafter"), first)]
    for name in drafters[1:]:
        decoder = opt.build_decoder(dataclasses.replace(options, drafter=name), defaults=defaults, like=first)
        lanes.append(Lane(decoder.engine.parts.name("drafter"), decoder))
    return lanes


def warm_up(runs: Sequence[Run], lanes: Sequence[Lane]) -> None:
    """A few tokens, so that first-time costs are nobody's."""
    for lane in lanes:
        lane.decoder.generate(runs[0].prompt, max_tokens=4)
        lane.decoder.reset_stats()


def introduce(console: Console, lanes: Sequence[Lane], runs: Sequence[Run], batch: bool) -> None:
    """What is about to run, in two lines."""
    from dspark.cli._render import ACCEPTED

    target = lanes[0].decoder.engine.parts.target
    dtype = str(target.dtype).removeprefix("torch.")
    together = "together" if batch else "one by one"
    each = "; ".join(
        f"{lane.name} with gamma {parts.gamma}, scheduler {parts.name('scheduler')}"
        for lane in lanes[1:]
        for parts in [lane.decoder.engine.parts]
    )
    console.print(
        f"target {target.name}, {dtype} on {target.device}; drafters: {each}; {len(runs)} prompts {together}",
        markup=False,
    )
    if console.is_terminal:
        console.print(f"[{ACCEPTED}]green[/]: tokens that came from accepted drafts")
    console.print()


def decode_greedily(
    console: Console, runs: Sequence[Run], lanes: Sequence[Lane], tokens: int, batch: bool
) -> list[Any]:
    """Run everything in every lane; returns their engines' statistics.

    Turn by turn, prompt by prompt, so that a machine that gets busier is unfair to none.
    """
    from dspark.cli._render import View
    from dspark.config import SamplingParams

    params = SamplingParams(max_tokens=tokens)
    names, tokenizer = [lane.name for lane in lanes], lanes[0].decoder.tokenizer
    for group in [list(runs)] if batch else [[run] for run in runs]:
        with View(console, [run.title for run in group], names, tokenizer) as view:
            for n, lane in enumerate(lanes):
                decoder = lane.decoder
                before = decoder.stats.phase_seconds["step"]
                results = decode(decoder, group, params, lambda i, chunk, n=n: view.feed(i, n, chunk))
                seconds = decoder.stats.phase_seconds["step"] - before
                for i, (run, result) in enumerate(zip(group, results, strict=True)):
                    run.outputs.append(Output(result, 0.0 if batch else seconds))
                    if not batch:
                        view.note(i, n, f"{len(result.ids) / seconds:.1f} tokens/s")
    return [lane.decoder.reset_stats() for lane in lanes]


def decode(
    decoder: SpeculativeDecoder, runs: Sequence[Run], params: SamplingParams, on_chunk: Any = None
) -> Sequence[Generation]:
    """Decode prompts together.

    Raises:
        DSparkError: what ended one of them.
    """
    from dspark.cli._control import finished

    return finished(decoder.generate([run.prompt for run in runs], params, on_chunk=on_chunk))


def check_sampling(runs: Sequence[Run], lanes: Sequence[Lane], tokens: int, judge: Judge) -> None:
    """Sample with a seed (``coupled``), all prompts together: with and without drafts, the tokens must be the same."""
    from dspark.cli._compare import Rule
    from dspark.config import SamplingParams

    params = SamplingParams(max_tokens=tokens, temperature=TEMPERATURE, seed=SEED)
    plain, *others = (decode(lane.decoder, runs, params) for lane in lanes)
    rule = Rule(TEMPERATURE, SEED)
    for n, results in enumerate(others, start=1):
        for run, a, b in zip(runs, plain, results, strict=True):
            output = run.outputs[n]
            output.sampled, output.sampled_tokens = judge.compare(run.prompt, a.ids, b.ids, rule), len(b.ids)


def report(console: Console, runs: Sequence[Run], lanes: Sequence[Lane], stats: Sequence[Any], batch: bool) -> None:
    """The table: for each drafter a line a prompt, and the whole."""
    from dspark.cli._render import table_for

    table = table_for(
        console, "prompt", "tokens", "plain\ntokens/s", "spec.\ntokens/s", "speed-up", "accepted\nlength",
        "verify\nbudget", "greedy", "seeded",
    )  # fmt: skip
    plain = stats[0]
    for n, lane in enumerate(lanes[1:], start=1):
        if len(lanes) > 2:
            table.add_row(f"{lane.name}:", *[""] * 8, style="bold")
        for run in runs:
            add_prompt(table, run, n, batch)
        mine = stats[n]
        whole = (plain.acceptance.committed, mine.acceptance.committed)
        seconds = (plain.phase_seconds["step"], mine.phase_seconds["step"])
        table.add_row(
            "all", str(whole[1]), *speed_cells(*whole, *seconds), f"{mine.acceptance.accepted_length:.2f}",
            f"{mine.verify_budget:.2f}", "", "", style="bold",
        )  # fmt: skip
        table.add_section()
    console.print(table)
    for lane, mine in zip(lanes[1:], stats[1:], strict=True):
        reasons = [*mine.states, *mine.faults]
        if reasons:
            console.print(f"states of {lane.name}: {', '.join(reasons)}", markup=False)


def add_prompt(table: Any, run: Run, lane: int, batch: bool) -> None:
    """One prompt's line in a lane's part of the table."""
    slow, fast = run.outputs[0], run.outputs[lane]
    acceptance = fast.generation.stats.acceptance
    counts = (len(slow.generation.ids), len(fast.generation.ids))
    speeds = ["-"] * 3 if batch else speed_cells(*counts, slow.seconds, fast.seconds)
    budget = sum(acceptance.offered) / max(1, acceptance.rounds)
    table.add_row(
        run.title, str(counts[1]), *speeds, f"{acceptance.accepted_length:.2f}", f"{budget:.2f}",
        VERDICTS[fast.greedy.verdict], VERDICTS[fast.sampled.verdict],
    )  # fmt: skip


def speed_cells(plain_tokens: int, fast_tokens: int, plain_seconds: float, fast_seconds: float) -> list[str]:
    """Tokens per second of both, and their ratio."""
    plain, fast = plain_tokens / max(plain_seconds, 1e-9), fast_tokens / max(fast_seconds, 1e-9)
    return [f"{plain:.1f}", f"{fast:.1f}", f"{fast / max(plain, 1e-9):.2f}x"]


def conclude(console: Console, runs: Sequence[Run], lanes: Sequence[Lane], judge: Judge, tokenizer: Any = None) -> bool:
    """Print what differs and the verdict; True where all is lossless."""
    from dspark.cli._compare import summarise
    from dspark.cli._render import verdict_text

    outputs = [(run, lane.name, out) for run in runs for lane, out in zip(lanes[1:], run.outputs[1:], strict=True)]
    greedy: list[Comparison] = [out.greedy for _, _, out in outputs]
    sampled: list[Comparison] = [out.sampled for _, _, out in outputs]
    for kind, found in (("greedy", greedy), ("seeded", sampled)):
        for (run, name, _), one in zip(outputs, found, strict=True):
            if one.position is not None:
                where = run.title if len(lanes) == 2 else f"{run.title}, {name}"
                console.print(f"  {kind}, {where}: {one.in_words(tokenizer)}", markup=False)
    ok = all(c.ok for c in (*greedy, *sampled))
    identical = all(c.verdict == "identical" for c in (*greedy, *sampled))
    word = "yes" if identical else f"yes, up to rounding in {judge.dtype}" if ok else "FAILED"
    console.print(verdict_text("lossless", word, ok))
    decoded = sum(len(out.generation.ids) for _, _, out in outputs)
    console.print(f"  greedy: {summarise(greedy, decoded)}", markup=False)
    drawn = sum(out.sampled_tokens for _, _, out in outputs)
    console.print(
        f"  seeded: {summarise(sampled, drawn)} (temperature {TEMPERATURE}, seed {SEED}, verifier coupled)",
        markup=False,
    )
    return ok
