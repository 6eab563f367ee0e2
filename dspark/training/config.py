"""Settings of a training run, in sections."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dspark.config import build_config
from dspark.errors import ConfigError, nearest
from dspark.training.schedule import Schedule, points


def _number(config: object, name: str, low: float, high: float = math.inf, *, whole: bool = False) -> None:
    value = getattr(config, name)
    kind = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
        bound = f"from {low} to {high}" if math.isfinite(high) else f"of at least {low}"
        raise ConfigError(
            f"{type(config).__name__}.{name}: expected {'an integer' if whole else 'a number'} {bound}, got {value!r}"
        )


def _choice(config: object, name: str, known: Sequence[str]) -> None:
    value = getattr(config, name)
    if value not in known:
        raise ConfigError(
            f"{type(config).__name__}.{name}: expected one of {', '.join(known)}, got {value!r}"
            f"{nearest(str(value), known)}"
        )


@dataclass(frozen=True, slots=True)
class TargetSettings:
    """The frozen target.

    Attributes:
        model: hub id, folder, .gguf file or ``smollm2``.
        kind: registered target.
        dtype: what it runs in.
        device: where.
        settings: further settings of that kind.
    """

    model: str = ""
    kind: str = "hf"
    dtype: str = "bfloat16"
    device: str = "auto"
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError("target.model: name a hub id, a folder, a .gguf file or smollm2")


@dataclass(frozen=True, slots=True)
class DataSettings:
    """Conversations, and where the target's view of them comes from.

    Attributes:
        files: JSONL files of conversations, see ``dspark.training.samples.SampleReader``.
        chat_args: variables of the target's chat template, for files of messages.
        cache: folder of a target cache; None runs the target online.
        cache_budget_gib: most gibibytes that the cache may take; more is refused before the run.
        follow: take in what was appended to the files at each epoch; needs a cache, and ``optim.steps``.
        max_length: conversations are cut to so many tokens.
        holdout: one prompt in so many is kept for evaluation; 0 for none.
    """

    files: Sequence[str] = ()
    chat_args: Mapping[str, Any] = field(default_factory=dict)
    cache: str | None = None
    cache_budget_gib: float | None = None
    follow: bool = False
    max_length: int = 2048
    holdout: int = 50

    def __post_init__(self) -> None:
        object.__setattr__(self, "files", (self.files,) if isinstance(self.files, str) else tuple(self.files))
        _number(self, "max_length", 8, whole=True)
        _number(self, "holdout", 0, whole=True)
        if self.cache_budget_gib is not None:
            _number(self, "cache_budget_gib", 0)


@dataclass(frozen=True, slots=True)
class DrafterSettings:
    """The drafter to be trained.

    Attributes:
        algorithm: ``dspark`` (a block drafter; with the head ``none`` it is DFlash) or ``eagle3`` (one layer, one token
            a forward; of the settings below it takes ``family``, ``intermediate_size``, ``gamma``, the taps, the
            vocabulary and the random weights).
        head: sequential head: ``markov``, ``gated``, ``rnn``, ``none`` (DFlash), or a registered one.
        head_config: settings of a registered head.
        rank: r.
        confidence: train a confidence head.
        confidence_with_markov: it reads W1[x_{k-1}] too, where the head has it.
        layers: draft layers.
        family: ``qwen3`` (norms on queries and keys) or ``llama``; ``auto``: the target's where its layers are copied,
            else ``qwen3``.
        intermediate_size: of the MLPs; None for the target's.
        gamma: tokens drafted a round; for ``eagle3`` the steps that are unrolled.
        layout: ``anchor-first`` or ``mask-only``.
        taps: target layers; None for ``num_taps`` of them, spread evenly.
        num_taps: see there.
        vocab_size: entries of a pruned vocabulary, the most frequent in the responses; None for all.
        mask_token_id: input of the masks; None for a special token that the data does not use.
        window: sliding window of the context; None for all of it.
        start: a drafter checkpoint to begin from; it decides all of the above.
        init: ``random``, or ``target`` to copy evenly spread target layers.
        init_head: ``random``, or ``bigram`` for a low-rank fit of log bigram frequencies.
        init_std: of random weights.
    """

    algorithm: str = "dspark"
    head: str = "markov"
    head_config: Mapping[str, Any] = field(default_factory=dict)
    rank: int = 256
    confidence: bool = True
    confidence_with_markov: bool = True
    layers: int = 2
    family: str = "auto"
    intermediate_size: int | None = None
    gamma: int = 7
    layout: str = "anchor-first"
    taps: Sequence[int] | None = None
    num_taps: int = 5
    vocab_size: int | None = None
    mask_token_id: int | None = None
    window: int | None = None
    start: str | None = None
    init: str = "random"
    init_head: str = "random"
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name in ("rank", "layers", "gamma", "num_taps"):
            _number(self, name, 1, whole=True)
        for name in ("vocab_size", "intermediate_size", "window"):
            if getattr(self, name) is not None:
                _number(self, name, 1, whole=True)
        _number(self, "init_std", 0)
        _choice(self, "algorithm", ("dspark", "eagle3"))
        _choice(self, "layout", ("anchor-first", "mask-only"))
        _choice(self, "family", ("auto", "qwen3", "llama"))
        _choice(self, "init", ("random", "target"))
        _choice(self, "init_head", ("random", "bigram"))
        if self.taps is not None:
            object.__setattr__(self, "taps", tuple(self.taps))


@dataclass(frozen=True, slots=True)
class LossSettings:
    """Weights of the losses (METHOD section 5), each a number or a schedule over the run.

    Attributes:
        ce, tv, confidence: the paper's are 0.1, 0.9 and 1.0. Far from the target TV hardly pulls: begin with CE.
        decay: w_k = exp(-k / decay), k from 0; None for equal weights.
        thin: let label k count with probability w_k instead of weighing it by w_k: the same losses on average, and half
            the work on the vocabulary at the default decay.
        step_decay: of ``eagle3``, whose step k weighs step_decay^k; its CE is against the target's whole law.
        against: what a block drafter's CE is taken against: ``token``, the true one (the paper's), or ``law``, the
            target's whole law at its place, which says more per token of data.
    """

    ce: Schedule = 0.1
    tv: Schedule = 0.9
    confidence: Schedule = 1.0
    decay: float | None = 4.0
    thin: bool = False
    step_decay: float = 0.8
    against: str = "token"

    def __post_init__(self) -> None:
        for name in ("ce", "tv", "confidence"):
            points(getattr(self, name), f"loss.{name}")
        _choice(self, "against", ("token", "law"))
        if self.decay is not None:
            _number(self, "decay", 1e-6)
        _number(self, "step_decay", 0, 1)
        if not isinstance(self.thin, bool):
            raise ConfigError(f"LossSettings.thin: expected true or false, got {self.thin!r}")


@dataclass(frozen=True, slots=True)
class OptimSettings:
    """AdamW on float32 weights, linear warm-up, cosine to zero.

    Attributes:
        lr: highest learning rate.
        warmup: share of the steps.
        final: learning rate at the end, as a share of ``lr``.
        weight_decay, beta1, beta2, eps: of AdamW.
        clip: largest gradient norm; None for no clipping.
        steps: steps of the run; None for ``epochs``.
        epochs: passes over the data.
        sequences: conversations in one forward of one process.
        accumulate: forwards of one step.
        anchors: blocks of a conversation in one pass.
        precision: ``bf16`` (autocast over float32 weights) or ``fp32``.
        seed: of the order, the anchors and the random weights.
    """

    lr: float = 6e-4
    warmup: float = 0.04
    final: float = 0.0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    clip: float | None = 1.0
    steps: int | None = None
    epochs: int = 10
    sequences: int = 8
    accumulate: int = 1
    anchors: int = 32
    precision: str = "bf16"
    seed: int = 42

    def __post_init__(self) -> None:
        for name in ("lr", "weight_decay", "eps"):
            _number(self, name, 0)
        for name in ("warmup", "final", "beta1", "beta2"):
            _number(self, name, 0, 1)
        for name in ("epochs", "sequences", "accumulate", "anchors"):
            _number(self, name, 1, whole=True)
        _number(self, "seed", 0, 2**63 - 1, whole=True)
        if self.steps is not None:
            _number(self, "steps", 1, whole=True)
        if self.clip is not None:
            _number(self, "clip", 0)
        _choice(self, "precision", ("bf16", "fp32"))


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Where a run writes, and how often.

    Attributes:
        output: folder of checkpoints, log and the finished drafter.
        log_every, eval_every, save_every: in steps; 0 for never (a last checkpoint is always written).
        keep: checkpoints that are kept.
        eval_sequences: held-out conversations of an evaluation.
        threads: of torch; None leaves them.
        tensorboard: write TensorBoard events too.
    """

    output: str = "drafter"
    log_every: int = 10
    eval_every: int = 500
    save_every: int = 500
    keep: int = 2
    eval_sequences: int = 32
    threads: int | None = None
    tensorboard: bool = False

    def __post_init__(self) -> None:
        for name in ("log_every", "eval_every", "save_every"):
            _number(self, name, 0, whole=True)
        for name in ("keep", "eval_sequences"):
            _number(self, name, 1, whole=True)
        if self.threads is not None:
            _number(self, "threads", 1, whole=True)


