"""Which sequences share a batched attention: padding against the cost of one more call.

A packed forward has sequences of unequal query lengths and contexts. Attention runs over *groups* of them, each padded
to its longest query and context inside attention alone. A group is best a range of slots, because keys and values are
then views of the cache; where equals lie far apart, a copy of their keys can still be cheaper than many small calls.
The plan is a function of the layout alone, so that the same layout gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LONG_QUERY = 32
"""Query lengths above this attend alone, as prompt chunks do: padding others to them never pays."""


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """Microseconds of one batched attention, for plans only; its order of magnitude is what matters.

    Attributes:
        call: a group's fixed cost.
        head: per (slot, key-value head).
        key: per key that is read.
        score: per (query row, key).
        copy: per key whose key and value are gathered first, beyond the copy that a product of a view makes anyway.
        kv_heads, fold: key-value heads, and query heads that share one.
    """

    call: float
    head: float
    key: float
    score: float
    copy: float
    kv_heads: int
    fold: int

    @classmethod
    def of(cls, device_type: str, kv_heads: int, fold: int, head_dim: int, *, views: bool = False) -> AttentionCost:
        """Constants for a device, from a head's width; ``views`` where products read the cache without a copy."""
        width = head_dim / 64
        if device_type == "cpu":
            copy = 13e-3 if views else 2.5e-3
            return cls(90.0, 1.6, 15e-3 * width, 1.6e-3 * width, copy * width, kv_heads, fold)
        return cls(60.0, 1e-3, 1e-4 * width, 1e-5 * width, 3e-4 * width, kv_heads, fold)

    def group(self, slots: int, q_len: int, k_len: int, gathered: bool = False) -> float:
        """Cost of ``slots`` slots padded to ``q_len`` queries and ``k_len`` keys."""
        per_key = self.key + self.score * self.fold * q_len + (self.copy if gathered else 0.0)
        return self.call + slots * self.kv_heads * (self.head + k_len * per_key)


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences that attend together.

    Attributes:
        seqs: indices into the layout, in slot order.
        first_slot, num_slots: the range of slots that holds them (idle ones in between are computed and dropped).
        q_len, k_len: longest query and context, in tokens.
        gathered: keys are copied slot by slot instead of read as a range.
    """

    seqs: tuple[int, ...]
    first_slot: int
    num_slots: int
    q_len: int
    k_len: int
    gathered: bool = False

    @property
    def batch(self) -> int:
        """Rows of the batched attention."""
        return len(self.seqs) if self.gathered else self.num_slots


def plan_groups(
    slots: Sequence[int], starts: Sequence[int], query_lens: Sequence[int], cost: AttentionCost
) -> tuple[Group, ...]:
    """Partition the sequences of a layout into groups."""
    singles: list[Group] = []
    runs: list[Group] = []
    for seq in sorted(range(len(slots)), key=slots.__getitem__):
        one = Group((seq,), slots[seq], 1, query_lens[seq], starts[seq] + query_lens[seq])
        if one.q_len > LONG_QUERY:
            singles.append(one)
        elif runs and _alike(runs[-1], one) and one.first_slot - _end(runs[-1]) <= 1:
            runs[-1] = _join(runs[-1], one)
        else:
            runs.append(one)
    return tuple(singles + _arrange(runs, cost))


def _end(group: Group) -> int:
    return group.first_slot + group.num_slots


def _length_class(group: Group) -> tuple[int, int]:
    return (group.k_len - 1) // 64 if group.k_len <= 512 else 6 + group.k_len.bit_length(), group.q_len.bit_length()


def _alike(a: Group, b: Group) -> bool:
    return _length_class(a) == _length_class(b)


def _join(a: Group, b: Group) -> Group:
    """The range over two neighbours; ``a`` comes first."""
    span = _end(b) - a.first_slot
    return Group(a.seqs + b.seqs, a.first_slot, span, max(a.q_len, b.q_len), max(a.k_len, b.k_len))


def _price(group: Group, cost: AttentionCost) -> float:
    return cost.group(group.batch, group.q_len, group.k_len, group.gathered)


def _arrange(runs: list[Group], cost: AttentionCost) -> list[Group]:
    """The cheapest of one range over everything, and of gathered runs, merged before or not."""
    if len(runs) < 2:
        return runs
    whole = runs[0]
    for run in runs[1:]:
        whole = _join(whole, run)
    price = _price(whole, cost)
    floor = cost.call + sum(_price(run, cost) - cost.call for run in runs)
    if price <= 1.1 * floor:
        return [whole]
    plans = [whole], _gather(_merge(runs, cost), cost), _gather(runs, cost)
    return min(plans, key=lambda plan: sum(_price(part, cost) for part in plan))


def _merge(runs: list[Group], cost: AttentionCost) -> list[Group]:
    """Join neighbouring runs while that lowers the cost, the largest gain first."""
    runs = list(runs)
    prices = [_price(run, cost) for run in runs]
    gains = [prices[i] + prices[i + 1] - _price(_join(runs[i], runs[i + 1]), cost) for i in range(len(runs) - 1)]
    while gains:
        best = max(range(len(gains)), key=gains.__getitem__)
        if gains[best] <= 0:
            break
        runs[best : best + 2] = [_join(runs[best], runs[best + 1])]
        prices[best : best + 2] = [_price(runs[best], cost)]
        del gains[best]
        for i in (best - 1, best):
            if 0 <= i < len(gains):
                gains[i] = prices[i] + prices[i + 1] - _price(_join(runs[i], runs[i + 1]), cost)
    return runs


def _gather(runs: list[Group], cost: AttentionCost) -> list[Group]:
    """Copy the keys of like runs that lie apart, where that is cheaper than one call each."""
    if len(runs) < 3:
        return runs
    classes: dict[tuple[int, int], list[Group]] = {}
    for run in runs:
        classes.setdefault(_length_class(run), []).append(run)
    out: list[Group] = []
    for alike in classes.values():
        q_len, k_len = max(run.q_len for run in alike), max(run.k_len for run in alike)

        def added(run: Group, q_len: int = q_len, k_len: int = k_len) -> float:
            return cost.group(len(run.seqs), q_len, k_len, gathered=True) - cost.call

        moved = [run for run in alike if added(run) < _price(run, cost)]
        if cost.call + sum(added(run) for run in moved) >= sum(_price(run, cost) for run in moved):
            moved = []
        if moved:
            seqs = tuple(seq for run in moved for seq in run.seqs)
            out.append(Group(seqs, moved[0].first_slot, len(seqs), q_len, k_len, gathered=True))
        out.extend(run for run in alike if run not in moved)
    return out
