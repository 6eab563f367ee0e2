"""``dspark serve``: an OpenAI-compatible server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from dspark.cli import _options as opt
from dspark.errors import ConfigError

PANEL = "Server"
KEYS = "DSPARK_API_KEYS"


def server(**help: Any) -> Any:
    """An option of the server panel."""
    return typer.Option(rich_help_panel=PANEL, **help)


def serve(
    target: opt.TargetOption = opt.TARGET,
    host: Annotated[str, server(help="Address to listen at; by default only this machine reaches it.")] = "127.0.0.1",
    port: Annotated[int, server(min=0, max=65535, help="Port to listen at.")] = 8000,
    model_name: Annotated[str | None, server(help="What clients call the model; by default the target's name.")] = None,
    api_key_file: Annotated[
        Path | None, server(help=f"API keys, one a line. {KEYS}, comma-separated, is read as well.")
    ] = None,
    max_queue: Annotated[int | None, server(min=0, help="Most choices that wait for a slot.")] = None,
    queue_timeout: Annotated[float | None, server(help="Seconds until a waiting request is given up.")] = None,
    request_timeout: Annotated[float | None, server(help="Seconds until a request is ended.")] = None,
    drain_timeout: Annotated[float | None, server(help="Seconds that running requests have at shutdown.")] = None,
    max_body_bytes: Annotated[int | None, server(min=1, help="Largest request body.")] = None,
    max_prompt_tokens: Annotated[int | None, server(min=1, help="Longest prompt.")] = None,
    max_output_tokens: Annotated[int | None, server(min=1, help="Most tokens of a choice.")] = None,
    thinking: Annotated[
        bool | None,
        typer.Option("--thinking/--no-thinking", rich_help_panel=PANEL, help="The template's enable_thinking."),
    ] = None,
    template_arg: Annotated[
        list[str] | None, server(metavar="KEY=VALUE", help="A variable of the chat template. May be repeated.")
    ] = None,
    log_level: Annotated[str, server(help="critical, error, warning, info or debug.")] = "info",
    access_log: Annotated[bool, typer.Option("--access-log", rich_help_panel=PANEL, help="Log every request.")] = False,
    revision: opt.RevisionOption = None,
    dtype: opt.DtypeOption = "auto",
    device: opt.DeviceOption = "auto",
    drafter: opt.DrafterOption = "auto",
    scheduler: opt.SchedulerOption = None,
    estimator: opt.EstimatorOption = None,
    gamma: opt.GammaOption = None,
    max_slots: opt.SlotsOption = None,
    cost: opt.CostOption = "auto",
    settings: opt.SetOption = None,
) -> None:
    """Serve a model behind OpenAI's interface, with a live page at /.

    It listens on this machine alone unless --host says otherwise, and runs no code of a checkpoint.
    """
    from dspark.server.memory import keep_memory

    keep_memory(one_arena=True)  # before threads start
    import dspark.server as package
    from dspark.config import build_config

    run, config_class = package.serve, package.ServerConfig
    limits = {
        "model_name": model_name, "max_queue": max_queue, "queue_timeout": queue_timeout,
        "request_timeout": request_timeout, "drain_timeout": drain_timeout, "max_body_bytes": max_body_bytes,
        "max_prompt_tokens": max_prompt_tokens, "max_output_tokens": max_output_tokens,
    }  # fmt: skip
    given = {name: value for name, value in limits.items() if value is not None}
    keys = read_keys(api_key_file)
    args = template_args(template_arg or (), thinking)
    config = build_config(config_class, {**given, "api_keys": keys, "template_args": args})
    if log_level not in ("critical", "error", "warning", "info", "debug"):
        raise ConfigError(f"--log-level {log_level!r}: expected critical, error, warning, info or debug")
    options = opt.DecoderOptions(
        target, revision, dtype, device, drafter, scheduler, estimator, gamma, max_slots, cost, settings or ()
    )
    typer.echo(f"dspark: loading {target} with drafter {drafter}", err=True)  # it may take minutes
    decoder = opt.build_decoder(options, defaults={"max_slots": opt.MOST_SLOTS})
    guarded = f"{len(keys)} API key(s)" if keys else "no API key"
    typer.echo(
        f"dspark: {decoder.engine.parts.target.name} with drafter {decoder.engine.parts.name('drafter')} at "
        f"http://{f'[{host}]' if ':' in host else host}:{port} ({guarded}); the page is at /, the interface at /v1",
        err=True,
    )
    run(decoder, config, host=host, port=port, log_level=log_level, access_log=access_log)


def read_keys(path: Path | None) -> list[str]:
    """API keys of a file and of the environment. Not an option: other users of the machine see a command's arguments.

    Raises:
        ConfigError: the file can't be read, or holds none.
    """
    keys = [key.strip() for key in os.environ.get(KEYS, "").split(",") if key.strip()]
    if path is None:
        return keys
    try:
        found = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"--api-key-file {str(path)!r}: {err}") from err
    found = [key for key in found if key and not key.startswith("#")]
    if not found:
        raise ConfigError(f"--api-key-file {str(path)!r}: holds no key")
    return keys + found


def template_args(pairs: list[str] | tuple[()], thinking: bool | None) -> dict[str, Any]:
    """Variables of the chat template.

    Raises:
        ConfigError: a pair without ``=``.
    """
    import json

    args: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise ConfigError(f"--template-arg {pair!r}: expected KEY=VALUE")
        try:
            args[name.strip()] = json.loads(text)
        except ValueError:
            args[name.strip()] = text
    return args
