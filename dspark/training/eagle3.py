"""EAGLE-3 under training: the layer runs on its own output for several steps, as it will at inference (training-time
test, arXiv 2503.01840).

Entry i of a sequence pairs the target's feature g_i with token i + 1 and predicts token i + 2. Step k puts the layer's
output of step k - 1 in the feature's place, with token i + 1 + k at rope position i + k; it sees the entries 0..i of
step 0 and, of later steps, those that continued entry i. Its loss is the cross-entropy against the target's law of
token i + 2 + k, weighted by decay^k and divided by the number of tokens (as DeepSpec does, not by those that count).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.checkpoints import DrafterConfig
from dspark.drafters.eagle3 import EagleCore
from dspark.drafters.fit import Fitted
from dspark.training.attention import Turns, attend_steps
from dspark.training.config import LossSettings
from dspark.training.features import Features
from dspark.training.losses import draft_losses
from dspark.training.metrics import Tally
from dspark.training.model import FROZEN, Result
from dspark.training.samples import Sample
from dspark.training.schedule import at
from dspark.training.teacher import Teacher
from dspark.training.vocabulary import draft_ids


class TrainableEagle3(nn.Module):
    """EAGLE-3's network with gradients; embedding and output head stay frozen.

    Args:
        config: what the drafter is; its block size is the number of steps.
        tensors: its tensors by canonical name, without embedding, head and vocabulary maps.
        embedding, head: [V, d] and [Vd, d], the target's.
        embed_scale: factor on input embeddings.
    """

    def __init__(
        self,
        config: DrafterConfig,
        tensors: Mapping[str, Tensor],
        *,
        embedding: Tensor,
        head: Tensor,
        embed_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.config, self.steps = config, config.block_size
        self.core = EagleCore(config, Fitted(tensors, embedding, head, embed_scale, None, None, ()))
        self.turns = Turns(config, self.core.device, self.core.dtype)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name not in FROZEN)

    def unrolled(self, taps: Tensor, tokens: Tensor, lengths: Sequence[int]) -> Iterator[Tensor]:
        """What the output head reads of each step in turn, [T, d].

        Args:
            taps: packed target features [T, m * d_t].
            tokens: the token that each step pairs with each entry, [T, steps].
            lengths: tokens of each sequence.
        """
        core = self.core
        layer = core.layer
        positions = torch.cat([torch.arange(n, device=core.device) for n in lengths])
        hidden = core.project(taps)
        keys: list[Tensor] = []
        values: list[Tensor] = []

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys.append(k)
            values.append(v)
            return attend_steps(q * layer.scale, keys, values, lengths)

        for step in range(self.steps):
            read, residual = layer.inputs(core.embed(tokens[:, step]).to(core.dtype), hidden)
            out = layer.run(read, residual, *self.turns.at(positions + step)[layer.spec], attend)
            normed = core.normed(out)
            yield normed
            hidden = normed if core.eagle.norm_output else out

    def forward(
        self,
        taps: Tensor,
        plan: EaglePlan,
        teacher: Callable[[int, Tensor], Tensor],
        ce_scale: Sequence[float],
        tv_scale: Sequence[float],
    ) -> Result:
        """Losses of packed sequences.

        Args:
            taps: [T, m * d_t].
            plan: which entries count at each step.
            teacher: (step, entries [n]) -> log t [n, Vd] of what these entries predict.
            ce_scale, tv_scale: factors of each step's losses.
        """
        device, shape = taps.device, plan.valid.shape
        ce, tv = (torch.zeros(shape, device=device) for _ in range(2))
        best = torch.full(shape, -1, dtype=torch.int64, device=device)
        loss = torch.zeros((), device=device)
        for k, normed in enumerate(self.unrolled(taps, plan.tokens.to(device), plan.lengths)):
            rows = plan.valid[:, k].nonzero().flatten().to(device)
            logits = F.linear(normed[rows], self.core.head)
            same = torch.ones(len(rows), device=device)
            out = draft_losses(logits, teacher(k, rows), None, same * ce_scale[k], same * tv_scale[k])
            loss = loss + out.total
            ce[rows, k], tv[rows, k], best[rows, k] = out.ce, out.tv, out.best
        return Result(loss, ce, tv, None, best)

    def canonical(self) -> dict[str, Tensor]:
        """The drafter's tensors by canonical name, embedding and head included."""
        return {name: t.detach() for name, t in self.core.canonical().items()}


