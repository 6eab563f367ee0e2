"""The drafter ``draft-model``: a smaller causal LM with the target's tokenizer drafts, a token a forward.

It runs as a target does, packed and ragged over a slot cache of its own, and reads nothing of the target's states. All
that it keeps of a request is how much of its text is in the slot: where the text goes on otherwise than was drafted, it
is overwritten from there on. Rollback is a length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.capabilities import DrafterCapabilities
from dspark.drafters.probe_text import ProbeReport, agreement, judged, layout, write_text
from dspark.drafters.steps import StepRows
from dspark.errors import ConfigError
from dspark.protocols import BuildContext, DraftSampler, PrefixTarget, Target
from dspark.types import BatchView, BoolArray, Committed, DraftBlock, IntArray, RequestView

CAPABILITIES = DrafterCapabilities()

CHUNK = 512
"""Most tokens of one request's text that a forward reads without drafting."""


@dataclass(frozen=True, slots=True)
class DraftModelConfig:
    """Settings of ``draft-model``.

    Attributes:
        model: hub id or folder of the draft model, a loaded transformers model, or a ``Target``.
        tokenizer: of a loaded model; else it is loaded with the model.
        revision: branch, tag or commit of a hub id.
        dtype: a torch dtype's name; None for the target's.
        gamma: tokens drafted a round where the engine's config names none.
        runner: the registered target that runs the model; ``runner_config`` holds its other settings.
    """

    model: Any = ""
    tokenizer: Any = None
    revision: str | None = None
    dtype: str | None = None
    gamma: int = 4
    runner: str = "hf"
    runner_config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.model, str) and not self.model:
            raise ConfigError("DraftModelConfig.model: name a hub id or a folder of a causal language model")
        if not isinstance(self.gamma, int) or isinstance(self.gamma, bool) or self.gamma < 1:
            raise ConfigError(f"DraftModelConfig.gamma: expected an integer of at least 1, got {self.gamma!r}")


@dataclass(slots=True)
class _Slot:
    """What a slot holds of its request: ``length`` committed tokens, and behind them what was drafted last."""

    generation: int
    length: int = 0
    drafted: Sequence[int] = ()

    def advance(self, request: RequestView) -> None:
        """Drafts that were committed are valid, the others stale. The anchor is read anew: its logits are wanted."""
        for token in self.drafted:
            if self.length >= len(request.ids) or request.ids[self.length] != token:
                break
            self.length += 1
        self.length, self.drafted = min(self.length, request.anchor_position), ()


