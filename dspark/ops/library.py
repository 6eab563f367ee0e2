"""``bias_sample`` and ``reject_sample`` as torch operators, ``torch.ops.dspark``: opaque to ``torch.compile``, with
shapes that it can trace, and capturable by CUDA graphs (no launch reads anything back to the host).

On a CPU they run the reference, on a GPU Triton's kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dspark.ops import bias_sample as bias
from dspark.ops import reject_sample as reject
from dspark.ops.bias_sample import Sampled
from dspark.ops.reject_sample import Decided, Law, Settings


@torch.library.custom_op("dspark::bias_sample", mutates_args=(), device_types="cpu")
def _bias_sample(
    base: Tensor,
    temperature: Tensor,
    keys: Tensor,
    latent: Tensor | None = None,
    w2: Tensor | None = None,
    token_map: Tensor | None = None,
    candidates: Tensor | None = None,
    gumbel: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    token, log_q, lse = bias.reference(base, temperature, keys, latent, w2, token_map, candidates, gumbel)
    return token, log_q, lse


@_bias_sample.register_kernel("cuda")
def _bias_sample_cuda(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    from dspark.ops.triton.bias_sample import bias_sample

    return tuple(bias_sample(*arguments))  # type: ignore[return-value]


@_bias_sample.register_fake
def _bias_sample_shapes(base: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows = base.shape[0]
    whole, floats = (base.new_empty(rows, dtype=t) for t in (torch.int64, torch.float32))
    return whole, floats, base.new_empty(rows, dtype=torch.float64)


@torch.library.custom_op("dspark::reject_sample", mutates_args=(), device_types="cpu")
def _reject_sample(
    logits: Tensor,
    starts: Tensor,
    lens: Tensor,
    drafts: Tensor,
    mode: Tensor,
    uniforms: Tensor,
    keys: Tensor,
    log_q: Tensor | None,
    law: list[Tensor],
    head: list[Tensor],
    columns: Tensor | None,
    candidates: Tensor | None,
    names: Tensor | None,
    draft_rows: Tensor | None,
    settings: list[Tensor],
    masked: bool,
    gumbel: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    packed = unpack(law, head, (columns, candidates, names), settings, masked)
    accepted, token, log_prob, chance = reject.reference(
        logits, starts, lens, drafts, mode, uniforms, keys, log_q, packed[0], draft_rows, packed[1], gumbel
    )
    return accepted, token, log_prob, chance


@_reject_sample.register_kernel("cuda")
def _reject_sample_cuda(
    logits: Tensor, starts: Tensor, lens: Tensor, drafts: Tensor, mode: Tensor, uniforms: Tensor, keys: Tensor,
    log_q: Tensor | None, law: list[Tensor], head: list[Tensor], columns: Tensor | None, candidates: Tensor | None,
    names: Tensor | None, draft_rows: Tensor | None, settings: list[Tensor], masked: bool, gumbel: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from dspark.ops.triton.reject_sample import reject_sample

    packed = unpack(law, head, (columns, candidates, names), settings, masked)
    return tuple(  # type: ignore[return-value]
        reject_sample(
            logits, starts, lens, drafts, mode, uniforms, keys, log_q, packed[0], draft_rows, packed[1], gumbel
        )
    )


@_reject_sample.register_fake
def _reject_sample_shapes(
    logits: Tensor, starts: Tensor, lens: Tensor, drafts: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, width = drafts.shape
    whole = drafts.new_empty(rows, dtype=torch.int64)
    floats = logits.new_empty(rows, dtype=torch.float32)
    return whole, torch.empty_like(whole), floats, logits.new_empty(rows, width, dtype=torch.float32)


def unpack(
    law: list[Tensor],
    head: list[Tensor],
    ids: tuple[Tensor | None, Tensor | None, Tensor | None],
    settings: list[Tensor],
    masked: bool,
) -> tuple[Law | None, Settings | None]:
    """The dataclasses of an operator's flat arguments; ``ids`` are a law's columns, candidates and names."""
    latent, w2 = head if head else (None, None)
    known = Law(law[0], law[1], law[2], latent, w2, *ids) if law else None
    return known, (Settings(settings[0], settings[1], settings[2], settings[3], masked) if settings else None)


def bias_sample(
    base: Tensor,
    temperature: Tensor,
    keys: Tensor,
    latent: Tensor | None = None,
    w2: Tensor | None = None,
    token_map: Tensor | None = None,
    candidates: Tensor | None = None,
    gumbel: Tensor | None = None,
) -> Sampled:
    """:func:`dspark.ops.bias_sample.reference` through ``torch.ops.dspark.bias_sample``."""
    return Sampled(*_bias_sample(base, temperature, keys, latent, w2, token_map, candidates, gumbel))


def reject_sample(
    logits: Tensor,
    starts: Tensor,
    lens: Tensor,
    drafts: Tensor,
    mode: Tensor,
    uniforms: Tensor,
    keys: Tensor,
    log_q: Tensor | None = None,
    law: Law | None = None,
    draft_rows: Tensor | None = None,
    settings: Settings | None = None,
    gumbel: Tensor | None = None,
) -> Decided:
    """:func:`dspark.ops.reject_sample.reference` through ``torch.ops.dspark.reject_sample``."""
    flat = [] if law is None else [law.base, law.lse, law.temperature]
    head = [] if law is None or law.latent is None or law.w2 is None else [law.latent, law.w2]
    ids = (None, None, None) if law is None else (law.columns, law.candidates, law.names)
    warm = [] if settings is None else [settings.temperature, settings.top_k, settings.top_p, settings.min_p]
    masked = settings is not None and settings.masked
    found = _reject_sample(
        logits, starts, lens, drafts, mode, uniforms, keys, log_q, flat, head, *ids, draft_rows, warm, masked, gumbel
    )
    return Decided(*found)


def build_bias_sample(config: object, context: Any) -> Any:
    """Factory of ``bias_sample.triton``: the operator on a GPU, the kernels themselves under the interpreter."""
    if getattr(context, "device", None) is not None and torch.device(context.device).type != "cpu":
        return bias_sample
    from dspark.ops.triton.bias_sample import bias_sample as kernels

    return kernels


def build_reject_sample(config: object, context: Any) -> Any:
    """Factory of ``reject_sample.triton``; see :func:`build_bias_sample`."""
    if getattr(context, "device", None) is not None and torch.device(context.device).type != "cpu":
        return reject_sample
    from dspark.ops.triton.reject_sample import reject_sample as kernels

    return kernels


def build_bias_reference(config: object, context: Any) -> Any:
    """Factory of ``bias_sample.reference``."""
    return bias.reference


def build_reject_reference(config: object, context: Any) -> Any:
    """Factory of ``reject_sample.reference``."""
    return reject.reference
