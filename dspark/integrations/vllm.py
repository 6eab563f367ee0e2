"""dspark's drafters as a custom proposer of vLLM (method ``custom_class``; its interface is experimental).

    vllm serve Qwen/Qwen3-4B
        --speculative-config '{"method": "custom_class", "model": "dspark.integrations.vllm.DSparkProposer",
                               "num_speculative_tokens": 5}'
        --additional-config '{"dspark": {"drafter": "ngram", "drafter_config": {"max_n": 5}}}'

vLLM drafts by this class, and does everything else itself. It hands over the tokens of each request and takes tokens
back, and nothing more, which sets the limits:

- Drafters that read the target's hidden states (``dspark``, ``eagle3``) can't run this way: they are refused, with the
  hint to export them for vLLM's own method ``dspark``.
- Drafts are the drafter's likeliest tokens, whatever a request's temperature. vLLM takes them for certain, as it does
  those of its own prompt lookup: output keeps the target's law, and sampled requests accept less than they would if
  the drafts' law were known.
- Confidences, schedulers and gamma policies have no say: what is drafted is verified.
- vLLM (0.32) runs such a class in its V1 model runner, without asynchronous scheduling.

This module imports nothing of vLLM.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from dspark.config import SamplingParams
from dspark.engine.choices import may_be_checkpoint
from dspark.errors import ConfigError, DSparkWarning, nearest
from dspark.plugins.kinds import Kind
from dspark.plugins.manager import load_plugins
from dspark.protocols import BuildContext, Drafter
from dspark.sampling.draft import RoundSampler
from dspark.sampling.draws import CounterDraws
from dspark.tokens import TokenView
from dspark.types import BatchView, Committed, IntArray, Mode, RequestView

KEYS = ("drafter", "drafter_config")
_GREEDY = SamplingParams()


@dataclass(frozen=True)
class ServedModel:
    """What drafters may know of the target that another engine runs."""

    name: str
    vocab_size: int
    max_len: int
    device: torch.device
    dtype: torch.dtype
    tokenizer_name: str | None = None
    revision: str | None = None

    @cached_property
    def tokenizer(self) -> Any:
        """Its tokenizer, loaded when a drafter compares it with its own; None where none is named."""
        if self.tokenizer_name is None:
            return None
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.tokenizer_name, revision=self.revision)


@dataclass(slots=True, eq=False)
class _Text:
    """A request as far as it was seen: its tokens, twice, since drafters read lists and arrays compare fast."""

    ids: list[int]
    array: IntArray
    slot: int
    generation: int
    prompt_len: int
    seen: int
    drafted: tuple[int, ...] = ()

    def continues(self, ids: IntArray) -> bool:
        """Whether ``ids`` [n] begin with this text."""
        known = len(self.array)
        return known <= len(ids) and self.ids[-1] == ids[known - 1] and np.array_equal(self.array, ids[:known])

    def view(self, length: int, max_draft: int) -> RequestView:
        """The first ``length`` tokens as a drafter sees them; all but the last are in the target's cache."""
        name, ids = f"{self.slot}/{self.generation}", TokenView(self.ids, length)
        return RequestView(
            name, self.slot, self.generation, ids, self.prompt_len, length - 1, max_draft, _GREEDY, Mode.GREEDY, 0
        )


