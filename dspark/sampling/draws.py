"""Production draws: every random decision is a hash of its key, so nothing depends on order, batch or thread."""

from __future__ import annotations

import os

import numpy as np
import torch
from torch import Tensor

from dspark.errors import DSparkError
from dspark.ops import noise, reference
from dspark.types import BoolArray, DrawKeys, IntArray, KeyArray


class CounterDraws:
    """The :class:`dspark.types.DrawSource` of a running engine. It has no state: one key, one value.

    Args:
        device: where noise is made where no ``token_ids`` say it.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    @staticmethod
    def uniforms(keys: DrawKeys) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """The uniform in [0, 1) of each key, [n]: a hash of request key, anchor, offset and purpose, all four."""
        rows = noise.row_keys(noise.UNIFORM, keys.request, keys.anchor, keys.offset, int(keys.purpose))
        return noise.uniforms(rows)

    def categorical(self, keys: DrawKeys, probs: Tensor) -> Tensor:
        """One draw from each row of ``probs`` [n, V] by one uniform and the inverse CDF, [n] int64.

        Rows are weights: what rounding left them short of 1 is scaled away. A token of probability 0 is never drawn.

        Raises:
            DSparkError: keys and rows differ in number.
        """
        _same_length(keys, probs, "categorical")
        return reference.inverse_cdf(probs, torch.from_numpy(self.uniforms(keys)))

    def accept(self, keys: DrawKeys, probs: Tensor) -> BoolArray:
        """u < probs [n]: probability 1 always accepts, 0 never.

        Raises:
            DSparkError: keys and probabilities differ in number.
        """
        _same_length(keys, probs, "accept")
        accepted: BoolArray = self.uniforms(keys) < probs.detach().to("cpu", torch.float64).numpy()
        return accepted

    def row_keys(self, keys: DrawKeys) -> KeyArray:
        """Row keys of the noise that decides each key's draw where an operation draws by noise, [n]."""
        place = keys.anchor, keys.offset, int(keys.purpose)
        return noise.row_keys(noise.DRAW, keys.request, *place)[: len(keys)]

    def gumbel(self, seeds: KeyArray, positions: IntArray, vocab_size: int, token_ids: Tensor | None = None) -> Tensor:
        """Noise of n (seed, absolute position) pairs, [n, V] float32, or [n, m] at ``token_ids``, [m] or [n, m]."""
        return noise.gumbel(seeds, positions, vocab_size, token_ids, self.device)


def _same_length(keys: DrawKeys, probs: Tensor, name: str) -> None:
    if len(keys) != probs.shape[0]:
        raise DSparkError(f"CounterDraws.{name}: {len(keys)} keys for {probs.shape[0]} rows of probabilities")


class RequestKeys:
    """Gives each request a 64-bit key that no other live one has.

    Args:
        seed: makes the sequence of keys reproducible; None takes each from the operating system.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._seed = seed
        self._count = 0

    def fresh(self) -> int:
        """The next key."""
        if self._seed is None:
            return int.from_bytes(os.urandom(8), "little")
        key = noise.row_keys(noise.REQUEST, self._seed, self._count)
        self._count += 1
        return int(key[0])


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice ``index`` of ``n``, or of prompt ``index`` of a data or evaluation run."""
    return int(noise.row_keys(noise.CHOICE, seed, index)[0])
