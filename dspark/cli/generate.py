"""``dspark generate``: one's own prompt, chat or file of prompts."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark.cli import _options as opt
from dspark.errors import ConfigError, DSparkError, RequestError

if TYPE_CHECKING:
    from dspark.api import SpeculativeDecoder
    from dspark.config import SamplingParams
    from dspark.engine.stats import EngineStats

PANEL = "Sampling"


@dataclass(frozen=True, slots=True)
class Output:
    """What to print.

    Attributes:
        stream: text as it comes; None: in a terminal.
        stats: figures, on standard error (within the objects of JSON).
        json: objects instead of text.
    """

    stream: bool | None = None
    stats: bool = False
    json: bool = False


def sampling(**help: Any) -> Any:
    """An option of the sampling panel; left out, the field keeps its default."""
    return typer.Option(rich_help_panel=PANEL, **help)


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - or nothing reads standard input.")] = None,
    chat: Annotated[
        bool | None, typer.Option("--chat/--raw", help="Through the chat template (where there is one), or as it is.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message for chats.")] = None,
    interactive: Annotated[bool, typer.Option("--interactive", "-i", help="Chat in the terminal.")] = False,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="JSON lines with turns, messages or prompt.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where --file's answers go.")] = None,
    stream: Annotated[bool | None, typer.Option("--stream/--no-stream", help="Print text as it comes.")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Show what speculation did.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")] = False,
    target: opt.TargetOption = opt.TARGET,
    revision: opt.RevisionOption = None,
    dtype: opt.DtypeOption = "auto",
    device: opt.DeviceOption = "auto",
    drafter: opt.DrafterOption = "ngram",
    scheduler: opt.SchedulerOption = None,
    estimator: opt.EstimatorOption = None,
    gamma: opt.GammaOption = None,
    max_slots: opt.SlotsOption = None,
    cost: opt.CostOption = "auto",
    settings: opt.SetOption = None,
    max_tokens: Annotated[int | None, sampling(help="Most new tokens; 128 by default.")] = None,
    min_tokens: Annotated[int | None, sampling(help="No end before so many tokens.")] = None,
    temperature: Annotated[float | None, sampling(help="0, the default, is greedy.")] = None,
    do_sample: Annotated[bool | None, typer.Option("--do-sample/--greedy", rich_help_panel=PANEL)] = None,
    top_k: Annotated[int | None, sampling(help="Keep the k likeliest tokens; 0: off.")] = None,
    top_p: Annotated[float | None, sampling(help="Keep the likeliest tokens of this mass; 1: off.")] = None,
    min_p: Annotated[float | None, sampling(help="Keep tokens of this share of the best; 0: off.")] = None,
    repetition_penalty: Annotated[float | None, sampling(help="Over prompt and output; 1: off.")] = None,
    presence_penalty: Annotated[float | None, sampling(help="Once for a token in the output; 0: off.")] = None,
    frequency_penalty: Annotated[float | None, sampling(help="For each occurrence in the output; 0: off.")] = None,
    logit_bias: Annotated[list[str] | None, sampling(metavar="ID=BIAS", help="Added to a token's logit.")] = None,
    seed: Annotated[int | None, sampling(help="The same tokens each time, whatever the drafter.")] = None,
    stop: Annotated[list[str] | None, sampling(help="A string that ends the output. May be repeated.")] = None,
    stop_token_ids: Annotated[
        list[int] | None, typer.Option("--stop-token-id", rich_help_panel=PANEL, help="An id that ends the output.")
    ] = None,
    ignore_eos: Annotated[bool | None, typer.Option("--ignore-eos", rich_help_panel=PANEL)] = None,
    logprobs: Annotated[
        int | None, sampling(help="Log-probabilities of so many tokens; with --json or --file.")
    ] = None,
    logprobs_mode: Annotated[str | None, sampling(help="raw, or processed by the options above.")] = None,
    n: Annotated[int | None, typer.Option("--n", "-n", rich_help_panel=PANEL, help="Samples of each prompt.")] = None,
    request_key: Annotated[int | None, sampling(help="Key of the draws without a seed; for tests.")] = None,
) -> None:
    """Decode your own prompt, chat or file of prompts.

    With no prompt in a terminal, this is a chat. Exit code 1 where a prompt was refused or failed.
    """
    given = {
        "max_tokens": max_tokens, "min_tokens": min_tokens, "temperature": temperature, "do_sample": do_sample,
        "top_k": top_k, "top_p": top_p, "min_p": min_p, "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty, "frequency_penalty": frequency_penalty,
        "logit_bias": parse_bias(logit_bias) if logit_bias else None, "seed": seed, "stop": stop,
        "stop_token_ids": stop_token_ids, "ignore_eos": ignore_eos, "logprobs": logprobs,
        "logprobs_mode": logprobs_mode, "n": n, "request_key": request_key,
    }  # fmt: skip
    params = parameters(given)
    check_usage(prompt, file, output, interactive, chat, system, json)
    options = opt.DecoderOptions(
        target, revision, dtype, device, drafter, scheduler, estimator, gamma, max_slots, cost, settings or ()
    )
    shown = Output(stream, stats, json)
    if file is not None:
        from dspark.cli._answer import answer_file

        if not answer_file(options, params, file, output, chat=chat, system=system, stats=stats):
            raise typer.Exit(1)
    elif interactive or (prompt is None and sys.stdin.isatty()):
        from dspark.cli._chat import Chat

        decoder = opt.build_decoder(options, defaults={"max_slots": 1})
        Chat(decoder, params, system=system, raw=not opt.use_chat(decoder, chat), stats=stats).run()
    else:
        text = read_prompt(prompt)
        decoder = opt.build_decoder(options, defaults={"max_slots": min(params.n, opt.MOST_SLOTS)})
        answer_one(decoder, as_prompt(text, opt.use_chat(decoder, chat), system), params, shown)


def parameters(given: dict[str, Any]) -> SamplingParams:
    """SamplingParams of the options that were given.

    Raises:
        ConfigError: naming the one that is out of range.
    """
    from dspark.config import SamplingParams, build_config

    return build_config(SamplingParams, {name: value for name, value in given.items() if value is not None})


def parse_bias(pairs: list[str]) -> dict[int, float]:
    """``["12=-5"]`` -> ``{12: -5.0}``.

    Raises:
        ConfigError: for what is no ``ID=BIAS``.
    """
    bias: dict[int, float] = {}
    for pair in pairs:
        token, _, value = pair.partition("=")
        try:
            bias[int(token)] = float(value)
        except ValueError:
            raise ConfigError(f"--logit-bias {pair!r}: expected ID=BIAS, such as 12=-5") from None
    return bias


def check_usage(
    prompt: str | None,
    file: Path | None,
    output: Path | None,
    interactive: bool,
    chat: bool | None,
    system: str | None,
    json: bool,
) -> None:
    """Refuse options that contradict one another.

    Raises:
        typer.BadParameter: exit code 2.
    """
    sources = [name for name, given in (("a prompt", prompt), ("--file", file), ("-i", interactive)) if given]
    if len(sources) > 1:
        raise typer.BadParameter(f"{' and '.join(sources)} exclude one another")
    if output is not None and file is None:
        raise typer.BadParameter("--output belongs to --file; redirect standard output instead")
    if chat is False and system is not None:
        raise typer.BadParameter("--system belongs to a chat, and --raw asks for none")
    if interactive and json:
        raise typer.BadParameter("--json and -i exclude one another")


def read_prompt(prompt: str | None) -> str:
    """The argument, or standard input.

    Raises:
        RequestError: there is nothing in it.
    """
    if prompt in (None, "-"):
        prompt = sys.stdin.read()
    if not prompt or not prompt.strip():
        raise RequestError("prompt: nothing to answer; give it as an argument, on standard input or with --file")
    return prompt


def as_prompt(text: str, chat: bool, system: str | None) -> Any:
    """Messages for a chat, else the text.

    Raises:
        RequestError: a system message without a chat.
    """
    if chat:
        first = [{"role": "system", "content": system}] if system is not None else []
        return [*first, {"role": "user", "content": text}]
    if system is not None:
        raise RequestError("--system belongs to a chat, and this tokenizer has no chat template")
    return text


def answer_one(decoder: SpeculativeDecoder, prompt: Any, params: SamplingParams, shown: Output) -> None:
    """Decode one prompt and print what came.

    Raises:
        DSparkError: what ended a sample.
    """
    streaming = shown.stream if shown.stream is not None else sys.stdout.isatty()
    live = streaming and not shown.json and params.n == 1
    results = decoder.generate(prompt, params, on_chunk=_print_chunk if live else None)
    if shown.json:
        from dspark.cli._prompt_file import to_json

        typer.echo(to_json(as_json(decoder, results), indent=2))
    elif live:
        typer.echo()
    else:
        for i, result in enumerate(results):
            typer.echo(f"[{i}]" if params.n > 1 else "", nl=params.n > 1)
            typer.echo(result.text)
    if shown.stats and not shown.json:
        print_stats(decoder)
    failed = [result.error for result in results if result.error is not None]
    if failed:
        raise failed[0] if isinstance(failed[0], DSparkError) else DSparkError(str(failed[0]))


def _print_chunk(_: int, chunk: Any) -> None:
    typer.echo(chunk.text or "", nl=False)


def as_json(decoder: SpeculativeDecoder, results: list[Any]) -> dict[str, Any]:
    """One object: the prompt's ids, a choice a sample, the engine's figures."""
    from dspark.cli._prompt_file import logprobs_as_json

    parts = decoder.engine.parts
    return {
        "target": parts.target.name,
        "drafter": parts.name("drafter"),
        "prompt_ids": results[0].prompt_ids,
        "choices": [
            {
                "text": r.text,
                "ids": r.ids,
                "accepted": r.accepted,
                "finish_reason": r.finish_reason,
                "logprobs": logprobs_as_json(r.logprobs),
                "stats": r.stats.as_dict(),
                "error": None if r.error is None else str(r.error),
            }
            for r in results
        ],
        "stats": decoder.stats.as_dict(),
    }


def gamma_lines(stats: EngineStats) -> list[str]:
    """How much was drafted and why, and what drafting gained."""
    if not stats.gammas:
        return []
    blocks = ", ".join(f"{n} x {g or 'plain'}" for g, n in sorted(stats.gammas.items()))
    why = ", ".join(f"{reason} {n}" for reason, n in stats.gamma_reasons.most_common())
    lines = [f"gamma: {blocks} ({why})"]
    if stats.row_reasons:
        lines.append(f"requests that drafted less: {', '.join(f'{r} {n}' for r, n in stats.row_reasons.most_common())}")
    gain = stats.gains.as_dict()
    if gain["steps"] and gain["predicted"]:
        came = "" if gain["measured"] is None else f", measured {100 * gain['measured']:+.1f} %"
        lines.append(f"gain of drafting over plain steps: predicted {100 * gain['predicted']:+.1f} %{came}")
    return lines


def print_stats(decoder: SpeculativeDecoder) -> None:
    """The engine's figures in a few lines on standard error."""
    stats = decoder.stats
    tokens, seconds = stats.acceptance.committed, stats.phase_seconds["step"]
    rates = " ".join(f"{rate:.2f}" for rate in stats.acceptance.rates)
    lines = [
        f"{tokens} tokens in {seconds:.2f} s of steps: {tokens / seconds if seconds else 0:.1f} tokens/s",
        f"accepted length {stats.acceptance.accepted_length:.2f}, verify budget {stats.verify_budget:.2f}, "
        f"{stats.steps} forwards of {stats.executed_tokens} tokens, "
        f"{100 * stats.overhead:.1f} % of the time outside models",
        f"acceptance by position: {rates or 'nothing was verified'}",
    ]
    if stats.prefix_hits:
        lines.append(f"prefix cache: {stats.cached_tokens} prompt tokens of {stats.prefix_hits} requests were not read")
    lines += gamma_lines(stats)
    describe = getattr(decoder.engine.parts.gamma_policy, "describe", None)
    if describe is not None and stats.gains.steps:
        known = describe()
        believed = "believed" if known["difficulty_trusted"] else "not believed"
        lines.append(f"difficulty of drafts: {believed}, log loss {100 * known['difficulty_advantage']:+.1f} % better")
    named = [*stats.states, *stats.faults]
    if named:
        lines.append(f"states: {', '.join(named)}")
    for line in lines:
        typer.echo(line, err=True)