class TokenProposer:
    """A drafter for an engine that shows nothing but tokens, and gives its requests no names.

    Requests are told apart by their text: one that continues a known text *is* that request. Rows may move, and two
    requests of equal text may be taken for one another: what a drafter keeps of a request is a function of its text,
    so no draft depends on that.

    Args:
        drafter: one that reads no hidden states.
        gamma: most tokens to draft.
        slots: requests whose state is kept; of more, those not seen for longest are forgotten.
        max_len: longest text.
        vocab_size: V of the target.
        device: where the drafter's tokens live.
    """

    def __init__(
        self, drafter: Drafter, *, gamma: int, slots: int, max_len: int, vocab_size: int, device: torch.device
    ) -> None:
        self.drafter = drafter
        self.gamma = gamma if drafter.max_gamma is None else min(gamma, drafter.max_gamma)
        self._max_len, self._vocab_size, self._device = max_len, vocab_size, device
        self._free = list(range(slots))[::-1]
        self._generations = [0] * slots
        self._texts: list[_Text] = []
        self._rows: dict[int, _Text] = {}
        self._calls = 0

    @torch.inference_mode()
    def propose(self, texts: Mapping[int, IntArray], new: Mapping[int, int]) -> dict[int, list[int]]:
        """Drafts by row.

        Args:
            texts: all tokens of each row that may draft, [n].
            new: how many of them the last step added.

        Returns:
            At most gamma tokens a row; rows that have none are left out.
        """
        self._calls += 1
        rows = self._follow(texts, new)
        room = {row: min(self.gamma, self._max_len - len(text.ids) - 1) for row, text in rows.items()}
        chosen = [row for row, count in room.items() if count > 0]
        if not chosen:
            return {}
        batch = BatchView(tuple(rows[row].view(len(rows[row].ids), room[row]) for row in chosen), self.gamma)
        sampler = RoundSampler(batch, CounterDraws(self._device), self._vocab_size, self._device)
        block = self.drafter.propose(batch, sampler)
        drafts: dict[int, list[int]] = {}
        for row, ids, count in zip(chosen, block.token_ids.tolist(), block.lens.tolist(), strict=True):
            rows[row].drafted = tuple(ids[:count])
            if count:
                drafts[row] = ids[:count]
        return drafts

    def _follow(self, texts: Mapping[int, IntArray], new: Mapping[int, int]) -> dict[int, _Text]:
        """The text of each row, brought up to date; the drafter is told what was added."""
        found = {row: text for row, ids in texts.items() if (text := self._rows.get(row)) and text.continues(ids)}
        taken = {id(text) for text in found.values()}
        for row, ids in texts.items():
            if row in found:
                continue
            known = [text for text in self._texts if id(text) not in taken and text.continues(ids)]
            found[row] = max(known, key=lambda text: len(text.ids), default=None) or self._begin(ids, new[row], taken)
            taken.add(id(found[row]))
        for text in found.values():
            text.seen = self._calls
        committed = [self._grow(found[row], ids, i) for i, (row, ids) in enumerate(texts.items())]
        self.drafter.commit([c for c in committed if c.new_ids])
        self._rows = found
        return found

    def _begin(self, ids: IntArray, new: int, taken: set[int]) -> _Text:
        """A text that nobody knows: a slot for its prompt."""
        if not self._free:
            oldest = min((t for t in self._texts if id(t) not in taken), key=lambda t: t.seen)
            self._texts.remove(oldest)
            self.drafter.release(oldest.slot, oldest.generation)
            self._free.append(oldest.slot)
        slot = self._free.pop()
        self._generations[slot] += 1
        prompt = ids[: max(1, len(ids) - new)].copy()
        text = _Text(prompt.tolist(), prompt, slot, self._generations[slot], len(prompt), self._calls)
        self._texts.append(text)
        return text

    def _grow(self, text: _Text, ids: IntArray, row: int) -> Committed:
        """Append what is new of ``ids`` [n]."""
        before = len(text.ids)
        view = text.view(before, 0)
        added = tuple(ids[before:].tolist())
        right = 0
        while right < min(len(text.drafted), len(added) - 1) and text.drafted[right] == added[right]:
            right += 1
        offered, text.drafted = len(text.drafted), ()
        text.ids.extend(added)
        text.array = ids.copy()
        return Committed(view, row if offered else -1, added, offered, right, len(ids) - 1)


