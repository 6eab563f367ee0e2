"""The head ``markov``: B_k = W1[x_{k-1}] W2 (METHOD eq. 5)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dspark.capabilities import HeadCapabilities
from dspark.heads.common import HeadConfig, MarkovBase
from dspark.protocols import BuildContext

CAPABILITIES = HeadCapabilities(stateful=False)


@dataclass(frozen=True, slots=True)
class MarkovConfig(HeadConfig):
    """Settings of ``markov``."""


class MarkovHead(MarkovBase):
    """A bias that depends on the previous token alone."""

    capabilities = CAPABILITIES

    def start(self, anchors: Tensor, hidden: Tensor) -> None:
        """No state."""

    def step(self, state: None, prev: Tensor, hidden: Tensor, candidates: Tensor | None = None) -> tuple[Tensor, None]:
        """Bias [R, Vd] (or [R, K] at ``candidates``) after tokens ``prev`` [R]."""
        return self.project(self.embed(prev), candidates), None

    def latent(self, state: None, prev: Tensor, hidden: Tensor) -> tuple[Tensor, None]:
        """What W2 multiplies after tokens ``prev`` [R], [R, r], and no state."""
        return self.embed(prev), None

    def block(self, prev: Tensor, hidden: Tensor) -> Tensor:
        """Bias [R, gamma, Vd] of a teacher-forced block ``prev`` [R, gamma]."""
        return self.project(self.embed(prev))


def build(config: MarkovConfig, context: BuildContext) -> MarkovHead:
    """Factory of ``markov``."""
    return MarkovHead(config, {}, context.device, context.dtype)
