"""The head ``conv``: B_k = (e_{k-1} + P silu(C_1 e_{k-1} + .. + C_w e_{k-w} + b)) W2, where e_j = W1[x_j].

x_0 is the anchor; a block knows no token before it, and e_j is zero there. With P = 0, as in a new head, this is the
Markov head (DSpark, arXiv 2607.05147, eq. 5).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark import CheckpointError
from dspark.capabilities import HeadCapabilities
from dspark.heads.common import HeadConfig
from dspark.protocols import BuildContext

MOST_WIDTH = 16


@dataclass(frozen=True, slots=True)
class ConvConfig(HeadConfig):
    """Settings beside the sizes that a drafter gives (hidden_size, vocab_size, draft_vocab_size, rank, weights, seed).

    Attributes:
        width: how many tokens the convolution reads, w.
    """

    width: int = 3

    def __post_init__(self) -> None:
        HeadConfig.__post_init__(self)
        whole = isinstance(self.width, int) and not isinstance(self.width, bool)
        if not whole or not 1 <= self.width <= MOST_WIDTH:
            raise ValueError(f"width: expected an integer from 1 to {MOST_WIDTH}, got {self.width!r}")
        if self.rank < 1:
            raise ValueError(f"rank: expected an integer of at least 1, got {self.rank!r}")


class ConvHead(nn.Module):
    """A Markov bias that a causal convolution over the block's tokens corrects.

    Its state, [R, w - 1, r], is the embeddings of the tokens before the previous one, oldest first.
    """

    capabilities = HeadCapabilities(stateful=True)
    embeddings: Tensor
    conv: Tensor
    conv_bias: Tensor
    mix: Tensor
    output: Tensor

    def __init__(self, config: ConvConfig, context: BuildContext) -> None:
        super().__init__()
        self.width, self.rank = config.width, config.rank
        for name, tensor in tensors(config).items():
            placed = tensor.to(device=context.device, dtype=context.dtype)
            setattr(self, name, nn.Parameter(placed, requires_grad=False))

    def start(self, anchors: Tensor, hidden: Tensor) -> Tensor:
        """Nothing before the anchors [R]: zeros."""
        return self.embeddings.new_zeros(anchors.shape[0], self.width - 1, self.rank)

    def step(
        self, state: Tensor, prev: Tensor, hidden: Tensor, candidates: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Bias [R, Vd] (or [R, K] at ``candidates``) after tokens ``prev`` [R], and the next state."""
        window = torch.cat((state, F.embedding(prev, self.embeddings).unsqueeze(1)), dim=1)
        return self.project(self._mixed(window.flatten(1), window[:, -1]), candidates), window[:, 1:]

    def block(self, prev: Tensor, hidden: Tensor) -> Tensor:
        """Bias [R, gamma, Vd] of a teacher-forced block ``prev`` [R, gamma], all positions at once."""
        embedded = F.embedding(prev, self.embeddings)
        padded = F.pad(embedded, (0, 0, self.width - 1, 0))
        windows = torch.cat([padded[:, i : i + prev.shape[1]] for i in range(self.width)], dim=-1)
        return self.project(self._mixed(windows, embedded))

    def _mixed(self, window: Tensor, last: Tensor) -> Tensor:
        """What W2 multiplies, [.., r], from embeddings [.., w * r] (oldest first) and those of x_{k-1} [.., r]."""
        return last + F.linear(F.silu(F.linear(window, self.conv, self.conv_bias)), self.mix)

    def project(self, mixed: Tensor, candidates: Tensor | None = None) -> Tensor:
        """W2 @ mixed: bias [.., Vd], or [R, K] at the draft ids ``candidates`` [R, K]."""
        if candidates is None:
            return F.linear(mixed, self.output)
        return torch.bmm(F.embedding(candidates, self.output), mixed.unsqueeze(-1)).squeeze(-1)

    def canonical(self) -> dict[str, Tensor]:
        """Tensors by name, as a checkpoint stores them and ``weights`` brings them back."""
        return {name: getattr(self, name) for name in ("embeddings", "conv", "conv_bias", "mix", "output")}


def tensors(config: ConvConfig) -> dict[str, Tensor]:
    """A checkpoint's tensors, or those of a new head: W1, C and W2 normal (0.02 and 1 / sqrt(w r)), P and b zero.

    Raises:
        CheckpointError: naming every missing and misshapen tensor.
    """
    r, fan = config.rank, config.width * config.rank
    shapes = {
        "embeddings": (config.vocab_size, r),
        "conv": (r, fan),
        "conv_bias": (r,),
        "mix": (r, r),
        "output": (config.draft_vocab_size, r),
    }
    if config.weights:
        found: dict[str, Tensor] = {name: config.weights[name] for name in shapes if name in config.weights}
        faults = [
            f"{name}: expected {list(shape)}, got {list(found[name].shape) if name in found else 'nothing'}"
            for name, shape in shapes.items()
            if name not in found or tuple(found[name].shape) != shape
        ]
        if faults:
            raise CheckpointError("dspark-head-conv/conv: " + "; ".join(faults))
        return found
    generator = torch.Generator().manual_seed(config.seed)
    spread = {"embeddings": 0.02, "conv": fan**-0.5, "output": 0.02}
    return {
        name: torch.randn(shape, generator=generator) * spread[name] if name in spread else torch.zeros(shape)
        for name, shape in shapes.items()
    }


def build(config: ConvConfig, context: BuildContext) -> ConvHead:
    """Factory of ``conv``."""
    return ConvHead(config, context)
