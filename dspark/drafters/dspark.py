"""The drafter ``dspark``: parallel backbone, sequential head, drafts left to right (METHOD sections 1 and 2).

DFlash is the same with the head ``none``. The checkpoint says which, and in which block layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.capabilities import DrafterCapabilities
from dspark.checkpoints import Checkpoint
from dspark.drafters.backbone import Backbone
from dspark.drafters.block import Layout
from dspark.drafters.fit import Fitted, check_source, fit, open_checkpoint, place
from dspark.drafters.forced import forced_block
from dspark.drafters.probe import probe
from dspark.drafters.probe_text import ProbeReport
from dspark.drafters.sequential import make_head
from dspark.drafters.taps import TapBuffer
from dspark.errors import CheckpointError, ConfigError, RowFault
from dspark.ops import reference
from dspark.protocols import BuildContext, DraftSampler, SequentialHead
from dspark.sampling.fused import Block, FusedDrafts
from dspark.types import BatchView, Committed, DraftBlock, IntArray

CAPABILITIES = DrafterCapabilities(needs_taps=True)


@dataclass(frozen=True, slots=True)
class DSparkConfig:
    """Settings of ``dspark``.

    Attributes:
        checkpoint: folder or Hub id of a DeepSpec, speculators, SpecForge or z-lab drafter, or a ``Checkpoint``.
        revision: branch, tag or commit of a Hub id.
        dtype: ``float16``, ``bfloat16``, ``float32`` or ``float64``; None for the target's.
        candidates: bias only so many of the most likely tokens of each position, with q cut to exactly those: still
            lossless, and most of the head's cost is gone. None for the whole draft vocabulary.
        context_window: most context positions that a block sees, for long inputs; None for all.
        sample_from_anchor: overrides the checkpoint's block layout, for files that say the wrong one.
        pack: keep weights in oneDNN's layout too, which about halves the time of small batches in bfloat16 on CPU and
            doubles their memory; no effect elsewhere.
        head: another registered sequential head in place of the checkpoint's, with ``head_config``.
        head_config: its settings, beside the sizes that the drafter fills in.
    """

    checkpoint: str | Path | Checkpoint = ""
    revision: str | None = None
    dtype: str | None = None
    candidates: int | None = None
    context_window: int | None = None
    sample_from_anchor: bool | None = None
    pack: bool = True
    head: str | None = None
    head_config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_source("DSparkConfig", self.checkpoint, self.dtype)
        for name in ("candidates", "context_window"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"DSparkConfig.{name}: expected an integer of at least 1 or None, got {value!r}")


class DSparkDraft:
    """Drafts gamma tokens a row from the target's hidden states.

    Args:
        checkpoint: what it runs.
        fitted: its tensors on the target, see :func:`dspark.drafters.fit.fit`.
        head: the sequential head.
        candidates, context_window: see :class:`DSparkConfig`.
        slots: slots to begin with.

    Attributes:
        backbone, head, layout: its parts.
        checkpoint: what it was read from.
        confidence_weights: tensors ``weight`` [1, d (+ r)] and ``bias`` [1] of the checkpoint's confidence head.
        taps: features on their way into the context.
        rows_without_context: drafted rows whose target features were incomplete, so that they drafted nothing.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        fitted: Fitted,
        head: SequentialHead,
        *,
        candidates: int | None = None,
        context_window: int | None = None,
        slots: int = 1,
    ) -> None:
        config = checkpoint.config
        self.checkpoint, self.head = checkpoint, head
        self.layout = Layout(config.sample_from_anchor, config.mask_token_id)
        self.backbone = Backbone(
            config,
            fitted.tensors,
            embedding=fitted.embedding,
            head=fitted.head,
            embed_scale=fitted.embed_scale,
            context_window=context_window,
            slots=slots,
        )
        self.max_gamma: int | None = config.max_gamma
        self.default_gamma = config.max_gamma
        self.tap_layers = config.target_layer_ids
        self.capabilities = dataclasses.replace(CAPABILITIES, max_gamma=config.max_gamma)
        self.token_map = fitted.token_map
        self._silent = bool(getattr(head, "silent", False))
        self.borrowed = fitted.borrowed
        self.candidates = candidates if candidates is not None and candidates < len(fitted.head) else None
        self.confidence_weights = {
            name.rpartition(".")[2]: t for name, t in fitted.tensors.items() if name.startswith("confidence_head.")
        }
        self.rows_without_context = 0
        self.taps = TapBuffer(self.backbone, fitted.tap_norm, config.target_hidden_size)

    @property
    def buffered_tokens(self) -> int:
        """Committed positions whose features wait to be projected; they are when their slot drafts again."""
        return self.taps.waiting

    # -- Drafter ------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def propose(self, batch: BatchView, sampler: DraftSampler) -> DraftBlock:
        """Draft ``batch.gamma`` tokens a row; rows whose context is incomplete draft none.

        Raises:
            ConfigError: a gamma beyond the trained block.
            RowFault: rows with non-finite hidden states, naming the first layer that has them.
        """
        gamma = batch.gamma
        check_gamma(gamma, self.checkpoint)
        if gamma == 0 or len(batch) == 0:
            return sampler.finish(np.zeros(len(batch), dtype=np.int64))
        lens = self._ready(batch)
        anchors = torch.tensor([r.anchor for r in batch.requests], device=self.backbone.device)
        hidden = self.hidden(anchors, _slots(batch), _anchor_positions(batch), gamma)
        drafted = self._sample(anchors, hidden, sampler, gamma)
        before = [anchors, *drafted[:-1]]
        prev = torch.stack(before, dim=1)
        embed = getattr(self.head, "embed", None)
        features = {"markov": embed(prev)} if embed is not None and self.confidence_weights else {}
        return sampler.finish(lens, hidden=hidden, features=features)

    def hidden(self, anchors: Tensor, slots: IntArray, positions: IntArray, gamma: int) -> Tensor:
        """Hidden states [R, gamma, d] of the slots that draft x_1..x_gamma, for anchors [R] at ``positions`` [R].

        Raises:
            RowFault: rows with non-finite values, naming the first layer that has them.
        """
        ids = self.layout.inputs(anchors, gamma)
        hidden: Tensor = self.backbone(ids, slots, positions)[:, self.layout.skip :]
        if not bool(torch.isfinite(hidden).all()):
            trace: list[Tensor] = []
            self.backbone(ids, slots, positions, trace=trace)
            first = next((i for i, x in enumerate(trace) if not bool(torch.isfinite(x).all())), len(trace))
            rows = (~torch.isfinite(hidden)).flatten(1).any(1).nonzero().flatten().tolist()
            layer = f"layers.{first}" if first < len(trace) else "norm"
            raise RowFault(
                f"draft hidden states are not finite from {layer} on, in {self.backbone.dtype}"
                + ("; use bfloat16 or float32" if self.backbone.dtype == torch.float16 else ""),
                rows,
            )
        return hidden

    def _sample(self, anchors: Tensor, hidden: Tensor, sampler: DraftSampler, gamma: int) -> list[Tensor]:
        """x_1..x_gamma [R] each, left to right: base logits plus the head's bias (eq. 4).

        Positions come first in memory: each slice of the base logits takes its bias in place and is then the sampler's,
        which keeps q in it. No second [R, gamma, Vd] is made.
        """
        base = self.backbone.logits(hidden.transpose(0, 1).contiguous())
        fused = getattr(sampler, "fused", None)
        if fused is not None and (self._silent or hasattr(self.head, "latent")):
            return self._sample_fused(anchors, hidden, fused, base)
        ids: Tensor | None = None
        if self.candidates is not None:
            rows = base.flatten(0, 1)
            top = reference.top_ids(rows, self.candidates)
            base, ids = rows.gather(1, top).view(gamma, len(anchors), -1), top.view(gamma, len(anchors), -1)
            del rows
        names = self.token_map if ids is None else ids if self.token_map is None else self.token_map[ids]
        state, prev, drafted = self.head.start(anchors, hidden), anchors, []
        for k in range(gamma):
            logits = base[k]
            if not self._silent:
                bias, state = self._step(state, prev, hidden[:, k], None if ids is None else ids[k])
                logits.add_(bias)
            prev = sampler.sample(logits, k, names if ids is None or names is None else names[k], reuse=True)
            drafted.append(prev)
        return drafted

    def _sample_fused(self, anchors: Tensor, hidden: Tensor, fused: FusedDrafts, base: Tensor) -> list[Tensor]:
        """The same through ``bias_sample``, which is given the head's input to W2 instead of a bias."""
        candidates: Tensor | None = None
        if self.candidates is not None:
            rows = base.flatten(0, 1)
            top = reference.top_ids(rows, self.candidates)
            base, candidates = (x.view(len(base), len(anchors), -1) for x in (rows.gather(1, top), top))
        head: Any = self.head
        fused.begin(Block(base, None if self._silent else head.w2, self.token_map, candidates))
        state, prev, drafted = head.start(anchors, hidden), anchors, []
        for k in range(len(base)):
            latent = None
            if not self._silent:
                latent, state = head.latent(state, prev, hidden[:, k])
            prev = fused.sample(latent, k)
            drafted += [prev]
        return drafted

    def _step(self, state: Any, prev: Tensor, hidden: Tensor, ids: Tensor | None) -> tuple[Tensor, Any]:
        """The head's bias, at ``ids`` [R, K] alone where there are some; a head that can't be asked computes all."""
        if ids is None:
            return self.head.step(state, prev, hidden)
        if getattr(self.head, "project", None) is not None:
            return self.head.step(state, prev, hidden, ids)  # type: ignore[call-arg]
        bias, state = self.head.step(state, prev, hidden)
        return bias.gather(1, ids), state

    def _ready(self, batch: BatchView) -> IntArray:
        """Project what waits, and say how much each row drafts: all, or nothing without its whole context."""
        ready = np.array([self.taps.length(r.slot, r.generation) >= r.anchor_position for r in batch.requests])
        self.taps.flush([r.slot for r in batch.requests], _anchor_positions(batch))
        self.rows_without_context += int((~ready).sum())
        return np.where(ready, batch.gamma, 0).astype(np.int64)

    @torch.inference_mode()
    def forced_logits(
        self, ids: Tensor, taps: Tensor | None, anchors: IntArray, gamma: int
    ) -> tuple[Tensor, Tensor | None]:
        """Draft logits [A, gamma, Vd] along a text, and the draft-to-target map of their columns; see
        :class:`dspark.protocols.TeacherForced`.

        Raises:
            ConfigError: a gamma beyond the trained block, or no features.
        """
        check_gamma(gamma, self.checkpoint)
        if taps is None:
            raise ConfigError("dspark: features of the target are needed along the text")
        normed = self.taps.normed(taps)
        return forced_block(self.backbone, self.head, self.layout, ids, normed, anchors, gamma), self.token_map

    def probe(self, target: Any, ids: Sequence[int] | None = None) -> ProbeReport:
        """Check layout, tap layers and values against the target on a short text, see :mod:`dspark.drafters.probe`.

        Args:
            target: an allocated target without live requests; slot 0 is used.
            ids: token ids to begin the text with; None for ids spread over the vocabulary.
        """
        return probe(self, target, ids)

    @torch.inference_mode()
    def commit(self, committed: Sequence[Committed]) -> None:
        """Keep the features of newly cached positions. They are projected when their slot drafts next."""
        for done in committed:
            self.taps.add(done)

    @torch.inference_mode()
    def adopt(self, slot: int, generation: int, source: int, source_generation: int, length: int) -> int:
        """Begin a request with another's context, see :class:`dspark.protocols.PrefixDrafter`."""
        return self.taps.adopt(slot, generation, source, source_generation, length)

    @torch.inference_mode()
    def release(self, slot: int, generation: int) -> None:
        """Forget a request, and zero what it left in its slot."""
        self.taps.release(slot, generation)


