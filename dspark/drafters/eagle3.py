"""The drafter ``eagle3``: one layer, one token a forward, over the target's features (EAGLE-3, arXiv 2503.01840).

Entry i of its context pairs the target's feature g_i of position i with token i + 1, at rope position i. The layer
reads [norm(embedding of the token); norm(g_i)]; its output predicts token i + 2 and takes the next feature's place in
the next step. So the last committed feature with the anchor gives x_1, that output with x_1 gives x_2, and so on. What
a step wrote with its own output in a feature's place is overwritten once the feature has come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.capabilities import DrafterCapabilities
from dspark.checkpoints import Checkpoint, DrafterConfig, EagleConfig
from dspark.drafters.cached import CachedLayers, frozen, layer_tensors
from dspark.drafters.fit import Fitted, check_source, fit, open_checkpoint, place
from dspark.drafters.layers import DraftLayer, rms_norm
from dspark.drafters.probe_text import ProbeReport, Text, agreement, judged, shifted_layers, write_text
from dspark.drafters.steps import StepRows
from dspark.drafters.taps import TapBuffer
from dspark.errors import CheckpointError, ConfigError
from dspark.protocols import BuildContext, DraftSampler
from dspark.types import BatchView, BoolArray, Committed, DraftBlock, IntArray

CAPABILITIES = DrafterCapabilities(needs_taps=True)


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """Settings of ``eagle3``.

    Attributes:
        checkpoint: folder or Hub id of a DeepSpec or speculators EAGLE-3 drafter, or a ``Checkpoint``.
        revision: branch, tag or commit of a Hub id.
        dtype: ``float16``, ``bfloat16``, ``float32`` or ``float64``; None for the target's.
        pack: keep weights in oneDNN's layout too, which about halves the time of small batches in bfloat16 on CPU and
            doubles their memory; no effect elsewhere.
    """

    checkpoint: str | Path | Checkpoint = ""
    revision: str | None = None
    dtype: str | None = None
    pack: bool = True

    def __post_init__(self) -> None:
        check_source("Eagle3Config", self.checkpoint, self.dtype)


class EagleLayer(DraftLayer):
    """A decoder layer whose attention reads embedding and hidden state side by side, [n, 2d].

    Args:
        config: the drafter.
        eagle: its norms.
        tensors: the layer's tensors by canonical name, without ``layers.0.``.
    """

    def __init__(self, config: DrafterConfig, eagle: EagleConfig, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(config, 0, tensors)
        self.hidden_norm = frozen(tensors["hidden_norm.weight"])
        self._normed_residual = eagle.norm_before_residual

    def inputs(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads [n, 2d] and the residual [n, d], of embeddings and hidden states [n, d]."""
        normed = rms_norm(hidden, self.hidden_norm, self.eps)
        read = torch.cat((rms_norm(embedding, self.norm_in, self.eps), normed), dim=-1)
        return read, normed if self._normed_residual else hidden

    def canonical(self) -> dict[str, Tensor]:
        """Its tensors by canonical name without ``layers.0.``."""
        return {**super().canonical(), "hidden_norm.weight": self.hidden_norm}


