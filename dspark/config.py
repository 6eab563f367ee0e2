"""Configuration: one frozen dataclass each, read from keywords, dicts, TOML or JSON. Unknown keys are errors."""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dspark.errors import ConfigError, nearest
from dspark.types import Mode

T = TypeVar("T")


def build_config(cls: type[T], values: Mapping[str, Any] | None, *, where: str = "") -> T:
    """Build a config dataclass from a mapping.

    Raises:
        ConfigError: for an unknown key (with the nearest name) or a value that the class refuses.
    """
    values = dict(values or {})
    if not dataclasses.is_dataclass(cls):
        raise ConfigError(f"{where or cls.__name__}: {cls!r} is not a dataclass")
    known = {f.name for f in dataclasses.fields(cls) if f.init}
    for key in values:
        if key not in known:
            label = where or cls.__name__
            listed = ", ".join(sorted(known)) or "none"
            raise ConfigError(f"{label}: unknown setting {key!r}{nearest(str(key), known)} (known: {listed})")
    try:
        return cls(**values)
    except TypeError as err:
        raise ConfigError(f"{where or cls.__name__}: {err}") from err


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


def _plain(config: object, name: str) -> Any:
    """A field's value; numpy's numbers become Python's."""
    value = getattr(config, name)
    if isinstance(value, numbers.Real) and not isinstance(value, (bool, int, float)):
        value = int(value) if isinstance(value, numbers.Integral) else float(value)
        object.__setattr__(config, name, value)
    return value


_COLDEST = 1e-30
"""Logits over less than this are infinite in float32."""


def _check_number(config: object, name: str, low: float, high: float = math.inf, *, integer: bool = False) -> None:
    value = _plain(config, name)
    number = isinstance(value, int) if integer else isinstance(value, (int, float))
    if isinstance(value, bool) or not number or math.isnan(value) or not low <= value <= high:
        kind = "an integer" if integer else "a number"
        bound = f"from {low} to {high}" if math.isfinite(high) else f"of at least {low}"
        raise ConfigError(f"{type(config).__name__}.{name}: expected {kind} {bound}, got {value!r}")


def _check_bool(config: object, name: str) -> None:
    value = getattr(config, name)
    _check(isinstance(value, bool), f"{type(config).__name__}.{name}: expected True or False, got {value!r}")


def _token_id(value: object) -> int:
    """A token id; JSON writes the keys of mappings as strings."""
    token = int(value) if isinstance(value, str) else operator.index(value)  # type: ignore[arg-type]
    if isinstance(value, bool) or token < 0:
        raise ValueError(f"{value!r} is no token id")
    return token


def _finite(value: object) -> float:
    number = float(value)  # type: ignore[arg-type]
    if not math.isfinite(number):
        raise ValueError(f"expected finite values, got {value!r}")
    return number