SECTIONS: Mapping[str, type[Any]] = {
    "target": TargetSettings,
    "data": DataSettings,
    "drafter": DrafterSettings,
    "loss": LossSettings,
    "optim": OptimSettings,
    "run": RunSettings,
}


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """A whole run; see the class of each section."""

    target: TargetSettings
    data: DataSettings = field(default_factory=DataSettings)
    drafter: DrafterSettings = field(default_factory=DrafterSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    run: RunSettings = field(default_factory=RunSettings)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> TrainConfig:
        """Build it from nested mappings.

        Raises:
            ConfigError: an unknown section or field, with the nearest name, or a value that is refused.
        """
        for name, section in values.items():
            if name not in SECTIONS:
                raise ConfigError(f"training config: unknown section {name!r}{nearest(name, SECTIONS)}")
            if not isinstance(section, Mapping):
                raise ConfigError(f"training config: {name}: expected a table of settings, got {section!r}")
        config = cls(**{n: build_config(c, values.get(n), where=n) for n, c in SECTIONS.items()})
        if config.data.follow and (config.data.cache is None or config.optim.steps is None):
            raise ConfigError("data.follow: needs data.cache, and optim.steps, since epochs grow")
        return config

    def plain(self) -> dict[str, Any]:
        """Nested plain values, as ``of`` takes them and JSON holds them."""
        out: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return out