class EagleCore(CachedLayers):
    """The network and its context, by slot.

    With one layer, an entry's key and value depend on its own feature and token alone. So committed entries are only
    projected, and attention runs for the last one.

    Args:
        config: what the checkpoint is.
        fitted: its tensors on the target.

    Attributes:
        text: slot -> committed ids and those that a step has just added, for the token after each feature.
        last: slot -> position and projected feature [d] of its last entry.
    """

    def __init__(self, config: DrafterConfig, fitted: Fitted) -> None:
        eagle = config.eagle
        if eagle is None:
            raise CheckpointError(f"a {config.algorithm} checkpoint is no EAGLE-3 drafter")
        tensors = fitted.tensors
        layer = EagleLayer(config, eagle, layer_tensors(tensors, 0))
        super().__init__(
            config,
            [layer],
            norm=tensors["norm.weight"],
            embedding=fitted.embedding,
            head=fitted.head,
            embed_scale=fitted.embed_scale,
        )
        self.layer, self.eagle = layer, eagle
        self.fc = frozen(tensors["fc.weight"])
        self.input_norm = frozen(tensors["input_norm.weight"]) if eagle.norm_before_fc else None
        self.text: dict[int, tuple[Sequence[int], Sequence[int]]] = {}
        self.last: dict[int, tuple[int, Tensor]] = {}

    def canonical(self) -> dict[str, Tensor]:
        """Its tensors by canonical name, as a checkpoint stores them; embedding and head included."""
        own = {"fc.weight": self.fc} | ({} if self.input_norm is None else {"input_norm.weight": self.input_norm})
        return {**own, **super().canonical()}

    def project(self, taps: Tensor) -> Tensor:
        """g [n, d] of concatenated target features [n, m * d_t]."""
        taps = taps.to(self.dtype)
        return F.linear(taps if self.input_norm is None else rms_norm(taps, self.input_norm, self.eps), self.fc)

    def remember(self, taps: Tensor, slots: IntArray, positions: IntArray) -> None:
        """Keep entries of features [n, m * d_t] at n (slot, position) pairs; positions of one slot rise, in one run."""
        if len(positions) == 0:
            return
        self.reserve(int(slots.max()) + 1, int(positions.max()) + 1)
        ends = np.flatnonzero(np.append(slots[1:] != slots[:-1], True))
        starts = np.concatenate([[0], ends[:-1] + 1])
        tokens: list[int] = []
        g = self.project(taps)
        for first, end in zip(starts.tolist(), ends.tolist(), strict=True):
            slot, low, high = int(slots[end]), int(positions[first]) + 1, int(positions[end]) + 1
            ids, added = self.text[slot]
            tokens += [*ids[low : high + 1], *added[max(low - len(ids), 0) : max(high + 1 - len(ids), 0)]]
            self.last[slot] = (high - 1, g[end].clone())
        at = self._index(positions)
        read, _ = self.layer.inputs(self.embed(torch.tensor(tokens, device=self.device)), g)
        self.cache.write(0, self._index(slots), at, *self.layer.context(read, *self._turns(at)[self.layer.spec]))
        np.maximum.at(self.cache.used, slots, positions + 1)

    def forward(self, hidden: Tensor, ids: Tensor, slots: IntArray, positions: IntArray) -> Tensor:
        """One step: the layer's output [R, d] for hidden states [R, d] and the tokens after them [R], at ``positions``
        [R]. Each row sees what its slot holds up to its position.
        """
        self.reserve(int(slots.max()) + 1, int(positions.max()) + 1)
        np.maximum.at(self.cache.used, slots, positions + 1)
        at = self._index(positions)
        read, residual = self.layer.inputs(self.embed(ids), hidden)
        attend = self.attention(0, slots, at, 1, self.groups(slots, positions, 1))
        out: Tensor = self.layer.run(read, residual, *self._turns(at)[self.layer.spec], attend)
        return out

    def normed(self, out: Tensor) -> Tensor:
        """What the head reads, [.., d], of a step's output [.., d]."""
        return rms_norm(out, self.norm, self.eps)

    def scratch(self) -> Self:
        """The same weights over an empty context."""
        twin = super().scratch()
        twin.text, twin.last = {}, {}
        return twin

    def forget(self, slot: int) -> None:
        """Drop what is known of a slot's text."""
        self.text.pop(slot, None)
        self.last.pop(slot, None)


