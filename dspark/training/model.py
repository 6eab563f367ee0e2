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
    """Factor of each position's losses: weight of the loss x weight of the position / sum of weights."""

    ce: Tensor
    tv: Tensor
    confidence: Tensor


@dataclass(frozen=True, slots=True)
class Result:
    """Losses of A blocks of gamma positions.

    Attributes:
        loss: the weighted sum, differentiable.
        ce, tv: of each position, [A, gamma], detached.
        confidence: logits of the confidence head [A, gamma], or None without one.
        best: the draft id that greedy drafting takes after the true prefix, [A, gamma].
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
        ctx = core.project(taps)
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

    def corrected(self, hidden: Tensor, prev: Tensor) -> Tensor:
        """Draft logits [A, gamma, Vd] after the true previous tokens [A, gamma]: base logits plus the head's bias."""
        base = F.linear(hidden, self.core.head)
        if self.core.softcap is not None:
            base = torch.tanh(base / self.core.softcap) * self.core.softcap
        return base if self.silent else base + self.sequential.block(prev, hidden)

    def confidence(self, hidden: Tensor, prev: Tensor) -> Tensor | None:
        """Confidence logits [A, gamma] in float32, or None without that head (eq. 7)."""
        if self.confidence_weight is None or self.confidence_bias is None:
            return None
        features = hidden
        if self.config.confidence_with_markov:
            features = torch.cat([hidden, self.sequential.embed(prev).to(hidden.dtype)], dim=-1)
        with torch.autocast(features.device.type, enabled=False):
            return F.linear(features.float(), self.confidence_weight, self.confidence_bias).squeeze(-1)

    def forward(self, taps: Tensor, blocks: Blocks, labels: Tensor, log_teacher: Tensor, scales: Scales) -> Result:
        """Losses of packed blocks.

        Args:
            taps: [T, m * d_t].
            blocks: A blocks.
            labels: draft ids of the labels, [A, gamma]; -1 outside the draft vocabulary.
            log_teacher: log t [A * gamma, Vd].
            scales: factors of the losses, [A, gamma] each.
        """
        hidden = self.hidden(taps, blocks)
        prev = blocks.prev.to(hidden.device)
        logits = self.corrected(hidden, prev).flatten(0, 1)
        out = draft_losses(logits, log_teacher, labels.flatten(), scales.ce.flatten(), scales.tv.flatten())
        loss, score = out.total, self.confidence(hidden, prev)
        if score is not None:
            loss = loss + confidence_loss(score.flatten(), 1.0 - out.tv / 2, scales.confidence.flatten())
            score = score.detach()
        ce, tv, best = (t.view(labels.shape) for t in (out.ce, out.tv, out.best))
        return Result(loss, ce, tv, score, best)

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