class DSparkProposer:
    """What ``speculative_config.model`` names. A subclass may fix ``drafter`` and ``drafter_config``.

    Args:
        vllm_config: vLLM's configuration. Its ``additional_config["dspark"]`` may set both.

    Raises:
        ConfigError: a setting is unknown, or the drafter can't run on tokens alone.
    """

    drafter: str = "ngram"
    drafter_config: Mapping[str, Any] = {}

    def __init__(self, vllm_config: Any) -> None:
        self._config = vllm_config
        extra = vllm_config.additional_config
        asked = dict(extra.get("dspark") or {}) if isinstance(extra, Mapping) else {}
        for key in asked:
            if key not in KEYS:
                raise ConfigError(f"additional_config.dspark: unknown setting {key!r}{nearest(key, KEYS)}")
        self.drafter = asked.get("drafter", self.drafter)
        self.drafter_config = asked.get("drafter_config", self.drafter_config)
        self._catalog = load_plugins().catalog
        self._check()
        self._proposer: TokenProposer | None = None
        self._failed = False

    def _check(self) -> None:
        hint = "export it and use vLLM's own method, dspark (see `dspark export --help`)"
        if may_be_checkpoint(self.drafter):
            raise ConfigError(f"drafter {self.drafter!r}: vLLM shows a custom proposer no hidden states; {hint}")
        capabilities = self._catalog.resolve(Kind.DRAFTER, self.drafter).capabilities
        if getattr(capabilities, "needs_taps", False):
            raise ConfigError(f"drafter {self.drafter!r} reads hidden states, which vLLM does not show it; {hint}")

    def load_model(self, *_: Any, **__: Any) -> None:
        """Build the drafter. vLLM calls this with its model before it measures how much memory is left.

        Raises:
            DSparkError: the drafter can't be built, or does not fit the model.
        """
        model, slots = self._config.model_config, int(self._config.scheduler_config.max_num_seqs)
        served = ServedModel(
            name=str(model.model),
            vocab_size=int(model.get_vocab_size()),
            max_len=int(model.max_model_len),
            device=torch.device(self._config.device_config.device),
            dtype=model.dtype,
            tokenizer_name=None if getattr(model, "skip_tokenizer_init", False) else str(model.tokenizer),
            revision=getattr(model, "tokenizer_revision", None),
        )
        gamma = int(self._config.speculative_config.num_speculative_tokens)
        context = BuildContext(
            target=served,
            vocab_size=served.vocab_size,
            gamma=gamma,
            max_slots=slots,
            device=served.device,
            dtype=served.dtype,
        )
        drafter = self._catalog.build(Kind.DRAFTER, self.drafter, self.drafter_config, context)
        if drafter.tap_layers:
            raise ConfigError(f"drafter {self.drafter!r} taps layers of the target, which vLLM does not show it")
        allocate = getattr(drafter, "allocate", None)
        if allocate is not None:  # a draft model's cache
            allocate()
        self._proposer = TokenProposer(
            drafter,
            gamma=gamma,
            slots=slots,
            max_len=served.max_len,
            vocab_size=served.vocab_size,
            device=served.device,
        )

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Drafts for each row of vLLM's batch.

        Args:
            sampled_token_ids: what the last step added to each row; empty for a prompt that is not read yet.
            num_tokens_no_spec: tokens of each row, these included, [rows].
            token_ids_cpu: all tokens, [rows, max_model_len].
            slot_mappings: of vLLM's cache; not used.

        Returns:
            One list a row, empty where nothing is drafted.
        """
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if self._failed:
            return drafts
        if self._proposer is None:
            self.load_model()
        texts, new = {}, {}
        for row, added in enumerate(sampled_token_ids):
            if len(added):
                texts[row] = np.asarray(token_ids_cpu[row, : int(num_tokens_no_spec[row])]).astype(np.int64)
                new[row] = len(added)
        try:
            for row, ids in self._proposer.propose(texts, new).items():  # type: ignore[union-attr]
                drafts[row] = ids
        except Exception as fault:  # a drafter's fault must cost no request: without drafts vLLM decodes on
            self._failed = True
            warnings.warn(
                f"drafter {self.drafter} failed ({type(fault).__name__}: {fault}); nothing is drafted any more",
                DSparkWarning,
                stacklevel=2,
            )
        return drafts
