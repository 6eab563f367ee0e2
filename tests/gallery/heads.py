"""Heads that break a promise, each one a change to a sound one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dspark.capabilities import HeadCapabilities
from dspark.heads.common import HeadConfig
from dspark.plugins import Kind

from .base import Broken


@dataclass(frozen=True, slots=True)
class Config(HeadConfig):
    """The sizes, and nothing else."""


class Head(nn.Module):
    """Sound: a Markov bias with a gate on the hidden state."""

    capabilities = HeadCapabilities()

    def __init__(self, config: Any, context: Any) -> None:
        super().__init__()
        self.vocab, self.width = config.vocab_size, config.draft_vocab_size
        shapes = {
            "first": (self.vocab, config.rank),
            "second": (config.rank, self.width),
            "gate": (config.hidden_size,),
        }
        for name, shape in shapes.items():
            made = torch.full(shape, 0.1, device=context.device, dtype=context.dtype)
            setattr(self, name, nn.Parameter(config.weights.get(name, made), requires_grad=False))

    def start(self, anchors: Tensor, hidden: Tensor) -> Any:
        return None

    def bias(self, prev: Tensor, hidden: Tensor) -> Tensor:
        return torch.sigmoid(hidden @ self.gate).unsqueeze(-1) * (self.first[prev] @ self.second)

    def step(self, state: Any, prev: Tensor, hidden: Tensor) -> tuple[Tensor, Any]:
        return self.bias(prev, hidden), state

    def block(self, prev: Tensor, hidden: Tensor) -> Tensor:
        return self.bias(prev, hidden)

    def canonical(self) -> dict[str, Tensor]:
        return {"first": self.first, "second": self.second, "gate": self.gate}


class Leaks(Head):
    """Training reads the token that it is to predict; the rolled index goes unnoticed, since accuracy rises."""

    def block(self, prev: Tensor, hidden: Tensor) -> Tensor:
        return self.bias(torch.cat([prev[:, 1:], prev[:, -1:]], dim=1), hidden)


class LooksAtTheLast(Head):
    def block(self, prev: Tensor, hidden: Tensor) -> Tensor:
        return self.bias(prev, hidden) + 0.01 * prev[:, -1:, None]


class KeepsState(Head):
    def start(self, anchors: Tensor, hidden: Tensor) -> Any:
        self.seen = torch.zeros(len(anchors), self.width, dtype=hidden.dtype, device=hidden.device)
        return None

    def step(self, state: Any, prev: Tensor, hidden: Tensor) -> tuple[Tensor, Any]:
        self.seen = self.seen + self.bias(prev, hidden)
        return self.seen, None

    def block(self, prev: Tensor, hidden: Tensor) -> Tensor:
        return self.bias(prev, hidden).cumsum(1)


class NeverForgets(KeepsState):
    """The state of the last block is where the next one begins."""

    seen: Any = 0.0

    def start(self, anchors: Tensor, hidden: Tensor) -> Any:
        return None


class Unscaled(Head):
    def step(self, state: Any, prev: Tensor, hidden: Tensor) -> tuple[Tensor, Any]:
        return self.bias(prev, hidden) * self.first.shape[1] ** -0.5, state


class TwoTokens(Head):
    """Reads the last two tokens, but declares that it has no state."""

    def start(self, anchors: Tensor, hidden: Tensor) -> Any:
        return torch.zeros(len(anchors), self.width, dtype=hidden.dtype, device=hidden.device)

    def step(self, state: Any, prev: Tensor, hidden: Tensor) -> tuple[Tensor, Any]:
        own = self.bias(prev, hidden)
        return own + 0.5 * state, own

    def block(self, prev: Tensor, hidden: Tensor) -> Tensor:
        own = self.bias(prev, hidden)
        return own + 0.5 * torch.cat([torch.zeros_like(own[:, :1]), own[:, :-1]], dim=1)


class InPlace(Head):
    def bias(self, prev: Tensor, hidden: Tensor) -> Tensor:
        return super().bias(prev, hidden.clamp_(min=0))


class ForgetsTheGate(Head):
    def canonical(self) -> dict[str, Tensor]:
        return {"first": self.first, "second": self.second}


class NoGradient(Head):
    @torch.no_grad()
    def block(self, prev: Tensor, hidden: Tensor) -> Tensor:
        return self.bias(prev, hidden)


class Detached(Head):
    def bias(self, prev: Tensor, hidden: Tensor) -> Tensor:
        return torch.sigmoid(hidden @ self.gate.detach()).unsqueeze(-1) * (self.first[prev] @ self.second)


class Single(Head):
    def bias(self, prev: Tensor, hidden: Tensor) -> Tensor:
        return super().bias(prev, hidden).float()


class OnTheHost(Head):
    def bias(self, prev: Tensor, hidden: Tensor) -> Tensor:
        return super().bias(prev, hidden) + torch.linspace(0, 1, self.width, dtype=hidden.dtype)


class NotANumber(Head):
    def bias(self, prev: Tensor, hidden: Tensor) -> Tensor:
        return super().bias(prev, hidden).log()


class Normalised(Head):
    """Normalises over the batch, as batch norm in training mode does."""

    def bias(self, prev: Tensor, hidden: Tensor) -> Tensor:
        made = super().bias(prev, hidden)
        return made - made.mean(dim=0, keepdim=True)


class WrongWidth(Head):
    def __init__(self, config: Any, context: Any) -> None:
        super().__init__(config, context)
        self.second = nn.Parameter(torch.zeros(config.rank, self.vocab, device=context.device, dtype=context.dtype))


class Pairs(Head):
    """Handles positions two by two, and assumes that there are."""

    def block(self, prev: Tensor, hidden: Tensor) -> Tensor:
        rows, gamma = prev.shape
        pairs = self.bias(prev.view(rows, gamma // 2, 2), hidden.view(rows, gamma // 2, 2, -1))
        return pairs.view(rows, gamma, -1)


class WrongCandidates(Head):
    def project(self) -> None:
        """Says that step takes candidates."""

    def step(self, state: Any, prev: Tensor, hidden: Tensor, candidates: Any = None) -> tuple[Tensor, Any]:
        bias = self.bias(prev, hidden)
        return (bias if candidates is None else bias[:, : candidates.shape[1]]), state


SHARED: list[Any] = []


def one_for_all(config: Any, context: Any) -> Head:
    if not SHARED:
        SHARED.append(Head(config, context))
    return SHARED[0]  # type: ignore[no-any-return]


def slow(config: Any, context: Any) -> Head:
    import time

    began = time.process_time()
    while time.process_time() - began < 0.3:
        pass
    return Head(config, context)


@dataclass(frozen=True)
class Lenient(Config):
    """Takes a scale and never looks at it."""

    scale: float = 1.0


def head(name: str, factory: Any, check: str = "", *words: str, **more: Any) -> Broken:
    return Broken(name, Kind.SEQUENTIAL_HEAD, factory, check, words, more.pop("config", Config), **more)


HEADS = [
    head("sound", Head),
    head("leaks the next token", Leaks, "test_prefix_causality", "`block`", "moved the bias"),
    head("reads the last token of the block", LooksAtTheLast, "test_prefix_causality", "moved the bias"),
    head("keeps its state on itself", KeepsState, "test_state_is_passed_not_kept", "drafted in turns"),
    head("begins where the last block ended", NeverForgets, "test_determinism", "another bias the second time"),
    head("step differs from block", Unscaled, "test_step_equals_block", "differ by"),
    head("has state and does not say so", TwoTokens, "test_stateless_is_true", "one by one"),
    head("writes to hidden", InPlace, "test_inputs_stay", "wrote to"),
    head("forgets a tensor when it is stored", ForgetsTheGate, "test_serialisation_round_trip", "leaves out 1 of 3"),
    head("has no gradient", NoGradient, "test_gradients", "no_grad"),
    head("detaches a weight", Detached, "test_gradients", "no gradient reaches gate"),
    head("always answers in float32", Single, "test_shapes_and_dtypes", "float32"),
    head("makes a tensor on the host", OnTheHost, "test_device", "meta"),
    head("NaN", NotANumber, "test_shapes_and_dtypes", "not finite"),
    head("normalises over the batch", Normalised, "test_rows_are_apart", "rows"),
    head("bias over the target's vocabulary", WrongWidth, "test_shapes_and_dtypes", "(1, 1, 11), expected (1, 1, 9)"),
    head("needs an even block", Pairs, "test_shapes_and_dtypes", "gamma = 1"),
    head("gives wrong candidates", WrongCandidates, "test_candidates", "differ by"),
    head("one object for all engines", one_for_all, "test_every_build_is_new", "same object"),
    head("slow start", slow, "test_it_builds_quickly", "processor time", suite={"build_seconds": 0.1}),
    head(
        "takes any scale",
        Head,
        "test_bad_settings_are_refused",
        "accepted",
        "nonsense",
        config=Lenient,
        suite={"bad_settings": [{"scale": "nonsense"}]},
    ),
    head("builds something else", lambda config, context: object(), "test_it_builds", "it lacks start, step, block"),
]
