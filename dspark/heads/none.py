"""The head ``none``: no bias. Every position is drawn from its base logits (DFlash)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dspark.capabilities import HeadCapabilities
from dspark.heads.common import HeadConfig
from dspark.protocols import BuildContext

CAPABILITIES = HeadCapabilities(stateful=False)


@dataclass(frozen=True, slots=True)
class NoHeadConfig(HeadConfig):
    """Settings of ``none``: sizes alone."""


class NoHead:
    """Adds nothing.

    Attributes:
        silent: True: a drafter may leave out the addition.
    """

    capabilities = CAPABILITIES
    silent = True

    def __init__(self, draft_vocab_size: int) -> None:
        self.draft_vocab_size = draft_vocab_size

    def start(self, anchors: Tensor, hidden: Tensor) -> None:
        """No state."""

    def step(self, state: None, prev: Tensor, hidden: Tensor, candidates: Tensor | None = None) -> tuple[Tensor, None]:
        """Zeros [R, Vd], or [R, K] at ``candidates``."""
        width = self.draft_vocab_size if candidates is None else candidates.shape[1]
        return hidden.new_zeros(prev.shape[0], width), None

    def block(self, prev: Tensor, hidden: Tensor) -> Tensor:
        """Zeros [R, gamma, Vd]."""
        return hidden.new_zeros(*prev.shape, self.draft_vocab_size)


def build(config: NoHeadConfig, context: BuildContext) -> NoHead:
    """Factory of ``none``."""
    return NoHead(config.draft_vocab_size)