@dataclass(frozen=True, slots=True)
class EaglePlan:
    """Entries of one forward.

    Attributes:
        lengths: tokens of each sequence.
        tokens: the token that step k pairs with each entry, [T, steps]; 0 beyond the sequence.
        valid: entries that count at step k, bool [T, steps]: token i + k is the assistant's, and the target's law of
            token i + 2 + k is inside the sequence.
        teacher: packed row of that law, [T, steps]; 0 where not valid.
    """

    lengths: tuple[int, ...]
    tokens: Tensor
    valid: Tensor
    teacher: Tensor


def plan_entries(samples: Sequence[Sample], steps: int) -> EaglePlan:
    """Entries of packed samples."""
    tokens, valid, teacher, start = [], [], [], 0
    for sample in samples:
        at_step = np.arange(len(sample))[:, None] + np.arange(steps)  # i + k
        inside = at_step + 1 < len(sample)
        following = np.where(inside, at_step + 1, 0)
        tokens.append(np.where(inside, sample.ids[following], 0))
        ok = inside & sample.loss_mask[np.where(inside, at_step, 0)]
        valid.append(ok)
        teacher.append(np.where(ok, start + following, 0))
        start += len(sample)
    stacked = (torch.from_numpy(np.concatenate(part)) for part in (tokens, valid, teacher))
    return EaglePlan(tuple(map(len, samples)), *stacked)


class EagleObjective:
    """The unrolled losses of EAGLE-3.

    Args:
        drafter: what is trained.
        teacher: the target's law over the draft vocabulary.
        token_map: draft id -> target id [Vd], or None.
        settings: weights; ``step_decay`` is the factor from one step to the next.
    """

    def __init__(
        self, drafter: TrainableEagle3, teacher: Teacher, token_map: Tensor | None, settings: LossSettings
    ) -> None:
        self.drafter, self.teacher, self.settings = drafter, teacher, settings
        self.module: Callable[..., Result] = drafter
        self.gamma = drafter.steps
        self.draft_ids = draft_ids(token_map, drafter.config.vocab_size)

    def plan(self, samples: Sequence[Sample], random: Sequence[np.random.Generator]) -> EaglePlan:
        """Every entry of the samples: nothing is drawn."""
        return plan_entries(samples, self.gamma)

    def totals(self, plan: EaglePlan) -> Tensor:
        """[tokens]."""
        return torch.tensor([float(sum(plan.lengths))], dtype=torch.float64)

    def sizes(self, sequences: int, tokens: int) -> tuple[int, int]:
        """Entries times steps; a step's logits are taken for its own labels."""
        return tokens * self.gamma, tokens * self.gamma

    def loss(self, plan: EaglePlan, features: Sequence[Features], totals: Tensor, share: float, tally: Tally) -> Tensor:
        device = self.drafter.core.device
        last, lse, best = (torch.cat([getattr(f, n) for f in features]).to(device) for n in ("last", "lse", "best"))
        rows = plan.teacher.to(device)
        known = plan.valid & (lse != 0).cpu()[plan.teacher]  # a cache for block drafters holds a few rows less
        plan = EaglePlan(plan.lengths, plan.tokens, known, plan.teacher)
        weights = [self.settings.step_decay**k / float(totals[0]) for k in range(self.gamma)]
        result = self.module(
            torch.cat([f.taps for f in features]).to(device),
            plan,
            lambda k, at: self.teacher.log_probs(last[rows[at, k]], lse[rows[at, k]]),
            [w * at(self.settings.ce, share) for w in weights],
            [w * at(self.settings.tv, share) for w in weights],
        )
        begun = known[:, 0].to(device)
        counted = known.to(device)[begun]
        likely = self.draft_ids.to(device)[best[rows[begun]].long()]
        seen = Result(result.loss, result.ce[begun], result.tv[begun], None, result.best[begun])
        tally.add(seen, counted, counted, likely)
        return result.loss

    def trace(self, plan: EaglePlan, features: Sequence[Features]) -> Iterator[tuple[str, Tensor]]:
        device = self.drafter.core.device
        taps = torch.cat([f.taps for f in features]).to(device)
        yield "fc", self.drafter.core.project(taps)
        for k, normed in enumerate(self.drafter.unrolled(taps, plan.tokens.to(device), plan.lengths)):
            yield f"output of step {k}", normed
            yield f"draft logits of step {k}", F.linear(normed, self.drafter.core.head)
