"""What a trainer asks of whatever it trains, and the objective of block drafters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from dspark.checkpoints import DrafterConfig
from dspark.training.blocks import Blocks, make_blocks, sample_anchors
from dspark.training.config import LossSettings
from dspark.training.features import Features
from dspark.training.losses import decay_weights
from dspark.training.metrics import Tally
from dspark.training.model import Result, Scales, TrainableDrafter, scattered
from dspark.training.samples import Sample
from dspark.training.schedule import at
from dspark.training.teacher import Teacher
from dspark.training.vocabulary import draft_ids

EPSILON = 1e-6
"""Added to each sum of weights, as DeepSpec does."""


class Drafter(Protocol):
    """A module that is trained, as it is written to disk."""

    config: DrafterConfig
    core: Any

    def canonical(self) -> dict[str, Tensor]:
        """Its tensors by canonical name, embedding and head included."""
        ...


class Objective(Protocol):
    """How a drafter learns.

    A step has several forwards, on one process or many. Each is *planned* first, from ids and masks alone; the plans'
    ``totals`` are summed over all of them; then each forward's loss is taken over these sums, so that the sum of the
    losses is that of one large forward.

    Attributes:
        drafter: the module with the parameters.
        module: what is called: the drafter, or a wrapper around it.
        gamma: drafts of a block; a conversation has to be longer.
    """

    drafter: Any
    module: Callable[..., Any]
    gamma: int

    def plan(self, samples: Sequence[Sample], random: Sequence[np.random.Generator]) -> Any:
        """What one forward will look at; ``random`` is each sample's own generator."""
        ...

    def totals(self, plan: Any) -> Tensor:
        """Sums of weights that the losses are divided by, float64."""
        ...

    def sizes(self, sequences: int, tokens: int) -> tuple[int, int]:
        """Blocks and labels of a forward over so many tokens, for a prediction of its memory."""
        ...

    def loss(self, plan: Any, features: Sequence[Features], totals: Tensor, share: float, tally: Tally) -> Tensor:
        """The forward's loss at a share of the run; what it saw is counted in ``tally``."""
        ...

    def trace(self, plan: Any, features: Sequence[Features]) -> Iterator[tuple[str, Tensor]]:
        """Tensors of one forward by name, in the order in which they are computed."""
        ...


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """Blocks of one forward.

    Attributes:
        counted: labels that count, bool [A, gamma].
        labels: draft ids of the labels, [A, gamma]; -1 outside the draft vocabulary.
        known: labels whose CE counts: those that the draft vocabulary has, or all that count where it is taken against
            the target's law.
    """

    blocks: Blocks
    counted: Tensor
    labels: Tensor
    known: Tensor


