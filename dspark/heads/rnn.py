"""The head ``rnn`` (METHOD eq. 6): z_k = [s_{k-1}; W1[x_{k-1}]; h_k] -> (gate, candidate, output), s_0 = 0.

s_k = sigmoid(g) * s_{k-1} + (1 - sigmoid(g)) * tanh(c), and B_k = W2 tanh(o): the output sees the old state only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.capabilities import HeadCapabilities
from dspark.heads.common import HeadConfig, MarkovBase
from dspark.protocols import BuildContext

CAPABILITIES = HeadCapabilities(stateful=True)


@dataclass(frozen=True, slots=True)
class RNNConfig(HeadConfig):
    """Settings of ``rnn``."""


class RNNHead(MarkovBase):
    """A bias that depends on all tokens of the block so far."""

    capabilities = CAPABILITIES

    def start(self, anchors: Tensor, hidden: Tensor) -> Tensor:
        """s_0 = 0, [R, r]; a new tensor every block, so nothing is kept across rounds or slots."""
        return hidden.new_zeros(anchors.shape[0], self.rank)

    def _advance(self, state: Tensor, prev: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(latent [R, r], next state [R, r])."""
        z = torch.cat((state, self.embed(prev), hidden), dim=-1)
        joint = F.linear(z, self._extra["joint_proj.weight"], self._extra["joint_proj.bias"])
        gate, candidate, output = joint.chunk(3, dim=-1)
        keep = torch.sigmoid(gate)
        return torch.tanh(output), keep * state + (1 - keep) * torch.tanh(candidate)

    def step(
        self, state: Tensor, prev: Tensor, hidden: Tensor, candidates: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Bias [R, Vd] (or [R, K] at ``candidates``) and the next state."""
        latent, state = self._advance(state, prev, hidden)
        return self.project(latent, candidates), state

    def latent(self, state: Tensor, prev: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What W2 multiplies after tokens ``prev`` [R], [R, r], and the next state."""
        return self._advance(state, prev, hidden)

    def block(self, prev: Tensor, hidden: Tensor) -> Tensor:
        """Bias [R, gamma, Vd] of a teacher-forced block, left to right."""
        state = hidden.new_zeros(prev.shape[0], self.rank)
        latents = []
        for k in range(prev.shape[1]):
            latent, state = self._advance(state, prev[:, k], hidden[:, k])
            latents.append(latent)
        return self.project(torch.stack(latents, dim=1))


def build(config: RNNConfig, context: BuildContext) -> RNNHead:
    """Factory of ``rnn``."""
    r = config.rank
    extra = {"joint_proj.weight": (3 * r, 2 * r + config.hidden_size), "joint_proj.bias": (3 * r,)}
    return RNNHead(config, extra, context.device, context.dtype)