class ModelDraft:
    """Drafts gamma tokens a row, one after the other.

    Args:
        model: the draft model, as a target.
        target: the target that it drafts for: as many tokens a slot.
        slots: requests at once.
        gamma: tokens a round by default.

    Attributes:
        rows_left_out: rows that drafted nothing: the draft model's slots are too short, or it has no such token id.
    """

    max_gamma: int | None = None
    tap_layers: tuple[int, ...] = ()
    capabilities: DrafterCapabilities = CAPABILITIES

    def __init__(self, model: Target, target: Any, *, slots: int = 1, gamma: int = 4) -> None:
        self.model, self.default_gamma = model, gamma
        self._target, self._slots = target, slots
        self._known: dict[int, _Slot] = {}
        self._room = 0
        self._version: int | None = None
        self.rows_left_out = 0

    def allocate(self) -> None:
        """Make room for as many and as long requests as the target has room for; nothing if that is done.

        Raises:
            CapacityError: there is not enough memory.
        """
        if not self._room:
            wanted = int(self._target.max_len)
            self._room = self.model.allocate(self._slots, min(wanted, int(getattr(self.model, "model_limit", wanted))))

    def probe(self, target: Any, ids: Sequence[int] | None = None) -> ProbeReport:
        """Make room, and compare the two models on a short text that the target writes.

        Args:
            target: an allocated target without live requests; slot 0 of both is used.
            ids: token ids to begin the text with; None for ids spread over the vocabulary.

        Raises:
            CapacityError: there is not enough memory.
        """
        self.allocate()
        text = write_text(target, ids, room=self._room)
        count = len(text.ids) - 1
        if int(text.ids.max()) >= self.model.vocab_size:
            return judged(self.model.name, (-math.inf, 0.0), self.model.vocab_size)
        start = np.zeros(1, dtype=np.int64)
        read = text.ids[:-1].to(self.model.device)
        logits = self.model.forward(layout(read, start, start, np.array([count]), logits="all")).logits
        seen = agreement(logits[text.first - 1 :, None].float(), text.ids[text.first :, None].to(logits.device))
        return judged(self.model.name, seen, self.model.vocab_size)

    @torch.inference_mode()
    def forced_logits(
        self, ids: Tensor, taps: Tensor | None, anchors: IntArray, gamma: int
    ) -> tuple[Tensor, Tensor | None]:
        """Draft logits [A, gamma, V] along a text, see :class:`dspark.protocols.TeacherForced`. Slot 0 is used.

        Raises:
            ConfigError: a text that the draft model's slots or vocabulary do not hold.
        """
        self.allocate()
        count = int(anchors.max()) + gamma
        read = ids[:count].to(self.model.device)
        if count > self._room or int(read.max()) >= self.model.vocab_size:
            raise ConfigError(
                f"draft-model: {self.model.name} does not hold a text of {count} tokens, or some token of it"
            )
        start = np.zeros(1, dtype=np.int64)
        logits = self.model.forward(layout(read, start, start, np.array([count]), logits="all")).logits
        at = torch.from_numpy(np.ascontiguousarray(anchors, dtype=np.int64)).to(logits.device)
        return logits[at[:, None] + torch.arange(gamma, device=logits.device)], None

    @torch.inference_mode()
    def propose(self, batch: BatchView, sampler: DraftSampler) -> DraftBlock:
        """Draft up to ``batch.gamma`` tokens a row, at most its ``max_draft``.

        Raises:
            RowFault: rows whose logits are not finite.
        """
        self.allocate()
        states = [self._state(request) for request in batch.requests]
        rows = StepRows(batch, self._readable(batch, states))
        if rows.steps == 0:
            return sampler.finish(rows.lens)
        mine = [self._known[slot] for slot in rows.slots.tolist()]
        for state, request in zip(mine, rows.requests, strict=True):
            self._read_ahead(state, request)
        starts = np.array([state.length for state in mine], dtype=np.int64)
        pending = [r.ids[start:] for r, start in zip(rows.requests, starts.tolist(), strict=True)]
        counts = np.array([len(ids) for ids in pending], dtype=np.int64)
        read = torch.tensor([token for ids in pending for token in ids], device=self.model.device)
        drafted: list[Tensor] = []
        for k in range(rows.steps):
            logits = self.model.forward(layout(read, rows.slots, starts, counts)).logits
            starts, counts = starts + counts, np.ones_like(counts)
            read = rows.sample(sampler, logits, k)
            drafted.append(read)
        written = torch.stack(drafted, dim=1)[:, :-1].tolist()  # the last draft was not read
        for state, request, tokens in zip(mine, rows.requests, written, strict=True):
            state.length, state.drafted = len(request.ids), tokens
        self._version = getattr(self.model, "cache_version", None)
        return sampler.finish(rows.lens)

    def _state(self, request: RequestView) -> _Slot:
        state = self._known.get(request.slot)
        if state is None or state.generation != request.generation:
            state = self._known[request.slot] = _Slot(request.generation)
        state.advance(request)
        return state

    def _readable(self, batch: BatchView, states: Sequence[_Slot]) -> BoolArray:
        """Rows whose text, and what they may draft, the draft model can read, [R]."""
        fits = [
            len(r.ids) + min(batch.gamma, r.max_draft) - 1 <= self._room
            and max(r.ids[state.length :]) < self.model.vocab_size
            for r, state in zip(batch.requests, states, strict=True)
        ]
        self.rows_left_out += len(fits) - sum(fits)
        return np.array(fits, dtype=np.bool_)

    def _read_ahead(self, state: _Slot, request: RequestView) -> None:
        """Read a long text up to its last tokens, without logits."""
        slot = np.array([request.slot], dtype=np.int64)
        while len(request.ids) - state.length > CHUNK:
            ids = torch.tensor(request.ids[state.length : state.length + CHUNK], device=self.model.device)
            start, count = np.array([state.length], dtype=np.int64), np.array([CHUNK], dtype=np.int64)
            self.model.forward(layout(ids, slot, start, count, logits="none"))
            state.length += CHUNK

    def commit(self, committed: Sequence[Committed]) -> None:
        """Nothing: ``propose`` reads what was committed since it last saw the request."""

    @torch.inference_mode()
    def adopt(self, slot: int, generation: int, source: int, source_generation: int, length: int) -> int:
        """Begin a request with another's text, see :class:`dspark.protocols.PrefixDrafter`.

        0, so that the text is read anew, where the model's target has no ``copy_prefix``, or somebody else has used it.
        """
        state = self._known.get(source)
        self._known[slot] = _Slot(generation)
        if state is None or state.generation != source_generation or not isinstance(self.model, PrefixTarget):
            return 0
        length = min(length, state.length)
        if self.model.cache_version != self._version or not self.model.copy_prefix(source, slot, length):
            return 0
        self._version = self.model.cache_version
        self._known[slot].length = length
        return length

    def release(self, slot: int, generation: int) -> None:
        """Forget a request; one that has taken the slot since is kept."""
        state = self._known.get(slot)
        if state is not None and state.generation == generation:
            del self._known[slot]


