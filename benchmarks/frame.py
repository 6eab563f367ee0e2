"""Speed of the frame: ``python -m benchmarks.frame``.

Plain decoding (drafter ``none``) against transformers' ``generate`` on the same weights in bfloat16, in one process
with the same threads and allocator: greedy, EOS ignored, the same number of new tokens for every request. transformers
runs batched with left padding, its default attention and its cache; the engine runs as users run it, text included.
Repetitions of all cases are interleaved, and who goes first alternates. Speeds are new tokens a second, prompts
included, medians over the repetitions.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks._common import Progress, describe, machine, prepare, table, write_json, write_section
from benchmarks.prompts import TextPrompt, chats_of_length, encode_chats
from dspark.config import EngineConfig, SamplingParams
from dspark.engine.build import build_engine
from dspark.engine.engine import Engine
from dspark.engine.stats import EngineStats
from dspark.errors import DSparkWarning
from dspark.targets.hf import HFTarget
from dspark.targets.load import load_model

TARGET = "smollm2"
FORWARDS = ("draft", "target")

COPYING = [
    "Repeat the following list of cities exactly three times: Lisbon, Oslo, Vienna, Nairobi, Lima, Hanoi, Toronto.",
    "Write the numbers from one to twenty in words, one a line, and then write the same list again.",
    "Copy this function and add a comment above each line:\n\n```python\ndef total(prices, tax):\n    result = 0\n"
    "    for price in prices:\n        result = result + price\n    return result * (1 + tax)\n```",
    "Sing the first two verses of a song about ten green bottles hanging on a wall.",
]


@dataclass(slots=True)
class Case:
    """One workload and what was measured of it, a figure a repetition."""

    name: str
    prompts: list[list[int]]
    theirs: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)
    stats: list[EngineStats] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Median speed over transformers' median speed."""
        return statistics.median(self.ours) / statistics.median(self.theirs)

    @property
    def overhead(self) -> float:
        """Median share of a step that is not a model's forward."""
        return statistics.median(s.overhead for s in self.stats)

    def phases(self) -> dict[str, float]:
        """Milliseconds a step of each phase, over all repetitions; ``rest`` is what no phase claims."""
        steps = sum(s.steps for s in self.stats)
        names = [name for name in self.stats[0].phase_seconds if name != "step"]
        spent = {name: sum(s.phase_seconds[name] for s in self.stats) for name in names}
        spent["rest"] = sum(s.phase_seconds["step"] for s in self.stats) - sum(spent.values())
        return {name: 1000 * seconds / steps for name, seconds in spent.items()}

    def as_dict(self) -> dict[str, Any]:
        return {
            "case": self.name,
            "prompt_tokens": [len(p) for p in self.prompts],
            "transformers_tokens_per_second": self.theirs,
            "dspark_tokens_per_second": self.ours,
            "ratio": self.ratio,
            "overhead": [s.overhead for s in self.stats],
            "phase_ms_per_step": self.phases(),
            "steps": [s.steps for s in self.stats],
        }