def _strings(value: str | Sequence[str]) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(s, str) and s for s in strings):
        raise ValueError(f"expected non-empty strings, got {value!r}")
    return strings


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is decoded. Processors run in transformers' order and with its meaning.

    Attributes:
        max_tokens: most new tokens.
        min_tokens: EOS and stop ids are masked until so many new tokens are out.
        temperature: 0 is greedy.
        do_sample: False is greedy whatever the temperature.
        top_k: keep the k largest logits (0: off).
        top_p: keep the smallest set of tokens with at least this mass (1: off).
        min_p: keep tokens with at least this share of the largest probability (0: off).
        repetition_penalty: over prompt and output, as transformers (1: off).
        presence_penalty: subtracted once from every token that the *output* holds (0: off).
        frequency_penalty: subtracted per occurrence in the *output* (0: off).
        logit_bias: token id -> added to its logit.
        seed: selects the ``coupled`` verifier: the output is a function of seed and target alone.
        stop: strings that end the output; what follows their start is never streamed.
        stop_token_ids: ids that end the output, beside the target's EOS.
        ignore_eos: EOS does not end the output.
        logprobs: return this many of the most likely tokens' log-probabilities, and the chosen one's.
        logprobs_mode: ``raw`` (before any processor) or ``processed`` (of the law that is sampled).
        logits_processors: custom processors, see ``dspark.protocols.LogitsProcessor``.
        request_key: 64-bit key of this request's draws under ``rejection``; fresh by default. For tests.
        n: number of samples of the prompt; choice i uses hash(seed, i).
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 0.0
    do_sample: bool = True
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logprobs_mode: str = "raw"
    logits_processors: Sequence[Any] = ()
    request_key: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        _check_number(self, "max_tokens", 1, integer=True)
        _check_number(self, "min_tokens", 0, integer=True)
        _check(
            self.min_tokens <= self.max_tokens,
            f"SamplingParams: min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}",
        )
        _check_number(self, "temperature", 0.0, 1e6)
        _check(
            self.temperature == 0 or self.temperature >= _COLDEST,
            f"SamplingParams.temperature: {self.temperature} is too small to divide by; 0 is greedy",
        )
        _check_number(self, "top_k", 0, integer=True)
        _check_number(self, "top_p", 0.0, 1.0)
        _check(self.top_p > 0, "SamplingParams.top_p: must be above 0")
        _check_number(self, "min_p", 0.0, 1.0)
        _check_number(self, "repetition_penalty", 0.0, 1e6)
        _check(self.repetition_penalty > 0, "SamplingParams.repetition_penalty: must be above 0")
        _check_number(self, "presence_penalty", -1e6, 1e6)
        _check_number(self, "frequency_penalty", -1e6, 1e6)
        for name in ("seed", "request_key"):
            if getattr(self, name) is not None:
                _check_number(self, name, 0, 2**64 - 1, integer=True)
        if self.logprobs is not None:
            _check_number(self, "logprobs", 0, 1024, integer=True)
        _check(
            self.logprobs_mode in ("raw", "processed"),
            f"SamplingParams.logprobs_mode: expected 'raw' or 'processed', got {self.logprobs_mode!r}",
        )
        _check_number(self, "n", 1, integer=True)
        self._normalise()

    def _normalise(self) -> None:
        for name in ("do_sample", "ignore_eos"):
            _check_bool(self, name)
        for name, read in (
            ("stop", _strings),
            ("stop_token_ids", lambda ids: tuple(map(_token_id, ids))),
            ("logit_bias", lambda bias: {_token_id(k): _finite(v) for k, v in dict(bias).items()}),
            ("logits_processors", tuple),
        ):
            try:
                object.__setattr__(self, name, read(getattr(self, name)))
            except (TypeError, ValueError) as err:
                raise ConfigError(f"SamplingParams.{name}: {err}") from err

    @property
    def greedy(self) -> bool:
        """True where the most likely token is taken."""
        return not self.do_sample or self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """True where logits depend on the tokens so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def mode(self) -> Mode:
        """The mode that these parameters select when the engine leaves the choice to them."""
        if self.greedy:
            return Mode.GREEDY
        return Mode.REJECTION if self.seed is None else Mode.COUPLED


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How an engine is put together.

    Attributes:
        target: registered target kind (``hf``).
        drafter: registered drafter, a checkpoint's folder or hub id, ``none`` for plain decoding, or ``auto`` for a
            preset of the target (``ngram`` where it has none).
        estimator, calibrator, scheduler: registered components. Estimator ``auto``: the drafter's confidence head, else
            ``online``.
        verifier: ``auto`` (greedy at T = 0, ``coupled`` with a seed, else ``rejection``) or one for all requests.
        gamma: tokens drafted a round; None for the drafter's own, which a gamma policy may go under.
        gamma_policy: who decides, before each round, how much of gamma a request drafts: ``static`` (all of it),
            ``adaptive`` (what pays by measured cost and past acceptance, down to plain rounds), another registered one,
            or ``auto``: ``adaptive`` where gamma is None, the scheduler plans by cost and there is a cost table.
        max_slots: most requests decoded at once.
        max_len: most tokens of a request, prompt and output; None for the target's limit, at most 4,096.
        kv_budget_bytes: most memory of the target's cache; None for what ``max_slots`` slots of ``max_len`` take,
            if it fits the device.
        step_tokens: most prompt tokens that one step reads beside the decoding rows (chunked prefill).
        prefix_cache: keep what a request leaves in its slot, and begin a prompt with what was read of it before: shared
            prefixes, earlier turns of a conversation. No memory beside the slots is taken; where target or drafter have
            no means for it, prompts are read whole.
        prefix_min_tokens: fewest tokens that are taken over.
        refine_cost: adjust a measured cost table to the times of real steps, between rounds.
        fixed_gamma: verify length where a scheduler needs a cost table and there is none; None for gamma.
        lossless: ``strict`` refuses what would bias the output; ``off`` builds it and says so.
        zero_accept_rounds: warn once when so many drafting rounds accepted nothing.
        count_margins: count greedy tokens whose two best scores are all but tied, in the engine's ``low_margins``;
            costs a second pass over the scores.
        seed: base of request keys; None draws from the operating system. For tests.
        drafter_config, estimator_config, calibrator_config, scheduler_config, gamma_policy_config, verifier_config,
            target_config: settings of the components.
        plugins: allow-list of distributions whose plugins load; None for all.
        disable_plugins: distributions whose plugins do not load.
        overrides: name -> ``dist/name``, where two plugins offer one name.
        kernels: operation -> the kernel that runs it, such as ``{"bias_sample": "triton"}``; ``plain`` for the engine's
            own torch code. What is not named is chosen for the target's device; what is named is taken or refused.
    """

    target: str = "hf"
    drafter: str = "none"
    estimator: str = "auto"
    calibrator: str = "identity"
    scheduler: str = "causal"
    gamma_policy: str = "auto"
    verifier: str = "auto"
    gamma: int | None = None
    max_slots: int = 32
    max_len: int | None = None
    kv_budget_bytes: int | None = None
    step_tokens: int = 512
    prefix_cache: bool = True
    prefix_min_tokens: int = 16
    refine_cost: bool = True
    fixed_gamma: int | None = None
    lossless: str = "strict"
    zero_accept_rounds: int = 64
    count_margins: bool = False
    seed: int | None = None
    drafter_config: Mapping[str, Any] = field(default_factory=dict)
    estimator_config: Mapping[str, Any] = field(default_factory=dict)
    calibrator_config: Mapping[str, Any] = field(default_factory=dict)
    scheduler_config: Mapping[str, Any] = field(default_factory=dict)
    gamma_policy_config: Mapping[str, Any] = field(default_factory=dict)
    verifier_config: Mapping[str, Any] = field(default_factory=dict)
    target_config: Mapping[str, Any] = field(default_factory=dict)
    plugins: tuple[str, ...] | None = None
    disable_plugins: tuple[str, ...] = ()
    overrides: Mapping[str, str] = field(default_factory=dict)
    kernels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("target", "drafter", "estimator", "calibrator", "scheduler", "gamma_policy", "verifier"):
            value = getattr(self, name)
            _check(isinstance(value, str) and value != "", f"EngineConfig.{name}: expected a name, got {value!r}")
        for name, low in (("max_slots", 1), ("step_tokens", 1), ("prefix_min_tokens", 1), ("zero_accept_rounds", 1)):
            _check_number(self, name, low, integer=True)
        for name, low in (("gamma", 0), ("max_len", 2), ("kv_budget_bytes", 1), ("fixed_gamma", 0)):
            if getattr(self, name) is not None:
                _check_number(self, name, low, integer=True)
        for name in ("prefix_cache", "refine_cost"):
            _check_bool(self, name)
        if self.seed is not None:
            _check_number(self, "seed", 0, 2**64 - 1, integer=True)
        for name in ("overrides", *(f.name for f in dataclasses.fields(self) if f.name.endswith("_config"))):
            value = getattr(self, name)
            _check(isinstance(value, Mapping), f"EngineConfig.{name}: expected a mapping, got {value!r}")
        _check(
            self.lossless in ("strict", "off"),
            f"EngineConfig.lossless: expected 'strict' or 'off', got {self.lossless!r}",
        )
