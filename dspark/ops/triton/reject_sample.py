"""``reject_sample`` in Triton: one pass over the target's logits, a second over each request's deciding row."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from dspark.errors import ConfigError
from dspark.ops import reject_sample as op
from dspark.ops.reject_sample import Decided, Law, Settings
from dspark.ops.triton.bias_sample import row_stride, unit_columns, whole
from dspark.ops.triton.launch import Tile, device_guard, interpreted, power_of_two, tile_for
from dspark.ops.triton.masks import find_masks
from dspark.ops.triton.reject_kernels import candidate_laws, decide, final_partials, fold_final, row_partials

ROW_BLOCK = 2048
"""Columns of a row that one program of the first pass takes; ``MASK_BLOCK`` those of a step of the mask search."""
MASK_BLOCK = 2048
FOLD_BLOCK = 256


def owners_of(starts: Tensor, rows: int) -> Tensor:
    """The request of each row of the logits, -1 before the first, [N] int32; ``starts`` [R] rise."""
    place = torch.arange(rows, device=starts.device, dtype=starts.dtype)
    return (torch.searchsorted(starts, place, right=True) - 1).to(torch.int32)


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
    *,
    tile: Tile | None = None,
) -> Decided:
    """See :func:`dspark.ops.reject_sample.reference`, whose arguments these are.

    Args:
        tile: sizes and warps of the last pass; None for the tuned table's.
    """
    op.check(logits, starts, lens, drafts, mode, uniforms, keys, log_q, law, draft_rows, settings, gumbel)
    logits, gumbel = (logits if logits.stride(1) == 1 else logits.contiguous()), unit_columns(gumbel)
    starts, lens, mode, drafts = starts.contiguous(), lens.contiguous(), mode.contiguous(), drafts.contiguous()
    uniforms, keys, log_q = uniforms.contiguous(), keys.contiguous(), whole(log_q)
    device, (rows, gamma), (count, width) = logits.device, drafts.shape, logits.shape
    accepted = torch.zeros(rows, dtype=torch.int64, device=device)
    token = torch.zeros_like(accepted)  # memory of its own: outputs of an operator may not share any
    log_prob = torch.full((rows,), float("nan"), device=device)
    norms = torch.full((rows,), float("nan"), dtype=torch.float64, device=device)
    chance = torch.zeros(rows, gamma, device=device)
    if not rows:
        return Decided(accepted, token, log_prob, chance)
    needs_q = torch.zeros(1, dtype=torch.int32, device=device)
    owners = owners_of(starts, count)
    masks = [torch.empty(count, dtype=t, device=device) for t in (torch.int32, torch.int32, torch.float32)]
    warm = (None, None, None, None) if settings is None else _warpers(settings)
    flags = {"HAS_SETTINGS": settings is not None, "HAS_MASKS": settings is not None and settings.masked}
    noise = (gumbel, row_stride(gumbel))
    tiles = triton.cdiv(width, ROW_BLOCK)
    floats = torch.empty(4, count, tiles, dtype=torch.float32, device=device)
    places = torch.empty(count, tiles, dtype=torch.int32, device=device)
    partials = (floats[0], places, floats[1], floats[2], floats[3])
    head = (logits, row_stride(logits))
    with device_guard(device):
        if flags["HAS_MASKS"]:
            find_masks[(count,)](
                *head, starts, lens, owners, mode, warm[0], warm[1], warm[2], *masks, width, BLOCK=MASK_BLOCK,
                num_warps=8,
            )  # fmt: skip
        row_partials[(count, tiles)](
            *head, starts, lens, owners, mode, warm[0], warm[3], *masks, keys, 2 * (gamma + 1), *noise, *partials,
            width, tiles, HAS_NOISE=gumbel is not None, BLOCK=ROW_BLOCK, num_warps=4, **flags,
        )  # fmt: skip
        decide[(rows,)](
            *head, starts, lens, drafts, mode, uniforms, log_q, warm[0], warm[3], *masks, *partials, accepted, token,
            log_prob, norms, chance, needs_q, width, tiles, gamma, HAS_Q=log_q is not None,
            BLOCK_T=min(FOLD_BLOCK, power_of_two(tiles)), num_warps=1, **flags,
        )  # fmt: skip
        _draw_final(
            head, starts, lens, accepted, drafts, mode, warm, masks, norms, needs_q, keys, noise, law, draft_rows,
            token, log_prob, flags, tile,
        )  # fmt: skip
    return Decided(accepted, token, log_prob, chance)


def _warpers(settings: Settings) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    values = (settings.temperature, settings.top_k, settings.top_p, settings.min_p)
    return tuple(x.contiguous() for x in values)  # type: ignore[return-value]


def _draw_final(
    head: Any, starts: Tensor, lens: Tensor, accepted: Tensor, drafts: Tensor, mode: Tensor, warm: Any, masks: Any,
    norms: Tensor, needs_q: Tensor, keys: Tensor, noise: Any, law: Law | None, draft_rows: Tensor | None,
    token: Tensor, log_prob: Tensor, flags: dict[str, bool], tile: Tile | None,
) -> None:  # fmt: skip
    """The last two kernels: rejection rows get their token."""
    rows, gamma = drafts.shape
    width, device = int(head[0].shape[1]), head[0].device
    few = law is not None and law.candidates is not None
    rank = 0 if law is None or law.w2 is None or few else int(law.w2.shape[1])
    weights = law.w2 if rank and law is not None and law.w2 is not None else head[0] if law is None else law.base
    tile = tile if tile is not None else tile_for(op.OP, weights, rows=rows, rank=rank)
    tiles = triton.cdiv(width, tile.block_v)
    floats = torch.empty(4, rows, tiles, dtype=torch.float32, device=device)
    places = torch.empty(2, rows, tiles, dtype=torch.int32, device=device)
    drawn_from = _arguments_of(law, draft_rows)
    known: dict[str, Any] = {**dict.fromkeys(_KNOWN), "known_width": 0}
    if law is not None and few:
        known = _known(law, drawn_from, lens, accepted, mode, tile, width)
        drawn_from |= dict.fromkeys(("base", "lse", "latent", "w2", "columns"))
    sizes = {"RANK": rank, "BLOCK_R": tile.block_r, "BLOCK_V": tile.block_v, "BLOCK_D": tile.block_d(rank)}
    final_partials[(tiles,)](
        *head, starts, lens, accepted, drafts, mode, warm[0], warm[3], *masks, norms, needs_q,
        keys, keys.stride(0), *noise, *drawn_from.values(), *known.values(),
        floats[0], places[0], floats[1], floats[2], floats[3], places[1], rows, width,
        width if law is None else int(law.base.shape[2]), tiles, gamma,
        HAS_NOISE=noise[0] is not None, HAS_LAW=law is not None and not few, HAS_CANDIDATES=few,
        HAS_COLUMNS=drawn_from["columns"] is not None, HAS_ROWS=drawn_from["draft_rows"] is not None,
        UPCAST=interpreted(), num_warps=tile.num_warps, num_stages=tile.num_stages, **sizes, **flags,
    )  # fmt: skip
    fold_final[(rows,)](
        *head, starts, accepted, mode, warm[0], norms, floats[0], places[0], floats[1], floats[2], floats[3],
        places[1], token, log_prob, tiles, HAS_SETTINGS=flags["HAS_SETTINGS"],
        BLOCK_T=min(1024, power_of_two(tiles)), num_warps=4,
    )  # fmt: skip


_LAW = (
    "base", "base_step", "base_row", "lse", "lse_row", "latent", "latent_row", "w2", "w2_row", "columns", "draft_rows",
    "block_rows", "warmths",
)  # fmt: skip
_KNOWN = ("known", "known_q", "firsts", "known_width")


def _arguments_of(law: Law | None, draft_rows: Tensor | None) -> dict[str, Any]:
    """A law as the kernels' arguments take it, in their order."""
    if law is None:
        return dict.fromkeys(_LAW) | {name: 0 for name in _LAW if name.endswith(("_step", "_row"))} | {"block_rows": 0}
    base, w2 = (law.base if law.base.stride(-1) == 1 else law.base.contiguous()), unit_columns(law.w2)
    latent = None if law.latent is None else law.latent.contiguous()
    rank = 0 if law.w2 is None else int(law.w2.shape[1])
    values = (
        base, base.stride(0), base.stride(1), law.lse.contiguous(), int(law.lse.shape[1]), latent, rank, w2,
        row_stride(w2), whole(law.columns), whole(draft_rows), int(base.shape[1]), whole(law.temperature),
    )  # fmt: skip
    return dict(zip(_LAW, values, strict=True))


