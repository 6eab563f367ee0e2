"""What a sweep compares: plain decoding, drafters under schedulers and gammas, and other people's decoders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dspark.bench.load import Closed, Load
from dspark.errors import ConfigError, nearest

STATIC_GAMMAS = (1, 2, 3, 5, 7)
"""Gamma 1 stands for multi-token prediction with one extra token."""
SCHEDULERS = ("causal", "lookahead", "lagged", "threshold", "fixed", "global")
PLAIN, NGRAM, AUTO = "plain", "ngram", "auto"
GENERATE, LOOKUP, VLLM = "generate", "lookup", "vllm"
EXTERNAL = (GENERATE, LOOKUP, VLLM)


@dataclass(frozen=True, slots=True)
class System:
    """One of what is compared.

    Attributes:
        name: how it is asked for, and its label.
        about: in words.
        settings: fields of ``EngineConfig``; empty for what is not this package's engine.
    """

    name: str
    about: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def external(self) -> bool:
        """Not this package's engine."""
        return self.name in EXTERNAL

    @property
    def static_gamma(self) -> int | None:
        """g of ``gamma-g``, 0 of plain decoding; None for what chooses by itself."""
        if self.name == PLAIN:
            return 0
        return int(self.name.removeprefix("gamma-")) if self.name.startswith("gamma-") else None


def known_systems(drafter: str, gamma: int | None = None) -> dict[str, System]:
    """Every system, by name.

    Args:
        drafter: of all but ``plain`` and ``ngram``.
        gamma: the drafter's longest block; static gammas beyond it are left out. None for any.
    """
    engine = [
        System(PLAIN, "no drafts", {"drafter": "none"}),
        System(NGRAM, "prompt lookup, gamma chosen", {"drafter": "ngram"}),
        System(AUTO, "the drafter as it comes: gamma, guard and lengths chosen by cost", {"drafter": drafter}),
        *(
            System(name, f"full gamma, lengths by {name}", _static(drafter, scheduler=name))
            for name in SCHEDULERS
        ),
        *(
            System(f"gamma-{g}", f"always {g}, all verified", _static(drafter, scheduler="fixed", gamma=g))
            for g in STATIC_GAMMAS
            if gamma is None or g <= gamma
        ),
    ]  # fmt: skip
    others = [
        System(GENERATE, "transformers' generate"),
        System(LOOKUP, "transformers' generate with prompt lookup"),
        System(VLLM, "vLLM's server"),
    ]
    return {system.name: system for system in (*engine, *others)}


def _static(drafter: str, **settings: Any) -> dict[str, Any]:
    return {"drafter": drafter, "gamma_policy": "static", **settings}


def choose(known: Mapping[str, System], names: Sequence[str]) -> list[System]:
    """The systems of these names, in the order of ``known``; all for no names.

    Raises:
        ConfigError: an unknown name, with the nearest.
    """
    for name in names:
        if name not in known:
            raise ConfigError(f"unknown system {name!r}{nearest(name, known)} (known: {', '.join(known)})")
    return [system for system in known.values() if not names or system.name in names]


def left_out(system: System, load: Load, *, greedy: bool) -> str:
    """Why a system has no run under a load; empty where it has."""
    if system.name in (GENERATE, LOOKUP) and not isinstance(load, Closed):
        return "transformers' generate admits no request while a batch runs"
    if system.name == LOOKUP and isinstance(load, Closed) and load.concurrency > 1:
        return "transformers' prompt lookup decodes one request at a time"
    if system.settings.get("scheduler") == "global" and not greedy:
        return "the retrospective scheduler is exact for greedy and seeded requests alone"
    return ""
