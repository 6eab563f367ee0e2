"""``dspark doctor``: is everything in order, and if two runs differ, who is it?"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark.cli import _options as opt
from dspark.errors import DSparkError

if TYPE_CHECKING:
    from rich.console import Console

    from dspark.api import SpeculativeDecoder
    from dspark.cli._environment import Findings


@dataclass(slots=True)
class Report:
    """What was found; None where it was not looked at."""

    environment: dict[str, Any]
    plugins: list[dict[str, Any]]
    findings: Findings
    target: dict[str, Any] | None = None
    cost: dict[str, Any] | None = None
    control: list[Any] | None = None
    kernels: list[dict[str, Any]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "ok": not self.findings.problems,
            "problems": self.findings.problems,
            "notes": self.findings.notes,
            "environment": self.environment,
            "plugins": self.plugins,
            "kernels": self.kernels,
            "target": self.target,
            "cost": self.cost,
            "control": None if self.control is None else [case.as_dict() for case in self.control],
        }


def doctor(
    target: Annotated[
        str | None, typer.Option("--target", "-t", help="Check this one, too: hub id, folder, .gguf file, smollm2.")
    ] = None,
    revision: opt.RevisionOption = None,
    dtype: opt.DtypeOption = "auto",
    device: opt.DeviceOption = "auto",
    drafter: opt.DrafterOption = "ngram",
    scheduler: opt.SchedulerOption = None,
    estimator: opt.EstimatorOption = None,
    gamma: opt.GammaOption = None,
    cost: opt.CostOption = "auto",
    settings: opt.SetOption = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each output of the control run.")] = 32,
    bound: Annotated[
        float | None, typer.Option(min=0.0, help="Largest margin, in logits, that rounding explains; by dtype.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")] = False,
) -> None:
    """Check the environment, the plugins and a target; a control run says who differs.

    Exit code 1 where something is wrong.
    """
    from dspark.cli._environment import Findings, environment, kernel_records, plugin_records
    from dspark.cli._render import console_for

    findings = Findings()
    report = Report(environment(findings), plugin_records(findings), findings)
    report.kernels = kernel_records(findings)
    if target is not None:
        options = opt.DecoderOptions(
            target, revision, dtype, device, drafter, scheduler, estimator, gamma, None, cost, settings or ()
        )
        with console_for(stderr=True).status("loading the target, then decoding plainly, speculatively and plainly"):
            examine(report, options, tokens, bound)
    if json:
        from dspark.cli._prompt_file import to_json

        typer.echo(to_json(report.as_dict(), indent=2))
    else:
        show(report, console_for())
    if findings.problems:
        raise typer.Exit(1)


def examine(report: Report, options: opt.DecoderOptions, tokens: int, bound: float | None) -> None:
    """Load a target, describe it, and run the control. What fails becomes a problem of the report."""
    from dspark.cli._compare import Judge
    from dspark.cli._control import run_control
    from dspark.cli._demo_prompts import PROMPTS, encoded_prompts

    began = time.time()
    try:
        fast = opt.build_decoder(options, defaults={"max_slots": len(PROMPTS)})
        report.target = describe(fast)
        report.cost = cost_state(fast, began)
        plain = opt.plain_twin(fast)
        cases = run_control(plain, fast, encoded_prompts(fast, tokens), tokens, Judge(fast.engine, bound))
    except DSparkError as err:
        report.findings.problems.append(f"target {options.target!r}: {err}")
        return
    report.control = cases
    report.findings.problems += [
        f"control run, {c.sampling}, {c.title}: {c.who} differs by more than rounding explains ({evidence(c)})"
        for c in cases
        if not c.ok
    ]
    take_figures(report, fast)


def describe(decoder: SpeculativeDecoder) -> dict[str, Any]:
    """The target as it was loaded, and what its load-time probe measured."""
    target: Any = decoder.engine.parts.target
    tokenizer = decoder.tokenizer
    found = {
        "name": target.name,
        "vocab_size": target.vocab_size,
        "num_layers": target.num_layers,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "max_len": decoder.engine.max_len,
        "eos_token_ids": list(target.eos_token_ids),
        "tokenizer": type(tokenizer).__name__ if tokenizer is not None else None,
        "chat_template": bool(getattr(tokenizer, "chat_template", None)),
        "probe_error": getattr(target, "probe_error", None),
        "fingerprint": dict(target.fingerprint()),
    }
    model = getattr(target, "model", None)
    if model is not None:
        found["model"] = type(model).__name__
        found["parameters"] = sum(p.numel() for p in model.parameters())
    return found


def cost_state(decoder: SpeculativeDecoder, began: float) -> dict[str, Any]:
    """What the scheduler plans with, and the file that is kept for this machine and target."""
    from dspark.scheduling.cache import profile_path

    parts = decoder.engine.parts
    path = profile_path(parts.target.fingerprint())
    kept = path.is_file()
    table = parts.cost
    if table is not None:
        state = table.state
    else:
        state = "no-cost-table" if parts.scheduler.capabilities.needs_cost and parts.gamma else "not needed"
    found: dict[str, Any] = {"state": state, "file": str(path) if kept else None}
    found["measured_now"] = kept and path.stat().st_mtime >= began
    if table is not None:
        sizes = (1, 2, 4, 8, 16, 32)
        found["forward_ms"] = {str(n): round(1000 * table.verify_seconds(n), 3) for n in sizes}
    return found


def take_figures(report: Report, fast: SpeculativeDecoder) -> None:
    """Faults and named states of the speculative engine."""
    stats = fast.stats
    report.findings.problems += [f"component fault, {count} times: {name}" for name, count in stats.faults.items()]
    report.findings.notes += [f"state {name} in {count} rounds" for name, count in stats.states.items()]
    if stats.drafted and not any(stats.acceptance.accepted):
        report.findings.notes.append(
            f"none of {stats.verified} verified drafts was accepted: it suits neither target nor prompts, or is broken"
        )


def evidence(case: Any) -> str:
    """What supports a verdict, in words."""
    return (
        f"plain and plain: {case.plain}; plain and speculative: {case.speculative}; "
        f"margin against the target's own logits {case.reference:.3g} of at most {case.bound:g}"
    )


def show(report: Report, console: Console) -> None:
    """The report for people."""
    from dspark.cli._environment import lines_of

    section(console, "environment", lines_of(report.environment))
    components = [(p["name"], f"{p['distribution']} {p['version']}: {p['status']}") for p in report.plugins]
    section(console, "plugins", components)
    chosen = [(f"{k['op']}, {k['dtype']} on {k['device']}", f"{k['kernel']}: {k['reason']}") for k in report.kernels]
    section(console, "kernels", chosen)
    if report.target is not None:
        section(console, "target", target_lines(report.target))
    if report.cost is not None:
        section(console, "cost table", cost_lines(report.cost))
    if report.control is not None:
        show_control(console, report.control)
    for note in report.findings.notes:
        console.print(f"note: {note}", markup=False)
    for problem in report.findings.problems:
        console.print(f"PROBLEM: {problem}", markup=False, style="bold red")
    if not report.findings.problems:
        console.print("everything is in order", style="green")


def section(console: Console, title: str, lines: list[tuple[str, str]]) -> None:
    """A title and aligned lines."""
    from rich.text import Text

    console.print(title, style="bold")
    width = max((len(label) for label, _ in lines), default=0)
    for label, text in lines:
        console.print(Text(f"  {label:<{width}}  {text}"), soft_wrap=True)
    console.print()


def target_lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    """A target's description."""
    size = f", {found['parameters'] / 1e6:.0f} M parameters" if "parameters" in found else ""
    template = "with" if found["chat_template"] else "without"
    lines = [
        ("name", f"{found['name']} ({found.get('model', 'not of transformers')}{size})"),
        ("runs in", f"{found['dtype']} on {found['device']}"),
        (
            "shape",
            f"{found['num_layers']} layers, vocabulary {found['vocab_size']}, slots of {found['max_len']} tokens",
        ),
        ("tokenizer", f"{found['tokenizer'] or 'none'}, {template} a chat template; ends at {found['eos_token_ids']}"),
    ]
    if found["probe_error"] is not None:
        lines.append(
            ("probe", f"packed forwards give its own logits, within {found['probe_error']:.2g} of their spread")
        )
    return lines