def _slots(batch: BatchView) -> IntArray:
    return np.array([r.slot for r in batch.requests], dtype=np.int64)


def _anchor_positions(batch: BatchView) -> IntArray:
    return np.array([r.anchor_position for r in batch.requests], dtype=np.int64)


def check_gamma(gamma: int, checkpoint: Checkpoint) -> None:
    """Refuse a gamma beyond the trained block.

    Raises:
        ConfigError: with both numbers.
    """
    config = checkpoint.config
    if gamma > config.max_gamma:
        raise ConfigError(
            f"gamma {gamma} is beyond what {checkpoint.source or 'the checkpoint'} was trained for: its block of "
            f"{config.block_size} ({config.layout}) drafts at most {config.max_gamma} tokens a round"
        )


def build(config: DSparkConfig, context: BuildContext) -> DSparkDraft:
    """Factory of ``dspark``.

    Raises:
        CheckpointError: unreadable, incomplete, or it does not fit the target.
        ConfigError: a gamma beyond the trained block.
    """
    checkpoint = open_checkpoint(config.checkpoint, config.revision, context.target)
    if checkpoint.config.eagle is not None:
        raise CheckpointError(f"{checkpoint.source} is an EAGLE-3 drafter: use drafter 'eagle3'")
    if config.sample_from_anchor is not None:
        changed = dataclasses.replace(checkpoint.config, sample_from_anchor=config.sample_from_anchor)
        checkpoint = dataclasses.replace(checkpoint, config=changed.validate(checkpoint.source))
    check_gamma(context.gamma, checkpoint)
    device, dtype = place(context, config.dtype)
    fitted = fit(checkpoint, context.target, device, dtype)
    own = dataclasses.replace(context, device=device, dtype=dtype)
    head = make_head(checkpoint, fitted, config.head, config.head_config, own)
    drafter = DSparkDraft(
        checkpoint,
        fitted,
        head,
        candidates=config.candidates,
        context_window=config.context_window,
    )
    if config.pack:
        drafter.backbone.pack()
        pack_head = getattr(head, "pack", None)
        if pack_head is not None:
            pack_head()
    return drafter
