"""``reject_sample`` in Triton: one pass over the target's logits, a second over each request's deciding row."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from dspark.errors import ConfigError
from dspark.ops import reject_sample as op
from dspark.ops.reject_sample import Decided, Law, Settings
from dspark.ops.triton.bias_sample import FOLD_TILES, dense, row_stride, unit_columns
from dspark.ops.triton.launch import Tile, architecture, device_guard, interpreted, launch, tile_for
from dspark.ops.triton.masks import find_masks
from dspark.ops.triton.reject_kernels import candidate_laws, decide, final_partials, fold_final, row_partials

ROW_BLOCK = 2048
"""Columns of a row that one program of the first pass takes; ``MASK_BLOCK`` those of a step of the mask search."""
MASK_BLOCK = 2048
FOLD_BLOCK = 128
"""Tiles of a step of ``decide``, whatever their number."""
_LOWEST = -(2**31)  # of the ordered scores: a threshold that masks nothing


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
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    gumbel = None if gumbel is None else unit_columns(gumbel.to(torch.float32))
    starts, lens, mode = (x.to(torch.int32).contiguous() for x in (starts, lens, mode))
    drafts, uniforms = drafts.to(torch.int64).contiguous(), uniforms.to(torch.float64).contiguous()
    keys, log_q = keys.contiguous(), dense(log_q, torch.float32)
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
    flags = {"HAS_SETTINGS": settings is not None, "HAS_MASKS": settings is not None and settings.masked}
    warm, masks = _warpers(settings, rows, device), _masks(flags["HAS_MASKS"], count, device)
    noise = (gumbel, row_stride(gumbel))
    tiles = triton.cdiv(width, ROW_BLOCK)
    floats = torch.empty(4, count, tiles, dtype=torch.float32, device=device)
    places = torch.empty(count, tiles, dtype=torch.int32, device=device)
    partials = (floats[0], places, floats[1], floats[2], floats[3])
    head = (logits, row_stride(logits))
    with device_guard(device):
        if flags["HAS_MASKS"]:
            launch(
                find_masks, (count,), *head, starts, lens, owners, mode, *warm[:3], *masks, width, BLOCK=MASK_BLOCK,
                num_warps=16 if architecture(device).startswith("sm_10") else 8,  # eight spill there in float16
            )  # fmt: skip
        launch(
            row_partials, (count, tiles), *head, starts, lens, owners, mode, warm[0], warm[3], *masks, keys,
            keys.stride(0), *noise, *partials, width, tiles, HAS_NOISE=gumbel is not None, BLOCK=ROW_BLOCK,
            num_warps=4, **flags,
        )  # fmt: skip
        launch(
            decide, (rows,), *head, starts, lens, drafts, mode, uniforms, log_q, warm[0], warm[3], *masks, *partials,
            accepted, token, log_prob, norms, chance, needs_q, width, tiles, gamma, HAS_Q=log_q is not None,
            BLOCK_T=FOLD_BLOCK, num_warps=1,
        )  # fmt: skip
        _draw_final(
            head, starts, lens, accepted, drafts, mode, warm, masks, norms, needs_q, keys, noise, law, draft_rows,
            token, log_prob, tile,
        )  # fmt: skip
    return Decided(accepted, token, log_prob, chance)


def _warpers(settings: Settings | None, rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Temperature, top-k, top-p and min-p of each request; without settings, such that do nothing."""
    if settings is None:
        ones, nought = torch.ones(rows, device=device), torch.zeros(rows, device=device)
        return ones, nought.view(torch.int32), ones, nought
    floats = (x.to(torch.float32).contiguous() for x in (settings.temperature, settings.top_p, settings.min_p))
    (temperature, top_p, min_p), top_k = floats, settings.top_k.to(torch.int32).contiguous()
    return temperature, top_k, top_p, min_p if settings.masked else torch.zeros_like(min_p)


