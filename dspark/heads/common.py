"""What the sequential heads share: their settings, and the weights W1 and W2 (METHOD section 2, eqs. 4-6)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.errors import CheckpointError, ConfigError
from dspark.ops.packed import linear, pack


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """Settings of a sequential head. A drafter gives these to whichever head it builds.

    Attributes:
        hidden_size: d, width of the backbone's hidden states.
        vocab_size: V, rows of W1: previous tokens are target ids.
        draft_vocab_size: Vd, width of the bias.
        rank: r.
        weights: tensors by name (``markov_w1.weight``, ..) in the device and dtype to run in; without them the head is
            random (normal, 0.02, biases zero), for tests and the start of a training.
        seed: of the random weights.
    """

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    rank: int = 256
    weights: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (("hidden_size", 1), ("vocab_size", 1), ("draft_vocab_size", 1), ("rank", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ConfigError(f"{type(self).__name__}.{name}: expected an integer of at least {low}, got {value!r}")


def parameters(config: HeadConfig, shapes: Mapping[str, tuple[int, ...]], device: Any, dtype: Any) -> dict[str, Tensor]:
    """The head's tensors, checked; random where the config holds none.

    Raises:
        CheckpointError: naming every missing and misshapen tensor.
    """
    if not config.weights:
        generator = torch.Generator().manual_seed(config.seed)
        made = {n: torch.empty(s).normal_(0.0, 0.02, generator=generator) for n, s in shapes.items()}
        made = {n: torch.zeros_like(t) if n.endswith("bias") else t for n, t in made.items()}
        return {n: t.to(device=device, dtype=dtype) for n, t in made.items()}
    faults = []
    for name, shape in shapes.items():
        got = config.weights.get(name)
        if got is None or tuple(got.shape) != shape:
            faults.append(f"{name}: expected {list(shape)}, got {'nothing' if got is None else list(got.shape)}")
    if faults:
        raise CheckpointError("sequential head: " + "; ".join(faults))
    return {name: config.weights[name] for name in shapes}


class MarkovBase(nn.Module):
    """W1 [V, r] by the previous *target* token, W2 [Vd, r] towards draft logits.

    Args:
        config: sizes and weights.
        extra: shapes of the head's other tensors.
    """

    def __init__(
        self, config: HeadConfig, extra: Mapping[str, tuple[int, ...]], device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        if config.rank < 1:
            raise ConfigError(f"{type(self).__name__}: rank must be at least 1, got {config.rank}")
        shapes = {
            "markov_w1.weight": (config.vocab_size, config.rank),
            "markov_w2.weight": (config.draft_vocab_size, config.rank),
            **extra,
        }
        tensors = parameters(config, shapes, device, dtype)
        self.rank = config.rank
        self.w1 = nn.Parameter(tensors["markov_w1.weight"], requires_grad=False)
        self.w2 = nn.Parameter(tensors["markov_w2.weight"], requires_grad=False)
        self._packed_w2: Tensor | None = None
        self._extra = {name: nn.Parameter(tensors[name], requires_grad=False) for name in extra}
        for name, tensor in self._extra.items():
            self.register_parameter(name.replace(".", "_"), tensor)

    def pack(self) -> None:
        """Keep a packed copy of W2, which every step multiplies by; see :mod:`dspark.ops.packed`."""
        self._packed_w2 = pack(self.w2)

    def canonical(self) -> dict[str, Tensor]:
        """Its tensors by name, as ``HeadConfig.weights`` takes them."""
        return {"markov_w1.weight": self.w1, "markov_w2.weight": self.w2, **self._extra}

    def embed(self, prev: Tensor) -> Tensor:
        """W1[x_{k-1}], [.., r] of previous tokens [..]; what the confidence head reads."""
        return F.embedding(prev, self.w1)

    def project(self, latent: Tensor, candidates: Tensor | None = None) -> Tensor:
        """W2 @ latent: bias [.., Vd] of [.., r], or [R, K] at ``candidates`` [R, K] alone for latent [R, r]."""
        if candidates is None:
            return linear(latent, self.w2, None, self._packed_w2)
        rows = F.embedding(candidates, self.w2)
        return torch.bmm(rows, latent.unsqueeze(-1)).squeeze(-1)