class Eagle3Draft:
    """Drafts gamma tokens a row, one after the other.

    Args:
        checkpoint: what it runs.
        fitted: its tensors on the target, see :func:`dspark.drafters.fit.fit`.

    Attributes:
        core: the network.
        taps: features on their way into the context.
        rows_without_context: rows that drafted nothing, since their target features were incomplete; a request's first
            token alone has none.
    """

    max_gamma: int | None = None
    capabilities: DrafterCapabilities = CAPABILITIES

    def __init__(self, checkpoint: Checkpoint, fitted: Fitted) -> None:
        config = checkpoint.config
        self.checkpoint = checkpoint
        self.core = EagleCore(config, fitted)
        self.default_gamma = config.block_size
        self.tap_layers = config.target_layer_ids
        self.token_map, self.borrowed = fitted.token_map, fitted.borrowed
        self.taps = TapBuffer(self.core, fitted.tap_norm, config.target_hidden_size)
        self.rows_without_context = 0

    @property
    def buffered_tokens(self) -> int:
        """Committed positions whose features wait to be projected; they are when their slot drafts again."""
        return self.taps.waiting

    @torch.inference_mode()
    def propose(self, batch: BatchView, sampler: DraftSampler) -> DraftBlock:
        """Draft up to ``batch.gamma`` tokens a row, at most its ``max_draft``; rows whose context is incomplete none.

        Raises:
            RowFault: rows whose logits are not finite.
        """
        rows = StepRows(batch, self._ready(batch))
        if rows.steps == 0:
            return sampler.finish(rows.lens)
        core = self.core
        tokens = torch.tensor([r.anchor for r in rows.requests], device=core.device)
        hidden = torch.stack([core.last[slot][1] for slot in rows.slots.tolist()])
        read: list[Tensor] = []
        for k in range(rows.steps):
            out = core(hidden, tokens, rows.slots, rows.anchors - 1 + k)
            read.append(core.normed(out))
            tokens = rows.sample(sampler, core.logits(read[-1]), k, self.token_map)
            hidden = read[-1] if core.eagle.norm_output else out
        return sampler.finish(rows.lens, hidden=rows.widen(read))

    def _ready(self, batch: BatchView) -> BoolArray:
        """Project what waits, and say which rows have every feature before their anchor, [R]."""
        requests = batch.requests
        known = [r for r in requests if self.taps.length(r.slot, r.generation) >= r.anchor_position > 0]
        for request in known:
            self.core.text[request.slot] = (request.ids, ())
        self.taps.flush([r.slot for r in known], np.array([r.anchor_position for r in known], dtype=np.int64))
        whole = {r.slot for r in known if self.core.last[r.slot][0] == r.anchor_position - 1}
        ready = np.array([r.slot in whole for r in requests], dtype=np.bool_)
        self.rows_without_context += int((~ready).sum())
        return ready

    @torch.inference_mode()
    def probe(self, target: Any, ids: Sequence[int] | None = None) -> ProbeReport:
        """Check tap layers and values against the target on a short text, see :mod:`dspark.drafters.probe`.

        Args:
            target: an allocated target without live requests; slot 0 is used.
            ids: token ids to begin the text with; None for ids spread over the vocabulary.
        """
        shifted = shifted_layers(self.tap_layers, target)
        text = write_text(target, ids, [self.tap_layers, *shifted.values()])
        others = {name: self._agreement(text, layers) for name, layers in shifted.items()}
        seen = self._agreement(text, self.tap_layers)
        return judged(self.checkpoint.source, seen, len(self.core.head), others)

    def _agreement(self, text: Text, layers: Sequence[int]) -> tuple[float, float]:
        """How well first drafts predict the text: every written position is an anchor."""
        ids = text.ids.to(self.core.device)
        anchors = np.arange(text.first, len(ids) - 1)
        logits = self._forced(ids, self.taps.normed(text.taps(layers)), anchors, 1)
        at = torch.from_numpy(anchors).to(ids.device)
        return agreement(logits, ids[at + 1].unsqueeze(1), self.token_map)

    def _forced(self, ids: Tensor, taps: Tensor, anchors: IntArray, gamma: int) -> Tensor:
        """Logits [A, gamma, Vd] along a text; each anchor has a slot of its own in an empty context."""
        core, slots = self.core.scratch(), np.arange(len(anchors))
        core.text = dict.fromkeys(slots.tolist(), (ids.tolist(), ()))
        places = np.concatenate([np.arange(a) for a in anchors])
        core.remember(taps[torch.from_numpy(places).to(taps.device)], np.repeat(slots, anchors), places)
        hidden = torch.stack([core.last[slot][1] for slot in slots.tolist()])
        at = torch.from_numpy(np.ascontiguousarray(anchors, dtype=np.int64)).to(ids.device)
        logits: list[Tensor] = []
        for k in range(gamma):
            out = core(hidden, ids[at + k], slots, anchors - 1 + k)
            read = core.normed(out)
            logits.append(core.logits(read))
            hidden = read if core.eagle.norm_output else out
        return torch.stack(logits, dim=1)

    @torch.inference_mode()
    def forced_logits(
        self, ids: Tensor, taps: Tensor | None, anchors: IntArray, gamma: int
    ) -> tuple[Tensor, Tensor | None]:
        """Draft logits [A, gamma, Vd] along a text, and the draft-to-target map of their columns; see
        :class:`dspark.protocols.TeacherForced`.

        Raises:
            ConfigError: no features.
        """
        if taps is None:
            raise ConfigError("eagle3: features of the target are needed along the text")
        return self._forced(ids.to(self.core.device), self.taps.normed(taps), anchors, gamma), self.token_map

    @torch.inference_mode()
    def commit(self, committed: Sequence[Committed]) -> None:
        """Keep the features of newly cached positions. They are projected when their slot drafts next."""
        for done in committed:
            self.core.text[done.request.slot] = (done.request.ids, done.new_ids)
            self.taps.add(done)

    @torch.inference_mode()
    def adopt(self, slot: int, generation: int, source: int, source_generation: int, length: int) -> int:
        """Begin a request with another's context, see :class:`dspark.protocols.PrefixDrafter`.

        The last entry is left out: it holds the token after the prefix too.
        """
        kept = self.taps.adopt(slot, generation, source, source_generation, max(length - 1, 0))
        self.core.forget(slot)
        return kept

    @torch.inference_mode()
    def release(self, slot: int, generation: int) -> None:
        """Forget a request, and zero what it left in its slot."""
        if self.taps.holds(slot, generation):
            self.core.forget(slot)
        self.taps.release(slot, generation)


def build(config: Eagle3Config, context: BuildContext) -> Eagle3Draft:
    """Factory of ``eagle3``.

    Raises:
        CheckpointError: unreadable, incomplete, another kind of drafter, or it does not fit the target.
    """
    checkpoint = open_checkpoint(config.checkpoint, config.revision, context.target)
    if checkpoint.config.eagle is None:
        raise CheckpointError(f"{checkpoint.source} is a {checkpoint.config.algorithm} drafter: use drafter 'dspark'")
    drafter = Eagle3Draft(checkpoint, fit(checkpoint, context.target, *place(context, config.dtype)))
    if config.pack:
        drafter.core.pack()
    return drafter