def check_vocabulary(model: Any, target: Any) -> None:
    """Refuse a draft model whose token ids mean something else than the target's.

    Raises:
        ConfigError: naming both models, and a token that differs.
    """
    pair = f"draft-model: {model.name!r} can't draft for {target.name!r}"
    own, wanted = (getattr(getattr(m, "tokenizer", None), "get_vocab", lambda: None)() for m in (model, target))
    if own is None or wanted is None:
        if model.vocab_size != target.vocab_size:
            raise ConfigError(
                f"{pair}: their vocabularies have {model.vocab_size} and {target.vocab_size} ids, and there are no two "
                "tokenizers to compare"
            )
        return
    if own != wanted:
        tokens = {**wanted, **own}
        differ = sorted((t for t in tokens if own.get(t) != wanted.get(t)), key=lambda t: (tokens[t], t))
        raise ConfigError(
            f"{pair}: their tokenizers differ in {len(differ)} tokens; {differ[0]!r} is id {own.get(differ[0])} of the "
            f"one and {wanted.get(differ[0])} of the other"
        )


def build(config: DraftModelConfig, context: BuildContext) -> ModelDraft:
    """Factory of ``draft-model``.

    Raises:
        ConfigError: another tokenizer or vocabulary than the target's.
        TargetError: the draft model can't be loaded, or not be decoded this way.
    """
    model = config.model
    if not (hasattr(model, "allocate") and hasattr(model, "forward") and hasattr(model, "vocab_size")):
        if context.resolve is None:
            raise ConfigError("draft-model: its model is built through BuildContext.resolve, which is not set")
        settings: dict[str, Any] = {"model": model}
        if isinstance(model, str):
            dtype = config.dtype or str(context.dtype or "auto").removeprefix("torch.")
            settings |= {"revision": config.revision, "dtype": dtype, "device": str(context.device or "auto")}
        else:
            settings["tokenizer"] = config.tokenizer
        model = context.resolve("target", config.runner, settings | dict(config.runner_config))
    check_vocabulary(model, context.target)
    return ModelDraft(model, context.target, slots=context.max_slots, gamma=config.gamma)