def cost_lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    """The state of the cost table."""
    when = "measured now" if found["measured_now"] else "kept from before"
    lines = [("state", found["state"]), ("file", f"{found['file']} ({when})" if found["file"] else "none is kept")]
    if "forward_ms" in found:
        points = ", ".join(f"{n}: {ms:.1f}" for n, ms in found["forward_ms"].items())
        lines.append(("forward", f"milliseconds by tokens: {points}"))
    return lines


def show_control(console: Console, cases: list[Any]) -> None:
    """The control run: a line a prompt."""
    from dspark.cli._render import table_for

    table = table_for(
        console, "prompt", "sampling", "tokens", "plain and\nplain", "plain and\nspeculative", "worst\nmargin",
        "who differs",
        title="control run: plain alone, speculative together, plain together",
    )  # fmt: skip
    for case in cases:
        table.add_row(
            case.title, case.sampling, str(case.tokens), case.plain.verdict, case.speculative.verdict,
            f"{case.reference:.2g}", case.who, style="" if case.ok else "bold red",
        )  # fmt: skip
    console.print(table)
    for case in cases:
        if case.who != "nobody":
            console.print(f"  {case.title}, {case.sampling}: {evidence(case)}", markup=False, soft_wrap=True)
    console.print(f"margins up to {cases[0].bound:g} logits are rounding in this dtype", markup=False)
    console.print()