class Generate:
    """transformers' ``generate``, batched.

    Args:
        model: as loaded; its generation config loses EOS, so that every row is as long.
        pad: id on the left of shorter prompts.
    """

    def __init__(self, model: Any, pad: int) -> None:
        self.model, self.pad = model, pad
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = pad

    @torch.no_grad()
    def __call__(self, prompts: Sequence[Sequence[int]], tokens: int) -> int:
        """New tokens of all rows."""
        width = max(len(p) for p in prompts)
        ids = torch.tensor([[self.pad] * (width - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        out = self.model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, use_cache=True)
        return int(out.shape[0] * (out.shape[1] - width))


def decode(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int) -> int:
    """New tokens of all requests."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    for prompt in prompts:
        engine.submit(prompt, params)
    return sum(len(chunk.ids) for chunk in engine.run())


def speed(run: Callable[[], int], expected: int) -> float:
    """Tokens a second.

    Raises:
        RuntimeError: if it made another number of tokens than it should.
    """
    began = time.perf_counter()
    made = run()
    seconds = time.perf_counter() - began
    if made != expected:
        raise RuntimeError(f"{made} tokens were made, {expected} were asked")
    return made / seconds


def measure(
    cases: Sequence[Case], theirs: Generate, engine: Engine, options: argparse.Namespace, say: Progress
) -> None:
    """All repetitions of all cases, after one that is thrown away."""
    for case in cases:
        theirs(case.prompts, 2)
        decode(engine, case.prompts, 2)
    for repetition in range(options.repeat):
        for case in cases:
            expected = len(case.prompts) * options.tokens

            def reference(case: Case = case, expected: int = expected) -> None:
                case.theirs.append(speed(lambda: theirs(case.prompts, options.tokens), expected))

            def own(case: Case = case, expected: int = expected) -> None:
                engine.stats = EngineStats()
                case.ours.append(speed(lambda: decode(engine, case.prompts, options.tokens), expected))
                case.stats.append(engine.stats)

            for run in (reference, own) if repetition % 2 == 0 else (own, reference):
                run()
            say(f"{case.name}: transformers {case.theirs[-1]:.1f}, dspark {case.ours[-1]:.1f} tokens/s")


def measure_ngram(target: HFTarget, prompts: list[list[int]], options: argparse.Namespace, say: Progress) -> Any:
    """Plain and ``ngram`` on text that repeats itself, one request at a time; for information."""
    speeds: dict[str, list[float]] = {"none": [], "ngram": []}
    lengths: list[float] = []
    for _ in range(options.repeat):
        for drafter in speeds:
            longest = max(map(len, prompts)) + options.tokens
            config = EngineConfig(drafter=drafter, scheduler="fixed", max_slots=1, max_len=longest)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DSparkWarning)
                engine = build_engine(config, target=target)
                made = speed(lambda e=engine: decode(e, prompts, options.tokens), len(prompts) * options.tokens)  # type: ignore[misc]
                engine.close()
            speeds[drafter].append(made)
            if drafter == "ngram":
                lengths.append(engine.stats.acceptance.accepted_length)
        say(f"copying text: none {speeds['none'][-1]:.1f}, ngram {speeds['ngram'][-1]:.1f} tokens/s")
    ratio = statistics.median(speeds["ngram"]) / statistics.median(speeds["none"])
    return {"tokens_per_second": speeds, "ratio": ratio, "accepted_length": statistics.median(lengths)}


def make_cases(options: argparse.Namespace, tokenizer: Any) -> list[Case]:
    """Equal short prompts at each batch size, and a mix of short and long ones in the largest."""
    largest = max(options.batch)
    short = chats_of_length(options.short, largest, tokenizer)
    long = chats_of_length(options.long, largest, tokenizer)
    cases = [Case(f"batch {size}, prompts of {options.short}", short[:size]) for size in options.batch]
    mixed = [short[i] if i % 2 == 0 else long[i] for i in range(largest)]
    return [*cases, Case(f"batch {largest}, prompts of {options.short} and {options.long}", mixed)]


def report(
    cases: Sequence[Case], ngram: Any, about: dict[str, Any], options: argparse.Namespace
) -> tuple[dict[str, Any], str]:
    """The result for JSON, and its section of the results page."""
    result = {
        "machine": about,
        "target": TARGET,
        "dtype": options.dtype,
        "new_tokens": options.tokens,
        "repetitions": options.repeat,
        "cases": [case.as_dict() for case in cases],
        "ngram": ngram,
    }
    speeds = [
        [
            case.name,
            f"{statistics.median(case.theirs):.1f}",
            f"{statistics.median(case.ours):.1f}",
            f"{case.ratio:.2f}x",
            f"{100 * case.overhead:.1f} %",
        ]
        for case in cases
    ]
    names = list(cases[0].phases())
    phases = [[case.name, *(f"{case.phases().get(name, 0.0):.2f}" for name in names)] for case in cases]
    text = [
        f"Greedy, {options.dtype}, {options.tokens} new tokens a request, no drafts; new tokens a second, prompts "
        f"included; medians of {options.repeat}. Overhead is the share of a step that is not the target's forward.",
        "",
        describe(about),
        "",
        table(["case", "transformers", "dspark", "ratio", "overhead"], speeds),
        "",
        "Milliseconds a step:",
        "",
        table(["case", *names], phases),
    ]
    if ngram:
        text += [
            "",
            f"For information: on {len(COPYING)} prompts whose answers repeat themselves, one at a time, drafter "
            f"`ngram` with schedule `fixed` decodes {ngram['ratio']:.2f} times as fast as `none`, at an accepted "
            f"length of {ngram['accepted_length']:.2f}.",
        ]
    return result, "\n".join(text)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.frame", description=__doc__.split("\n\n")[0])
    parser.add_argument("--batch", default="1,8,32", help="batch sizes, separated by commas")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens a request")
    parser.add_argument("--short", type=int, default=40, help="tokens of a short prompt")
    parser.add_argument("--long", type=int, default=400, help="tokens of a long prompt")
    parser.add_argument("--repeat", type=int, default=5, help="repetitions")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--no-ngram", action="store_true", help="leave the part with drafts out")
    parser.add_argument("--no-write", action="store_true", help="leave results/ and the results page alone")
    options = parser.parse_args(arguments)
    options.batch = [int(n) for n in options.batch.split(",")]
    return options


def main(arguments: Iterable[str] | None = None) -> int:
    """Measure and print; it states figures and judges nothing."""
    options = parse(None if arguments is None else list(arguments))
    prepare()
    about, say = machine(), Progress()
    model, tokenizer = load_model(TARGET, dtype=options.dtype, device="cpu")
    target = HFTarget.from_pretrained(TARGET, dtype=options.dtype, device="cpu")
    say(describe(about))
    cases = make_cases(options, tokenizer)
    longest = max(len(p) for case in cases for p in case.prompts) + options.tokens
    engine = build_engine(EngineConfig(max_slots=max(options.batch), max_len=longest), target=target)
    measure(cases, Generate(model, tokenizer.pad_token_id or 0), engine, options, say)
    engine.close()
    chats = encode_chats([TextPrompt("", text) for text in COPYING], tokenizer)
    ngram = None if options.no_ngram else measure_ngram(target, chats, options, say)
    result, text = report(cases, ngram, about, options)
    print(f"\n{text}\n")
    if not options.no_write:
        print(f"written: {write_json('frame', result)}")
        write_section("frame", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
