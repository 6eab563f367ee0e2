"""The target's key-value memory: one slot a request, lengths kept by whoever makes the layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.errors import CapacityError
from dspark.targets.memory import available_bytes, human_bytes, lazy_zeros
from dspark.types import IntArray

# Of what a device has free, so much is left for activations and everybody else.
_HEADROOM = 0.9
_SMALLEST_LEN = 64


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one attention layer keeps and how it masks.

    Attributes:
        index: the layer's number.
        kv_heads: key and value heads.
        query_heads: query heads, a multiple of ``kv_heads``.
        key_dim, value_dim: widths of a head.
        window: tokens that a query sees, its own included; None for all before it.
        dtype: of keys and values.
        softcap: its scores are soft-capped, which fused attention can't do.
    """

    index: int
    kv_heads: int
    query_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    dtype: torch.dtype
    softcap: bool = False

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in this layer."""
        return self.kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


class SlotCache:
    """Keys [slots, kv_heads, max_len, key_dim] and values of every layer.

    Attributes:
        slots, max_len: its size.
        dtype: the widest of its layers.
        nbytes: what it takes once every page is touched.
        suspect: slots [N] of the last forward's logit rows and a column of them [N], looked at when it matters.
        joint: layer -> its keys [slots * kv_heads * max_len, dim] and then its values, where both are as wide.
    """

    def __init__(self, specs: Sequence[LayerSpec], slots: int, max_len: int, device: torch.device) -> None:
        self.slots, self.max_len, self.device = slots, max_len, device
        self.nbytes = slots * max_len * sum(spec.bytes_per_token for spec in specs)
        self.dtype = max((spec.dtype for spec in specs), key=lambda dtype: dtype.itemsize)
        self.suspect: tuple[IntArray, Tensor] | None = None
        self._dirty: set[int] = set()
        self.joint: dict[int, Tensor] = {}
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.flat_keys: dict[int, Tensor] = {}
        self.flat_values: dict[int, Tensor] = {}
        for spec in specs:
            rows = slots * spec.kv_heads * max_len
            if spec.key_dim == spec.value_dim:
                self.joint[spec.index] = lazy_zeros((2 * rows, spec.key_dim), spec.dtype, device)
                key, value = self.joint[spec.index][:rows], self.joint[spec.index][rows:]
            else:
                key = lazy_zeros((rows, spec.key_dim), spec.dtype, device)
                value = lazy_zeros((rows, spec.value_dim), spec.dtype, device)
            self.flat_keys[spec.index], self.flat_values[spec.index] = key, value
            self.keys[spec.index] = key.view(slots, spec.kv_heads, max_len, spec.key_dim)
            self.values[spec.index] = value.view(slots, spec.kv_heads, max_len, spec.value_dim)

    def clear(self, slot: int, start: int = 0) -> None:
        """Overwrite a slot from position ``start`` on with zeros."""
        for layer in self.keys:
            self.keys[layer][slot, :, start:].zero_()
            self.values[layer][slot, :, start:].zero_()

    def clean(self, fresh: IntArray) -> None:
        """Wipe those of the slots ``fresh``, where requests begin, whose last request had logits that are not finite.

        Its leftovers are masked, but 0 times what is no number is no number.
        """
        self._note()
        for slot in fresh.tolist() if self._dirty else ():
            if slot in self._dirty:
                self.clear(slot)
                self._dirty.discard(slot)

    def copy_prefix(self, source: int, slot: int, length: int) -> bool:
        """Let ``slot`` begin with the first ``length`` positions of ``source``, which may be itself.

        False, and nothing changes, where a request in ``source`` had logits that are not finite, or its values are not.
        The last layer's tell: what is no number in a layer makes none in those above it.
        """
        self._note()
        last = self.values[max(self.values)][source, :, :length]
        if source in self._dirty or not bool(torch.isfinite(last).all()):
            return False
        if source != slot:
            for kept in (*self.keys.values(), *self.values.values()):
                kept[slot, :, :length] = kept[source, :, :length]
        if slot in self._dirty:
            self.clear(slot, length)
            self._dirty.discard(slot)
        return True

    def _note(self) -> None:
        """Remember the slots that the last forward gave logits that are not finite."""
        if self.suspect is not None:
            slots, column = self.suspect
            bad = ~torch.isfinite(column).cpu().numpy()
            if bad.any():
                self._dirty.update(int(s) for s in slots[bad])
            self.suspect = None


def size_cache(
    specs: Sequence[LayerSpec],
    slots: int,
    max_len: int | None,
    *,
    default_len: int,
    budget_bytes: int | None,
    device: torch.device,
) -> int:
    """The slot length to take: ``max_len``, or as much of ``default_len`` as fits where none is asked.

    Raises:
        CapacityError: naming the bytes asked and the bytes allowed.
    """
    per_token = slots * sum(spec.bytes_per_token for spec in specs)
    allowed, source = budget_bytes, "the budget (kv_budget_bytes)"
    free = available_bytes(device)
    if free is not None and (allowed is None or int(free * _HEADROOM) < allowed):
        allowed, source = int(free * _HEADROOM), f"{_HEADROOM:.0%} of the free memory of {device}"
    length = default_len if max_len is None else max_len
    if allowed is None or per_token * length <= allowed:
        return length
    fits = allowed // per_token
    if max_len is None and fits >= _SMALLEST_LEN:
        return int(fits - fits % _SMALLEST_LEN)
    slots_that_fit = allowed * slots // (per_token * length)
    ways = [f"lower max_len to {fits} or less"] if fits else []
    ways += [f"lower max_slots to {slots_that_fit} or less"] if slots_that_fit else []
    raise CapacityError(
        f"the key-value cache of {slots} slots x {length} tokens asks {per_token * length} bytes "
        f"({human_bytes(per_token * length)}), but {source} allows {allowed} bytes ({human_bytes(allowed)}): "
        + ", or ".join([*ways, "allow more (kv_budget_bytes) where the device has it"])
    )
