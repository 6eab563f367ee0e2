"""A block drafter under training: the inference backbone's own layers over packed sequences, and its heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.checkpoints import DrafterConfig, LayerConfig
from dspark.drafters.backbone import Backbone
from dspark.drafters.block import Layout, block_positions
from dspark.drafters.layers import rms_norm
from dspark.training.attention import Mask, Turns, attend_blocks, block_masks
from dspark.training.blocks import Blocks
from dspark.training.losses import confidence_loss, draft_losses

FROZEN = ("core.embedding", "core.head")
"""The target's, which no drafter trains."""


@dataclass(frozen=True, slots=True)
class Scales:
    """Factors of the losses at n labels, [n] each: weight of the loss x weight of the label / sum of weights."""

    ce: Tensor
    tv: Tensor
    confidence: Tensor


@dataclass(frozen=True, slots=True)
class Result:
    """Losses of A blocks of gamma positions.

    Attributes:
        loss: the weighted sum, differentiable.
        ce, tv: of each position, [A, gamma], detached; 0 at labels that do not count.
        confidence: logits of the confidence head [A, gamma], or None without one.
        best: the draft id that greedy drafting takes after the true prefix, [A, gamma]; -1 at labels that do not count.
    """

    loss: Tensor
    ce: Tensor
    tv: Tensor
    confidence: Tensor | None
    best: Tensor


