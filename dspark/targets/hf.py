"""``HFTarget``: a transformers causal LM as a target, packed, ragged, over its own slot cache."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dspark.capabilities import TargetCapabilities
from dspark.errors import CapacityError, ConfigError, TargetError
from dspark.ops.packed import matrix_tiles
from dspark.targets.adopt import DEFAULT_LEN, attention_of, check_model, eos_ids, length_limit, shared_copy
from dspark.targets.anatomy import decoder_layers, inspect_model
from dspark.targets.attention import ATTENTION_NAME, CONTEXT_KEY, SlotContext, register_attention
from dspark.targets.cache import SlotCache, size_cache
from dspark.targets.fast import speed_up
from dspark.targets.fingerprint import describe
from dspark.targets.load import load_model
from dspark.targets.memory import available_bytes
from dspark.targets.plan import AttentionCost
from dspark.targets.probe import probe_target
from dspark.types import TargetOutput, VerifyLayout

logger = logging.getLogger(__name__)

_KERNELS = ("auto", "eager", "sdpa", "flex")


@dataclass(frozen=True, slots=True)
class HFTargetConfig:
    """Settings of the ``hf`` target.

    Attributes:
        model: hub id, local folder, .gguf file (or a folder with one), ``smollm2``, or a loaded ``PreTrainedModel``.
        tokenizer: of a loaded model; else it is loaded with the model.
        revision: commit, branch or tag of a hub id.
        dtype: ``auto`` (the checkpoint's), or a torch dtype's name.
        device: ``auto`` (cuda, else mps, else cpu), or a torch device.
        device_map: passed to transformers; has to put everything on one device.
        attention: ``auto``, or ``eager`` or ``sdpa`` for the batched part of attention; ``flex`` attends all sequences
            of a forward in one call of torch's FlexAttention, for GPUs.
        fast: on CPU, run norms as one operator and, in bfloat16, keep a second copy of linear weights in a faster
            layout if memory allows.
        probe: compare packed forwards with plain ones after loading.
    """

    model: Any = ""
    tokenizer: Any = None
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    device_map: Any = None
    attention: str = "auto"
    fast: bool = True
    probe: bool = True

    def __post_init__(self) -> None:
        if self.attention not in _KERNELS:
            raise ConfigError(
                f"HFTargetConfig.attention: expected one of {', '.join(_KERNELS)}, got {self.attention!r}"
            )


class HFTarget:
    """A causal LM of transformers with softmax attention, decoded from a slot cache.

    Linear layers run over the packed tokens [1, B]; attention runs group by group (``dspark.targets.plan``).

    Args:
        model: a loaded ``PreTrainedModel``. It is not touched: the target works on a copy of its modules that shares
            every parameter and buffer.
        tokenizer: its tokenizer, or None where only token ids are decoded.
        name: what it is called in messages and fingerprints.
        attention, fast, probe: see ``HFTargetConfig``.
        share: False takes the model as it is and changes its attention until ``close``.

    Raises:
        TargetError: for a model that can't be decoded this way, with the reason.
    """

    capabilities = TargetCapabilities(ragged=True, taps=True)

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        name: str | None = None,
        attention: str = "auto",
        fast: bool = True,
        probe: bool = True,
        share: bool = True,
    ) -> None:
        check_model(model)
        register_attention()
        config = model.config
        self._restore = attention_of(model)
        self.model: Any = shared_copy(model) if share else model
        self.model.eval()
        self.tokenizer = tokenizer
        self.name = name or getattr(config, "_name_or_path", "") or type(model).__name__
        self.device = torch.device(model.device)
        self.dtype: torch.dtype = model.dtype
        self.num_layers = int(config.num_hidden_layers)
        self.hidden_size = int(config.hidden_size)
        self.max_len = self.model_limit = length_limit(config)
        self.attention = attention
        self._keeps_rows = "logits_to_keep" in inspect.signature(type(model).forward).parameters
        self._hooks: dict[int, Any] = {}
        self._layers = decoder_layers(self.model, self.num_layers)
        self._cache: SlotCache | None = None
        self.cache_version = 0
        self._closed = False
        self._unpack = speed_up(self.model, available_bytes(self.device), list(self._layers)) if fast else lambda: None
        try:
            self._specs, self.vocab_size = inspect_model(self.model, self._set_attention, self.device)
            self._set_attention(ATTENTION_NAME)
            first = self._specs[min(self._specs)]
            fold, views = first.query_heads // first.kv_heads, matrix_tiles(first.dtype)
            self._cost = AttentionCost.of(self.device.type, first.kv_heads, fold, first.key_dim, views=views)
            self.eos_token_ids = eos_ids(model, tokenizer)
            self.probe_error = probe_target(self) if probe else None
        except BaseException:
            self.close()
            raise

    @classmethod
    def from_pretrained(cls, model: str, **settings: Any) -> HFTarget:
        """Load a target; ``settings`` are the fields of ``HFTargetConfig``."""
        from dspark.config import build_config

        return build(build_config(HFTargetConfig, {"model": model, **settings}))

    # -- what drafters read -------------------------------------------------------------------------------------

    @property
    def input_embeddings(self) -> nn.Module:
        """The embedding module, frozen and shared with drafters."""
        module: nn.Module = self.model.get_input_embeddings()
        return module

    @property
    def lm_head(self) -> nn.Module:
        """The output projection [V, d_t], without soft-capping or scaling that the model applies after it."""
        module: nn.Module = self.model.get_output_embeddings()
        return module

    @property
    def has_chat_template(self) -> bool:
        """True where the tokenizer can render chats."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    @property
    def cache_bytes(self) -> int:
        """Bytes of the key-value cache, 0 before ``allocate``."""
        return 0 if self._cache is None else self._cache.nbytes

    # -- Target -------------------------------------------------------------------------------------------------

    def allocate(self, slots: int, max_len: int | None, budget_bytes: int | None = None) -> int:
        """Make room for ``slots`` requests of ``max_len`` tokens; returns the max_len taken.

        Without ``max_len``: the model's limit, at most 4,096, and less where memory is short.

        Raises:
            CapacityError: naming the bytes asked and the bytes allowed, or a length beyond the model's limit.
        """
        if self._closed:
            raise TargetError(f"target {self.name!r} is closed")
        if slots < 1 or (max_len is not None and max_len < 1):
            raise CapacityError(f"a cache of {slots} slots x {max_len} tokens: both must be at least 1")
        if max_len is not None and max_len > self.model_limit:
            raise CapacityError(
                f"max_len {max_len} exceeds what {self.name!r} was made for, {self.model_limit} tokens "
                "(max_position_embeddings, or the length at which its position encoding changes): lower max_len"
            )
        self._cache = None  # the old one is given back before the new one is sized
        self.cache_version += 1
        specs = [self._specs[i] for i in sorted(self._specs)]
        default = min(self.model_limit, DEFAULT_LEN)
        length = size_cache(specs, slots, max_len, default_len=default, budget_bytes=budget_bytes, device=self.device)
        if max_len is None and length < default:
            logger.warning("%s: memory allows %d slots of %d tokens, not %d", self.name, slots, length, default)
        self._cache = SlotCache(specs, slots, length, self.device)
        self.max_len = length
        return length

    @torch.no_grad()
    def forward(self, layout: VerifyLayout, taps: Sequence[int] = ()) -> TargetOutput:
        """One packed forward.

        Args:
            layout: S sequences, B tokens; see ``VerifyLayout``.
            taps: decoder layers whose raw output is wanted, before any final norm; -1 is what enters layer 0.

        Returns:
            Logits [N, V] of ``layout.logit_rows``, taps [B, len(taps) * d_t] in the order asked.
        """
        cache = self._checked_cache(layout)
        for layer in taps:
            self._hook(layer)
        cache.clean(layout.slots[layout.starts == 0])
        self.cache_version += 1
        context = SlotContext(layout, cache, self._specs, self._cost, kernel=self.attention, wanted=frozenset(taps))
        kwargs: dict[str, Any] = {CONTEXT_KEY: context}
        all_rows = len(layout.logit_rows) == layout.num_tokens
        rows = None if all_rows else torch.from_numpy(np.asarray(layout.logit_rows, dtype=np.int64)).to(self.device)
        if rows is not None and self._keeps_rows:
            kwargs["logits_to_keep"] = rows
        output = self.model(
            layout.token_ids[None], position_ids=layout.positions[None], use_cache=False, return_dict=True, **kwargs
        )
        logits = output.logits[0]
        if rows is not None and not self._keeps_rows:
            logits = logits.index_select(0, rows)
        if len(layout.logit_rows):
            cache.suspect = (self._owners(layout), logits[:, 0])
        if any(layer not in context.taps for layer in taps):
            raise TargetError(
                f"target {self.name!r}: its layers do not pass keyword arguments on, so they have no taps"
            )
        tapped = torch.cat([context.taps[layer] for layer in taps], dim=-1) if taps else None
        return TargetOutput(logits, tapped)

    @torch.no_grad()
    def copy_prefix(self, source: int, slot: int, length: int) -> bool:
        """See ``dspark.protocols.PrefixTarget``. False where logits or values of ``source`` are not finite."""
        if self._cache is None:
            raise TargetError(f"target {self.name!r}: call allocate() before copy_prefix()")
        self.cache_version += 1
        return self._cache.copy_prefix(source, slot, length)

    def executed_tokens(self, layout: VerifyLayout) -> int:
        """B: nothing is padded outside attention."""
        return layout.num_tokens

    def fingerprint(self) -> Mapping[str, str]:
        """What a measured cost depends on."""
        return describe(self.name, self.model, self.device, self.dtype, self.attention)

    def close(self) -> None:
        """Give the cache back, remove hooks, and restore the attention of a model taken with ``share=False``."""
        self._closed = True
        self._cache = None
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        self._unpack()
        for config, name in self._restore:
            config._attn_implementation_internal = name

    @torch.no_grad()
    def plain_logits(self, ids: Sequence[int]) -> Tensor:
        """Logits [n, V] of one sequence by transformers' own eager attention, without any cache: the reference."""
        tokens = torch.tensor([list(ids)], dtype=torch.long, device=self.device)
        self._set_attention("eager")
        try:
            logits: Tensor = self.model(tokens, use_cache=False).logits[0]
            return logits
        finally:
            self._set_attention(ATTENTION_NAME)

    def release_cache(self) -> None:
        """Give the cache's memory back; ``allocate`` makes a new one."""
        self._cache = None
        self.cache_version += 1
        self.max_len = self.model_limit

    # -- inside -------------------------------------------------------------------------------------------------

    def _set_attention(self, name: str) -> None:
        for config, _ in attention_of(self.model):
            config._attn_implementation_internal = name

    def _checked_cache(self, layout: VerifyLayout) -> SlotCache:
        cache = self._cache
        if cache is None:
            raise TargetError(f"target {self.name!r}: call allocate() before forward()")
        ends = layout.starts + layout.query_lens
        if int(ends.max()) > cache.max_len or int(layout.starts.min()) < 0:
            raise CapacityError(
                f"target {self.name!r}: a sequence reaches position {int(ends.max())}, "
                f"slots hold {cache.max_len} tokens"
            )
        if int(layout.slots.max()) >= cache.slots or int(layout.slots.min()) < 0:
            raise CapacityError(f"target {self.name!r}: slot {int(layout.slots.max())}, there are {cache.slots}")
        return cache

    @staticmethod
    def _owners(layout: VerifyLayout) -> np.ndarray[Any, Any]:
        at = np.searchsorted(layout.cu_query_lens, layout.logit_rows, side="right") - 1
        return np.asarray(layout.slots[at])

    def _hook(self, layer: int) -> None:
        if layer in self._hooks:
            return
        if not -1 <= layer < self.num_layers:
            raise TargetError(
                f"target {self.name!r}: no layer {layer} to tap, layers are 0..{self.num_layers - 1} (-1: embeddings)"
            )

        def keep(kwargs: dict[str, Any], hidden: Any) -> None:
            context = kwargs.get(CONTEXT_KEY)
            if isinstance(context, SlotContext) and layer in context.wanted:
                hidden = hidden[0] if isinstance(hidden, tuple) else hidden
                context.taps[layer] = hidden[0]

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            keep(kwargs, args[0] if args else kwargs["hidden_states"])

        def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            keep(kwargs, output)

        if layer < 0:
            self._hooks[layer] = self._layers[0].register_forward_pre_hook(before, with_kwargs=True)
        else:
            self._hooks[layer] = self._layers[layer].register_forward_hook(after, with_kwargs=True)


def build(config: HFTargetConfig, context: Any = None) -> HFTarget:
    """Load what ``config`` names. The factory of the ``hf`` target."""
    settings: dict[str, Any] = {"attention": config.attention, "fast": config.fast, "probe": config.probe}
    if not isinstance(config.model, (str, Path)):
        return HFTarget(config.model, config.tokenizer, **settings)
    if not str(config.model):
        raise ConfigError("HFTargetConfig.model: name a hub id, a folder, a .gguf file or 'smollm2'")
    model, tokenizer = load_model(
        str(config.model),
        revision=config.revision,
        dtype=config.dtype,
        device=config.device,
        device_map=config.device_map,
    )
    return HFTarget(model, tokenizer, name=str(config.model), share=False, **settings)
