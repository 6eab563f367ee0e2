"""What a round does between drafting and the forward, on the device and without waiting for it: survival products, the
budget of ``lagged``, and the packed layout of given verify lengths. Plain torch; shapes do not depend on values, so
that CUDA graphs can hold it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def survival(probs: Tensor, max_lens: Tensor) -> Tensor:
    """a_{r,j} = prod_{i<=j} c_{r,i} (METHOD section 4), 0 beyond ``max_lens``.

    Args:
        probs: c, [R, gamma].
        max_lens: the longest prefix of each row that may be verified, [R].

    Returns:
        [R, gamma] float64.
    """
    products = torch.cumprod(probs.to(torch.float64), dim=1)
    return products.masked_fill(_positions(products) >= max_lens.unsqueeze(1), 0.0)


def lagged_budget(past: Tensor, max_lens: Tensor, seconds: Tensor, base_tokens: Tensor | int) -> Tensor:
    """K = argmax_k Theta(k) over survivals of two rounds ago (METHOD section 4, *lagged*); the least k of equals.

    Theta(k) = (R + the k largest survivals) / seconds at ``base_tokens + k`` tokens.

    Args:
        past: those survivals, or averages for rows without, [R, gamma].
        max_lens: [R]; what lies beyond can't be verified, and neither can what has survival 0.
        seconds: of a whole round that executes 0, 1, .. tokens, [at least base_tokens + R gamma + 1] float64.
        base_tokens: tokens that are executed without any draft.

    Returns:
        K, [] int64.
    """
    rows, gamma = past.shape
    open_ = (_positions(past) < max_lens.unsqueeze(1)) & (past > 0)
    ordered = torch.where(open_, past.to(torch.float64), 0.0).flatten().sort(descending=True).values
    gained = torch.cat((ordered.new_zeros(1), ordered.cumsum(0)))
    k = torch.arange(rows * gamma + 1, device=past.device)
    theta = (rows + gained) / seconds[base_tokens + k]
    theta = torch.where(k <= open_.sum(), theta, -1.0)
    return torch.argmax(theta)


def admit_top(current: Tensor, max_lens: Tensor, budget: Tensor | int) -> Tensor:
    """Verify lengths that admit the ``budget`` best candidates: by falling survival, equal ones by position, then row.

    Survivals do not rise along a row, so what is admitted of a row is a prefix of it. Which of equal candidates comes
    first depends on where they stand, never on a value.

    Args:
        current: a of this round's drafts, [R, gamma], as :func:`survival` gives it.
        max_lens: [R].
        budget: K.

    Returns:
        l, [R] int64.
    """
    rows, gamma = current.shape
    open_ = (_positions(current) < max_lens.unsqueeze(1)) & (current > 0)
    ranked = torch.where(open_, current, -1.0).T.flatten()  # position-major: a stable sort leaves equals in this order
    order = ranked.argsort(descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(rows * gamma, device=order.device))
    admitted = (rank < budget).view(gamma, rows).T & open_
    return admitted.sum(1)


class DevicePack(NamedTuple):
    """One packed forward of fixed size: R anchors with their scheduled drafts, then padding.

    Attributes:
        token_ids, positions: [capacity] int64; 0 in padding.
        owners: row of each token, [capacity] int64; -1 in padding.
        offsets: 0 for the anchor, k for x_k, [capacity] int64.
        cu_query_lens: [R + 1] int64; its last entry is B.
    """

    token_ids: Tensor
    positions: Tensor
    owners: Tensor
    offsets: Tensor
    cu_query_lens: Tensor


def pack_lengths(
    anchors: Tensor, drafts: Tensor, anchor_positions: Tensor, verify_lens: Tensor, capacity: int
) -> DevicePack:
    """Lay out anchors and the first ``verify_lens`` drafts of each row, one row after the other.

    Args:
        anchors: ids of the anchors, [R].
        drafts: x_1..x_gamma, [R, gamma].
        anchor_positions: absolute positions of the anchors, [R].
        verify_lens: l, [R], at most gamma.
        capacity: tokens of the forward, at least R + sum of l: R (1 + gamma) always is.
    """
    rows = anchors.shape[0]
    ends = (1 + verify_lens.to(torch.int64)).cumsum(0)
    cu = torch.cat((ends.new_zeros(1), ends))
    place = torch.arange(capacity, device=anchors.device)
    owner = torch.searchsorted(ends, place, right=True)
    used = owner < rows
    row = owner.clamp(max=rows - 1)
    offset = torch.where(used, place - cu[row], 0)
    drafted = drafts.to(torch.int64)[row, (offset - 1).clamp(min=0)] if drafts.shape[1] else anchors[row]
    token = torch.where(offset == 0, anchors.to(torch.int64)[row], drafted)
    return DevicePack(
        token_ids=torch.where(used, token, 0),
        positions=torch.where(used, anchor_positions.to(torch.int64)[row] + offset, 0),
        owners=torch.where(used, row, -1),
        offsets=offset,
        cu_query_lens=cu,
    )


def _positions(like: Tensor) -> Tensor:
    return torch.arange(like.shape[1], device=like.device).unsqueeze(0)