class TrainableDrafter(nn.Module):
    """Backbone, sequential head and confidence head with gradients; embedding and output head stay frozen.

    Args:
        config: what the drafter is.
        tensors: its tensors by canonical name, without embedding, head and vocabulary maps.
        embedding, head: [V, d] and [Vd, d], the target's.
        sequential: the sequential head, a module with ``block`` (see ``dspark.protocols.SequentialHead``).
        embed_scale: factor on input embeddings.
    """

    def __init__(
        self,
        config: DrafterConfig,
        tensors: Mapping[str, Tensor],
        *,
        embedding: Tensor,
        head: Tensor,
        sequential: Any,
        embed_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.config = config
        self.gamma = config.max_gamma
        self.layout = Layout(config.sample_from_anchor, config.mask_token_id)
        self.core = Backbone(config, tensors, embedding=embedding, head=head, embed_scale=embed_scale)
        self.turns = Turns(config, self.core.device, self.core.dtype)
        self.sequential = sequential
        self.silent = bool(getattr(sequential, "silent", False))
        self.confidence_weight: nn.Parameter | None = None
        self.confidence_bias: nn.Parameter | None = None
        if config.confidence:
            self.confidence_weight = nn.Parameter(tensors["confidence_head.proj.weight"].clone())
            self.confidence_bias = nn.Parameter(tensors["confidence_head.proj.bias"].clone())
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name not in FROZEN)

    def hidden(self, taps: Tensor, blocks: Blocks) -> Tensor:
        """Hidden states [A, gamma, d] behind the final norm, from packed target features [T, m * d_t]."""
        core, size = self.core, self.layout.size(self.gamma)
        anchors = torch.from_numpy(blocks.anchors).to(core.device)
        own = self.turns.at(block_positions(anchors, size).flatten())
        before = self.turns.at(torch.cat([torch.arange(n, device=core.device) for n in blocks.lengths]))
        taps = taps if torch.is_autocast_enabled(taps.device.type) else taps.to(core.dtype)
        ctx = rms_norm(F.linear(taps, core.fc), core.hidden_norm, core.eps)  # core.project, without a copy in float32
        ids = self.layout.inputs(blocks.anchor_ids.to(core.device), self.gamma)
        x = core.embed(ids.flatten()).to(core.dtype)
        masks: dict[LayerConfig, list[Mask]] = {}
        for i, layer in enumerate(core.blocks):
            spec = self.config.layers[i]
            if spec not in masks:
                masks[spec] = block_masks(spec, anchors, blocks, size, core.dtype)
            keys, values = layer.context(ctx, *before[spec])

            def attend(
                q: Tensor,
                k: Tensor,
                v: Tensor,
                keys: Tensor = keys,
                values: Tensor = values,
                mask: list[Mask] = masks[spec],
                scale: float = layer.scale,
            ) -> Tensor:
                return attend_blocks(q * scale, k, v, keys, values, blocks, mask)

            x = layer(x, *own[spec], attend)
        return rms_norm(x, core.norm, core.eps).view(len(anchors), size, -1)[:, self.layout.skip :]

    def corrected(self, hidden: Tensor, prev: Tensor, rows: Tensor | None = None) -> Tensor:
        """Draft logits after the true previous tokens: base logits plus the head's bias.

        Args:
            hidden: [A, gamma, d].
            prev: [A, gamma].
            rows: which of the A * gamma positions are wanted, [n]; None for all.

        Returns:
            [n, Vd], or [A, gamma, Vd].
        """
        stateful = bool(getattr(getattr(self.sequential, "capabilities", None), "stateful", True))
        bias = None
        if stateful and not self.silent:
            bias = self.sequential.block(prev, hidden)
        if rows is not None:
            hidden, prev = hidden.flatten(0, 1)[rows].unsqueeze(1), prev.flatten()[rows].unsqueeze(1)
            bias = None if bias is None else bias.flatten(0, 1)[rows].unsqueeze(1)
        logits = F.linear(hidden, self.core.head)
        if self.core.softcap is not None:
            logits = torch.tanh(logits / self.core.softcap) * self.core.softcap
        if not self.silent:
            logits = logits + (self.sequential.block(prev, hidden) if bias is None else bias)
        return logits if rows is None else logits.squeeze(1)

    def confidence(self, hidden: Tensor, prev: Tensor) -> Tensor | None:
        """Confidence logits [A, gamma] in float32, or None without that head (eq. 7)."""
        if self.confidence_weight is None or self.confidence_bias is None:
            return None
        features = hidden
        if self.config.confidence_with_markov:
            features = torch.cat([hidden, self.sequential.embed(prev).to(hidden.dtype)], dim=-1)
        with torch.autocast(features.device.type, enabled=False):
            return F.linear(features.float(), self.confidence_weight, self.confidence_bias).squeeze(-1)

    def forward(
        self, taps: Tensor, blocks: Blocks, rows: Tensor, labels: Tensor | None, log_teacher: Tensor, scales: Scales
    ) -> Result:
        """Losses of packed blocks.

        Args:
            taps: [T, m * d_t].
            blocks: A blocks.
            rows: which of the A * gamma labels count, [n].
            labels: their draft ids, [n]; -1 outside the draft vocabulary. None for CE against the target's law.
            log_teacher: log t at them, [n, Vd].
            scales: factors of the losses at them.
        """
        hidden = self.hidden(taps, blocks)
        prev = blocks.prev.to(hidden.device)
        out = draft_losses(self.corrected(hidden, prev, rows), log_teacher, labels, scales.ce, scales.tv)
        loss, score = out.total, self.confidence(hidden, prev)
        if score is not None:
            loss = loss + confidence_loss(score.flatten()[rows], 1.0 - out.tv / 2, scales.confidence)
            score = score.detach()
        ce, tv, best = (scattered(t, rows, prev.shape) for t in (out.ce, out.tv, out.best + 1))
        return Result(loss, ce, tv, score, best - 1)

    def canonical(self) -> dict[str, Tensor]:
        """The drafter's tensors by canonical name, embedding and head included."""
        out = self.core.canonical()
        own = getattr(self.sequential, "canonical", None)
        if own is not None:
            out |= {f"markov_head.{name}": t for name, t in own().items()}
        if self.confidence_weight is not None and self.confidence_bias is not None:
            out["confidence_head.proj.weight"] = self.confidence_weight
            out["confidence_head.proj.bias"] = self.confidence_bias
        return {name: t.detach() for name, t in out.items()}


def scattered(values: Tensor, rows: Tensor, shape: torch.Size) -> Tensor:
    """Values [n] at ``rows`` of a tensor of this shape that is zero elsewhere."""
    return values.new_zeros(shape.numel()).index_copy_(0, rows, values).view(shape)