def _masks(wanted: bool, rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Threshold, first id kept at it and largest score of each row of logits: to be found, or masking nothing."""
    if wanted:
        floors, cuts = torch.empty(2, rows, dtype=torch.int32, device=device)
        return floors, cuts, torch.empty(rows, dtype=torch.float32, device=device)
    nought = torch.zeros(rows, dtype=torch.int32, device=device)
    return torch.full((rows,), _LOWEST, dtype=torch.int32, device=device), nought, nought.view(torch.float32)


def _draw_final(
    head: Any, starts: Tensor, lens: Tensor, accepted: Tensor, drafts: Tensor, mode: Tensor, warm: Any, masks: Any,
    norms: Tensor, needs_q: Tensor, keys: Tensor, noise: Any, law: Law | None, draft_rows: Tensor | None,
    token: Tensor, log_prob: Tensor, tile: Tile | None,
) -> None:  # fmt: skip
    """The last two kernels: rejection rows get their token."""
    rows, gamma = drafts.shape
    width, device = int(head[0].shape[1]), head[0].device
    few = law is not None and law.candidates is not None
    rank = 0 if law is None or law.w2 is None or few else int(law.w2.shape[1])
    weights = head[0] if law is None or few else law.base if law.w2 is None else law.w2
    tile = tile if tile is not None else tile_for(op.OP, weights, rows=rows, rank=rank)
    tiles = triton.cdiv(width, tile.block_v)
    floats = torch.empty(4, rows, tiles, dtype=torch.float32, device=device)
    places = torch.empty(2, rows, tiles, dtype=torch.int32, device=device)
    drawn_from = _arguments_of(law, draft_rows, rows)
    known: dict[str, Any] = {**dict.fromkeys(_KNOWN), "known_width": 0}
    if law is not None and few:
        known = _known(law, drawn_from, lens, accepted, mode, tile, width)
        drawn_from = _arguments_of(None, None, rows) | {name: drawn_from[name] for name in ("draft_rows", "warmths")}
    sizes = {"RANK": rank, "BLOCK_R": tile.block_r, "BLOCK_V": tile.block_v, "BLOCK_D": tile.block_d(rank)}
    launch(
        final_partials, (tiles,), *head, starts, lens, accepted, drafts, mode, warm[0], warm[3], *masks, norms, needs_q,
        keys, keys.stride(0), *noise, *drawn_from.values(), *known.values(),
        floats[0], places[0], floats[1], floats[2], floats[3], places[1], rows, width,
        width if law is None else int(law.base.shape[2]), tiles, gamma,
        HAS_NOISE=noise[0] is not None, HAS_LAW=law is not None and not few, HAS_CANDIDATES=few,
        HAS_COLUMNS=drawn_from["columns"] is not None, UPCAST=interpreted(), num_warps=tile.num_warps,
        num_stages=tile.num_stages, **sizes,
    )  # fmt: skip
    launch(
        fold_final, (rows,), *head, starts, accepted, mode, warm[0], norms, floats[0], places[0], floats[1], floats[2],
        floats[3], places[1], token, log_prob, tiles, BLOCK_T=FOLD_TILES, num_warps=4,
    )  # fmt: skip


_LAW = (
    "base", "base_step", "base_row", "lse", "lse_row", "latent", "latent_row", "w2", "w2_row", "columns", "draft_rows",
    "block_rows", "warmths",
)  # fmt: skip
_KNOWN = ("known", "known_q", "firsts", "known_width")


def _arguments_of(law: Law | None, draft_rows: Tensor | None, rows: int) -> dict[str, Any]:
    """A law as the kernels' arguments take it, in their order."""
    if law is None:
        return dict.fromkeys(_LAW) | {name: 0 for name in _LAW if name.endswith(("_step", "_row"))} | {"block_rows": 0}
    base, w2 = (law.base if law.base.stride(-1) == 1 else law.base.contiguous()), unit_columns(law.w2)
    latent = None if law.latent is None else law.latent.contiguous()
    rank = 0 if law.w2 is None else int(law.w2.shape[1])
    own = torch.arange(rows, dtype=torch.int32, device=base.device) if draft_rows is None else draft_rows
    values = (
        base, base.stride(0), base.stride(1), dense(law.lse, torch.float64), int(law.lse.shape[1]), latent, rank, w2,
        row_stride(w2), dense(law.columns, torch.int32), dense(own, torch.int32), int(base.shape[1]),
        dense(law.temperature, torch.float32),
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
    launch(
        candidate_laws, (rows, triton.cdiv(kept, narrow.block_v)), *given.values(), lens, accepted, mode, chances, kept,
        RANK=rank, BLOCK_V=narrow.block_v, BLOCK_D=narrow.block_d(rank), num_warps=narrow.num_warps,
        num_stages=narrow.num_stages,
    )  # fmt: skip
    own = given["draft_rows"].to(torch.int64)
    names = law.candidates if law.names is None else law.names
    ids, order = names[accepted.clamp(max=len(names) - 1), own].sort(dim=1)
    edges = torch.arange(triton.cdiv(width, tile.block_v) + 1, dtype=ids.dtype, device=lens.device) * tile.block_v
    firsts = torch.searchsorted(ids, edges.expand(rows, -1).contiguous(), out_int32=True)
    values = (ids.to(torch.int32), chances.gather(1, order), firsts, kept)
    return dict(zip(_KNOWN, values, strict=True))