def _known(
    law: Law, drawn_from: dict[str, Any], lens: Tensor, accepted: Tensor, mode: Tensor, tile: Tile, width: int
) -> dict[str, Any]:
    """The candidates of each request's rejected draft: target ids [R, K] that rise, q at them, and the first of each
    tile of tokens [R, tiles + 1]."""
    if law.candidates is None:
        raise ConfigError(f"{op.OP}: a law without candidates")
    rows, kept = len(lens), int(law.base.shape[2])
    narrow = tile.narrow()
    rank = 0 if law.w2 is None else int(law.w2.shape[1])
    chances = torch.zeros(rows, kept, dtype=torch.float32, device=lens.device)
    given = {**drawn_from, "columns": law.candidates.to(torch.int64).contiguous()}
    candidate_laws[(triton.cdiv(kept, narrow.block_v), rows)](
        *given.values(), lens, accepted, mode, chances, kept, HAS_ROWS=given["draft_rows"] is not None,
        RANK=rank, BLOCK_V=narrow.block_v, BLOCK_D=narrow.block_d(rank), num_warps=narrow.num_warps,
        num_stages=narrow.num_stages,
    )  # fmt: skip
    draft_rows = given["draft_rows"]
    own = torch.arange(rows, device=lens.device) if draft_rows is None else draft_rows.to(torch.int64)
    names = law.candidates if law.names is None else law.names
    ids, order = names[accepted.clamp(max=len(names) - 1), own].sort(dim=1)
    edges = torch.arange(triton.cdiv(width, tile.block_v) + 1, dtype=ids.dtype, device=lens.device) * tile.block_v
    firsts = torch.searchsorted(ids, edges.expand(rows, -1).contiguous(), out_int32=True)
    values = (ids.to(torch.int32), chances.gather(1, order), firsts, kept)
    return dict(zip(_KNOWN, values, strict=True))
