"""The real model against transformers: what ``benchmarks.verify`` and the tests of the real model run."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks import recall
from benchmarks._common import Progress
from benchmarks.margins import Finding, Reference, decided, margin
from benchmarks.prompts import TextPrompt, encode_chats
from dspark._sched import CostTable
from dspark.config import EngineConfig, SamplingParams
from dspark.engine.build import build_engine
from dspark.engine.engine import Engine
from dspark.errors import DSparkWarning
from dspark.targets.hf import HFTarget
from dspark.targets.load import load_model

TARGET = "smollm2"
SCHEDULES: dict[str, dict[str, Any]] = {
    "off": {},
    "fixed": {},
    "threshold": {"threshold": 0.5},
    "causal": {},
    "lagged": {},
    "lookahead": {},
    "global": {},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "T=1": {"temperature": 1.0},
    "filtered": {"temperature": 0.7, "top_k": 50, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.1},
}
NEIGHBOURS = 6  # unseeded and greedy requests among the seeded ones


def jagged() -> CostTable:
    """A made-up staircase with cheap and dear steps, on which the schedulers part ways."""
    steps = [(1, 10), (2, 10.2), (3, 14), (6, 14.4), (8, 15), (12, 22), (16, 22.5), (24, 23), (32, 40), (48, 41)]
    steps += [(64, 43), (96, 70), (128, 72), (192, 110), (256, 115), (2048, 900)]
    return CostTable([(tokens, ms / 1000) for tokens, ms in steps], mode="staircase", glue=0.001)


@dataclass(frozen=True, slots=True)
class Job:
    """One request and what it must give; ``expected`` None is a neighbour whose output is not a function of it."""

    source: str
    prompt: list[int]
    params: SamplingParams
    expected: list[int] | None = None


@dataclass(slots=True)
class Block:
    """One engine, many requests."""

    name: str
    outputs: int = 0
    tokens: int = 0
    identical: int = 0
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0
    accepted_length: float = 0.0
    verified: int = 0
    accepted: int = 0

    @property
    def faults(self) -> int:
        return sum(not f.rounding for f in self.findings)

    @property
    def rounding(self) -> int:
        return sum(f.rounding for f in self.findings)

    def as_dict(self) -> dict[str, Any]:
        names = ("name", "outputs", "tokens", "identical", "rounding", "faults", "accepted_length", "verified")
        own = {name: getattr(self, name) for name in names}
        return {**own, "accepted": self.accepted, "seconds": round(self.seconds, 1)}

    def __str__(self) -> str:
        text = f"{self.name}: {self.identical} of {self.outputs} identical, {self.tokens} tokens"
        if self.findings:
            text += f", {self.rounding} by rounding, {self.faults} FAULTS"
        text += f"; drafts verified {self.verified}, accepted {self.accepted}; {self.seconds:.1f} s"
        return "\n".join([text, *(f"    {_in_words(f)}" for f in self.findings)])


def _in_words(f: Finding) -> str:
    kind = "rounding" if f.rounding else "FAULT"
    return f"{kind}: {f.prompt} token {f.position}: {f.expected} or {f.got}, margin {f.margin:.2e}, after {f.after:.2e}"


def decode(engine: Engine, jobs: Sequence[Job]) -> list[list[int]]:
    """Outputs of all jobs; as many run at once as the engine has slots, the rest join as others leave."""
    names = {engine.submit(job.prompt, job.params): i for i, job in enumerate(jobs)}
    outputs: list[list[int]] = [[] for _ in jobs]
    for chunk in engine.run():
        if chunk.error is not None:
            raise chunk.error
        outputs[names[chunk.request_id]] += chunk.ids
    return outputs


class Check:
    """The models and the results so far.

    Args:
        target: alias, hub id or folder; loaded twice, once for transformers alone.
    """

    def __init__(self, target: str = TARGET) -> None:
        self.progress = Progress()
        model, self.tokenizer = load_model(target, dtype="float32", device="cpu")
        self.reference = Reference(model)
        self.target = HFTarget.from_pretrained(target, dtype="float32", device="cpu")
        self.blocks: list[Block] = []
        self._generated: dict[tuple[int, ...], tuple[int, list[int]]] = {}
        self.attention = model.config._attn_implementation
        self.progress(f"{target} loaded twice in float32; transformers' attention: {self.attention}")

    def run(
        self,
        name: str,
        jobs: Sequence[Job],
        concurrency: int,
        drafter: str,
        scheduler: str = "fixed",
        drafter_config: Mapping[str, Any] | None = None,
    ) -> Block:
        """Decode jobs with one engine and compare each with what it must give."""
        longest = max(len(job.prompt) + job.params.max_tokens for job in jobs)
        answers = {(job.params.seed, tuple(job.prompt)): job.expected for job in jobs if job.expected is not None}
        config = EngineConfig(
            drafter=drafter,
            drafter_config={"answers": answers} if drafter == "recall" else dict(drafter_config or {}),
            scheduler=scheduler,
            scheduler_config=SCHEDULES[scheduler],
            max_slots=concurrency,
            max_len=longest,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DSparkWarning)  # such as: nothing accepted, at T = 1
            engine = build_engine(config, target=self.target, cost=jagged(), extra_plugins={"recall": recall})
            began = time.perf_counter()
            outputs = decode(engine, jobs)
            seconds = time.perf_counter() - began
            engine.close()
        accepted = engine.stats.acceptance
        block = Block(name, seconds=seconds, accepted_length=accepted.accepted_length, verified=engine.stats.verified)
        block.accepted = sum(accepted.accepted)
        for job, got in zip(jobs, outputs, strict=True):
            if job.expected is not None:
                self._judge(block, job, job.expected, got)
        self._add(block)
        return block

    def _judge(self, block: Block, job: Job, expected: list[int], got: list[int]) -> None:
        block.outputs += 1
        block.tokens += len(got)
        found = self.reference.compare(job.prompt, expected, got, job.params, where=block.name, source=job.source)
        if found is None:
            block.identical += 1
        else:
            block.findings.append(found)

    def _add(self, block: Block) -> None:
        self.blocks.append(block)
        self.progress(str(block))
        gc.collect()

    # greedy -------------------------------------------------------------------------------------------------------

    def greedy_jobs(self, prompts: Sequence[TextPrompt], tokens: int) -> list[Job]:
        """Greedy jobs; what they must give is left open, see :meth:`answered`."""
        params = SamplingParams(max_tokens=tokens)
        encoded = zip(prompts, encode_chats(prompts, self.tokenizer), strict=True)
        return [Job(prompt.source, ids, params) for prompt, ids in encoded]

    def answered(self, jobs: Sequence[Job]) -> list[Job]:
        """Greedy jobs with transformers' output as what they must give; what is known of a prompt is not run again."""
        began, read = time.perf_counter(), 0
        done = []
        for job in jobs:
            prompt, tokens = tuple(job.prompt), job.params.max_tokens
            known, output = self._generated.get(prompt, (0, []))
            if known < tokens:
                output = self.reference.generate(job.prompt, tokens)
                self._generated[prompt] = tokens, output
                read += len(prompt)
            done.append(replace(job, expected=output[:tokens]))
        total = sum(len(job.expected or ()) for job in done)
        self.progress(
            f"transformers' generate: {len(done)} prompts, {read} tokens read, {total} tokens out, "
            f"{time.perf_counter() - began:.1f} s"
        )
        return done

    def greedy(self, jobs: Sequence[Job], concurrency: Sequence[int]) -> None:
        """Every concurrency, with and without drafts; few jobs are repeated until they fill a batch."""
        for slots in concurrency:
            for drafter in ("none", "ngram"):
                self.run(f"greedy, {drafter}, concurrency {slots}", fill(jobs, slots), slots, drafter)

    # coupled ------------------------------------------------------------------------------------------------------

    def coupled_jobs(self, prompts: Sequence[Job], tokens: int) -> list[Job]:
        """Seeded jobs, every setting for every prompt, with plain decoding alone as what they must give."""
        bare = [
            Job(job.source, job.prompt, SamplingParams(max_tokens=tokens, seed=1000 * i + k, **settings))
            for i, job in enumerate(prompts)
            for k, settings in enumerate(SETTINGS.values())
        ]
        config = EngineConfig(max_slots=1, max_len=max(len(job.prompt) for job in bare) + tokens)
        engine = build_engine(config, target=self.target)
        began = time.perf_counter()
        outputs = decode(engine, bare)
        seconds = time.perf_counter() - began
        engine.close()
        jobs = [Job(job.source, job.prompt, job.params, out) for job, out in zip(bare, outputs, strict=True)]
        self._check_plain(jobs, seconds)
        return jobs

    def _check_plain(self, jobs: Sequence[Job], seconds: float) -> None:
        """Plain seeded decoding is what transformers' processors and the noise decide on the unmodified model."""
        block = Block("seeded, plain and alone, against transformers' processors", seconds=seconds, accepted_length=1.0)
        for job in jobs:
            got = job.expected or []
            ids = [*job.prompt, *got]
            start = len(job.prompt)
            rows = self.reference.logits(ids[:-1], start - 1)
            wants = [decided(row, ids[: start + k], job.params) for k, row in enumerate(rows)]
            wrong = [k for k, want in enumerate(wants) if want != got[k]]
            sizes = [margin(rows[k], ids[: start + k], got[k], job.params) for k in wrong]
            block.outputs += 1
            block.tokens += len(got)
            block.identical += not wrong
            if wrong:
                k, worst = wrong[0], max(sizes)
                block.findings.append(Finding(block.name, job.source, k, wants[k], got[k], sizes[0], worst))
        self._add(block)

    def coupled(self, jobs: Sequence[Job], greedy: Sequence[Job], concurrency: Sequence[int], alone: int) -> None:
        """Every schedule: the first ``alone`` jobs alone, all of them in mixed batches of every concurrency.

        ``greedy`` are answered jobs, for neighbours.

        Drafts come from ``recall`` and ``ngram`` by turns, so that schedules have something to plan.
        """
        for scheduler in SCHEDULES:
            mixed = neighbours(jobs, greedy, unseeded=scheduler != "global")
            for turn, slots in enumerate(concurrency):
                drafter = ("recall", "ngram")[turn % 2]
                place = "alone" if slots == 1 else f"concurrency {slots}"
                batch = jobs[:alone] if slots == 1 else fill(mixed, slots)
                self.run(f"seeded, {drafter}, {scheduler}, {place}", batch, slots, drafter, scheduler)

    # result -------------------------------------------------------------------------------------------------------

    @property
    def faults(self) -> int:
        return sum(block.faults for block in self.blocks)

    @property
    def findings(self) -> list[Finding]:
        return [finding for block in self.blocks for finding in block.findings]


def fill(jobs: Sequence[Job], slots: int) -> list[Job]:
    """The jobs, repeated from the first on where they are fewer than ``slots``."""
    return [jobs[i % len(jobs)] for i in range(max(len(jobs), slots))]


def neighbours(jobs: Sequence[Job], greedy: Sequence[Job], *, unseeded: bool) -> list[Job]:
    """Seeded jobs with greedy and unseeded ones among them."""
    tokens = jobs[0].params.max_tokens
    mixed = list(jobs)
    step = max(1, len(mixed) // NEIGHBOURS)
    for n, job in enumerate(greedy[:NEIGHBOURS]):
        plain = SamplingParams(max_tokens=tokens)
        extra = Job(job.source, job.prompt, plain, (job.expected or [])[:tokens])
        if unseeded and n % 2:
            extra = Job(job.source, job.prompt, SamplingParams(max_tokens=tokens, temperature=0.8))
        mixed.insert(n * (step + 1), extra)
    return mixed