class BlockObjective:
    """The three losses over blocks at sampled anchors (METHOD section 5).

    Args:
        drafter: what is trained.
        teacher: the target's law over the draft vocabulary.
        token_map: draft id -> target id [Vd], or None.
        settings: weights and decay.
        anchors: blocks of a conversation in one pass.
    """

    def __init__(
        self,
        drafter: TrainableDrafter,
        teacher: Teacher,
        token_map: Tensor | None,
        settings: LossSettings,
        anchors: int,
    ) -> None:
        self.drafter, self.teacher, self.settings, self.anchors = drafter, teacher, settings, anchors
        self.module: Callable[..., Result] = drafter
        self.gamma = drafter.gamma
        self.draft_ids = draft_ids(token_map, drafter.config.vocab_size)
        self.decay = decay_weights(drafter.gamma, settings.decay)
        self.weights = torch.ones_like(self.decay) if settings.thin else self.decay
        self.by_law = settings.against == "law"

    def plan(self, samples: Sequence[Sample], random: Sequence[np.random.Generator]) -> BlockPlan:
        pairs = zip(samples, random, strict=True)
        anchors = [sample_anchors(s.loss_mask, self.anchors, r.random(len(s) - 1)) for s, r in pairs]
        draws = [r.random(len(at)) for r, at in zip(random, anchors, strict=True)] if self.settings.thin else None
        return self.plan_at(samples, anchors, draws)

    def plan_at(
        self, samples: Sequence[Sample], anchors: Sequence[Any], draws: Sequence[Any] | None = None
    ) -> BlockPlan:
        """The plan for given anchors, [A_s] positions of each sample; with ``draws`` in [0, 1), [A_s] each, a block's
        label k counts where its draw is below w_k."""
        blocks = make_blocks(samples, anchors, self.gamma)
        labels, counted = self.draft_ids[blocks.labels], blocks.valid
        if draws is not None:
            counted = counted & (torch.from_numpy(np.concatenate(draws)).unsqueeze(1) < self.decay.double())
        return BlockPlan(blocks, counted, labels, counted if self.by_law else counted & (labels >= 0))

    def totals(self, plan: BlockPlan) -> Tensor:
        """[sum of weights of labels whose CE counts, of all that count]."""
        weights = self.weights.double()
        return torch.stack([(plan.known * weights).sum(), (plan.counted * weights).sum()])

    def sizes(self, sequences: int, tokens: int) -> tuple[int, int]:
        blocks = sequences * self.anchors
        return blocks, round(blocks * float(self.decay.sum() if self.settings.thin else self.gamma))

    def scales(self, plan: BlockPlan, totals: Tensor, share: float) -> Scales:
        """Factors of the losses at a share of the run, at all labels [A, gamma]."""
        known, counted = (float(t) + EPSILON for t in totals)
        s, every = self.settings, plan.counted * self.weights
        return Scales(
            plan.known * self.weights * (at(s.ce, share) / known),
            every * (at(s.tv, share) / counted),
            every * (at(s.confidence, share) / counted),
        )

    def loss(self, plan: BlockPlan, features: Sequence[Features], totals: Tensor, share: float, tally: Tally) -> Tensor:
        device = self.drafter.core.device
        rows = plan.counted.flatten().nonzero().flatten()
        taps, last, lse, best = gather(features, plan.blocks.teacher.flatten()[rows], device)
        all_scales = self.scales(plan, totals, share)
        scales = (s.flatten()[rows].to(device) for s in (all_scales.ce, all_scales.tv, all_scales.confidence))
        labels = None if self.by_law else plan.labels.flatten()[rows].to(device)
        log_teacher = self.teacher.log_probs(last, lse)
        result = self.module(taps, plan.blocks, rows.to(device), labels, log_teacher, Scales(*scales))
        likely = scattered(self.draft_ids.to(device)[best.long()], rows.to(device), plan.labels.shape)
        tally.add(result, plan.counted.to(device), plan.known.to(device), likely)
        return result.loss

    def trace(self, plan: BlockPlan, features: Sequence[Features]) -> Iterator[tuple[str, Tensor]]:
        drafter, device = self.drafter, self.drafter.core.device
        taps, last, lse, _ = gather(features, plan.blocks.teacher.flatten(), device)
        layers: list[Tensor] = []
        handles = [layer.register_forward_hook(lambda *args: layers.append(args[-1])) for layer in drafter.core.blocks]
        try:
            yield "fc", drafter.core.project(taps)
            hidden = drafter.hidden(taps, plan.blocks)
        finally:
            for handle in handles:
                handle.remove()
        yield from ((f"output of layers.{i}", x) for i, x in enumerate(layers))
        yield "hidden states behind norm", hidden
        prev = plan.blocks.prev.to(device)
        yield "draft logits", drafter.corrected(hidden, prev)
        score = drafter.confidence(hidden, prev)
        if score is not None:
            yield "confidence logits", score
        yield "the target's probabilities", self.teacher.log_probs(last, lse).exp()


def gather(features: Sequence[Features], rows: Tensor, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Packed taps [T, m * d_t]; final states [n, d], log-sum-exps and best tokens [n] at packed rows ``rows`` [n]."""

    def packed(name: str) -> Tensor:
        return torch.cat([getattr(f, name) for f in features])

    taps, last, lse, best = packed("taps"), packed("last")[rows], packed("lse")[rows], packed("best")[rows]
    return taps.to(device), last.to(device), lse.to(device), best.to(device)


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that are trained, by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}
