"""What a component may be able to do beside its protocol. It has an ability by having the method.

The names are public in :mod:`dspark.protocols`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from dspark.types import IntArray


@runtime_checkable
class PrefixTarget(Protocol):
    """What a target may offer beside its protocol: going on from what a slot holds of another request's text.

    What a forward wrote stays in a slot until another forward overwrites it, also after the request has left.

    Attributes:
        cache_version: another number after every call that may have written the cache (``forward``, ``allocate``,
            ``copy_prefix``, ..), whoever made it; how several engines on one target know of each other.
    """

    cache_version: int

    def copy_prefix(self, source: int, slot: int, length: int) -> bool:
        """Make positions 0..length-1 of ``slot`` those of ``source``; what lies behind them in ``slot`` is stale.

        The next forward of ``slot`` starts at ``length`` or before. The two may be one slot: then nothing is copied,
        and another request goes on in it.

        Returns:
            False where what ``source`` holds must not be used (its values are not finite, say); ``slot`` is unchanged.
        """
        ...


@runtime_checkable
class PrefixDrafter(Protocol):
    """What a drafter may offer beside its protocol: its state of a prefix that the target does not read again.

    Without it, a drafter that reads taps has every prompt read whole, and one that reads none has to do with the text.
    With it, ``release`` of a request that has left comes when its slot is taken.
    """

    def adopt(self, slot: int, generation: int, source: int, source_generation: int, length: int) -> int:
        """Begin request (slot, generation) with what (source, source_generation) has of its first ``length`` tokens.

        The source stays as it is, unless it is the same slot: then the new request takes its place, and ``release`` of
        the old generation changes nothing. An own state of (slot, generation) is replaced. Neither need be known.

        Returns:
            for how many tokens, 0..length, the state is there. The target reads the others again if the drafter reads
            taps.
        """
        ...


@runtime_checkable
class TeacherForced(Protocol):
    """What a drafter may offer beside its protocol: its law along a given text, so that drafters can be compared on
    identical prefixes."""

    def forced_logits(
        self, ids: Tensor, taps: Tensor | None, anchors: IntArray, gamma: int
    ) -> tuple[Tensor, Tensor | None]:
        """Draft logits of blocks along a text: position k reads the text's own x_{k-1}. No request is live.

        Args:
            ids: the text, [n].
            taps: the target's output at ``tap_layers`` of positions 0.., [>= largest anchor, m * d_t]; None where the
                drafter reads none.
            anchors: positions in the text, each with gamma - 1 tokens behind it, [A].

        Returns:
            Logits before temperature, [A, gamma, Vd], and the draft-to-target map [Vd] of their columns or None.
        """
        ...
