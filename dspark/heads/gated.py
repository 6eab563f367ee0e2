"""The head ``gated``: B_k = (sigmoid(gate([h_k; W1[x_{k-1}]])) * W1[x_{k-1}]) W2 (METHOD section 2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.capabilities import HeadCapabilities
from dspark.heads.common import HeadConfig, MarkovBase
from dspark.protocols import BuildContext

CAPABILITIES = HeadCapabilities(stateful=False)


@dataclass(frozen=True, slots=True)
class GatedConfig(HeadConfig):
    """Settings of ``gated``."""


class GatedHead(MarkovBase):
    """A Markov bias whose embedding is gated by the hidden state of its position."""

    capabilities = CAPABILITIES

    def start(self, anchors: Tensor, hidden: Tensor) -> None:
        """No state."""

    def _latent(self, prev: Tensor, hidden: Tensor) -> Tensor:
        e = self.embed(prev)
        gate = F.linear(torch.cat((hidden, e), dim=-1), self._extra["gate_proj.weight"], self._extra["gate_proj.bias"])
        return torch.sigmoid(gate) * e

    def step(self, state: None, prev: Tensor, hidden: Tensor, candidates: Tensor | None = None) -> tuple[Tensor, None]:
        """Bias [R, Vd] (or [R, K] at ``candidates``) after ``prev`` [R], with the position's hidden state [R, d]."""
        return self.project(self._latent(prev, hidden), candidates), None

    def latent(self, state: None, prev: Tensor, hidden: Tensor) -> tuple[Tensor, None]:
        """What W2 multiplies after tokens ``prev`` [R], [R, r], and no state."""
        return self._latent(prev, hidden), None

    def block(self, prev: Tensor, hidden: Tensor) -> Tensor:
        """Bias [R, gamma, Vd] of a teacher-forced block: prev [R, gamma], hidden [R, gamma, d]."""
        return self.project(self._latent(prev, hidden))


def build(config: GatedConfig, context: BuildContext) -> GatedHead:
    """Factory of ``gated``."""
    extra = {"gate_proj.weight": (config.rank, config.hidden_size + config.rank), "gate_proj.bias": (config.rank,)}
    return GatedHead(config, extra, context.device, context.dtype)
