"""The one definition of random numbers, for torch here and for every other backend.

A draw is a function of a 64-bit key and counters. On the host, key and counters fold into a 64-bit *row key*; on the
device, the row key's halves (k0, k1) and a 32-bit counter t give 32 bits::

    x = mix32(mix32(t ^ k0) + k1)        (mod 2**32)

From x come a Gumbel variate, u = f32((x + 1/2) * 2**-32), capped at 1 - 2**-24, g = -log(-log1p(-u)) in float32, and,
from the x of counters 0 and 1, a uniform of 53 bits in [0, 1). u is near 0 where g is large, so the upper tail keeps
float32's full relative precision, and g is never +inf; the cap keeps it from -inf, which would tie a token with masked
ones. Tokens are the counters of Gumbel noise; mix32 is a bijection, so no two tokens of a row share an x.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dspark.types import IntArray, KeyArray

NOISE = 1
"""Domain of Gumbel noise: (seed, absolute position), tokens as counters."""
UNIFORM = 2
"""Domain of scalar uniforms: (request key, anchor position, offset, purpose)."""
CHOICE = 3
"""Domain of derived seeds: (seed, index)."""
REQUEST = 4
"""Domain of request keys made from an engine's seed."""
DRAW = 5
"""Domain of Gumbel noise that draws one token: (request key, anchor position, offset, purpose), tokens as counters."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_MASK32, _MASK64 = (1 << 32) - 1, (1 << 64) - 1
_MUL1, _MUL2 = 0x7FEB352D, 0x846CA68B
_CHUNK = 1 << 16  # elements of a pass on the CPU: two int32 buffers of it stay in the second-level cache
_MAX_U = 1.0 - 2.0**-24


def mix64(x: KeyArray) -> KeyArray:
    """A bijection of 64-bit words in which every input bit flips every output bit with probability 1/2."""
    x = (x ^ (x >> np.uint64(30))) * _M1
    x = (x ^ (x >> np.uint64(27))) * _M2
    return x ^ (x >> np.uint64(31))


def row_keys(domain: int, keys: KeyArray | int, *counters: IntArray | KeyArray | int) -> KeyArray:
    """Fold 64-bit keys and counters, broadcast against each other, into 64-bit row keys.

    Each fold is a bijection of its counter, so rows that differ in one counter alone never collide.
    """
    if all(np.size(x) == 1 for x in (keys, *counters)):
        return _row_key(domain, *(int(np.asarray(x).reshape(-1)[0]) for x in (keys, *counters)))
    start = np.uint64(domain * int(_GOLDEN) % (1 << 64))
    h = mix64(np.atleast_1d(np.asarray(keys, dtype=np.uint64)) + start)
    for counter in counters:
        word = np.atleast_1d(np.asarray(counter))  # arrays wrap silently, numpy scalars warn
        word = word.astype(np.uint64) if word.dtype != np.uint64 else word
        h = mix64(h ^ (word * _GOLDEN + _M1))
    return h


def _row_key(domain: int, key: int, *counters: int) -> KeyArray:
    """``row_keys`` of a single row in plain integers, which is several times faster than arrays of one."""
    golden, m1 = int(_GOLDEN), int(_M1)
    h = _mix64_int((key + domain * golden) & _MASK64)
    for word in counters:
        h = _mix64_int(h ^ ((word * golden + m1) & _MASK64))
    return np.array([h], dtype=np.uint64)


def _mix64_int(x: int) -> int:
    x = (x ^ (x >> 30)) * int(_M1) & _MASK64
    x = (x ^ (x >> 27)) * int(_M2) & _MASK64
    return x ^ (x >> 31)


def _mix32_int(x: int) -> int:
    x = (x ^ (x >> 16)) * _MUL1 & _MASK32
    x = (x ^ (x >> 15)) * _MUL2 & _MASK32
    return x ^ (x >> 16)


def mix32_host(x: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """The 32-bit finaliser on the host; the specification of the device's."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(_MUL1)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(_MUL2)
    return x ^ (x >> np.uint32(16))


def bits_host(keys: KeyArray, counters: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """x of row keys [n] and counters [m]: [n, m] uint32, on the host."""
    k0 = (keys & np.uint64(0xFFFFFFFF)).astype(np.uint32)[:, None]
    k1 = (keys >> np.uint64(32)).astype(np.uint32)[:, None]
    return mix32_host(mix32_host(counters[None, :] ^ k0) + k1)


def uniforms(keys: KeyArray) -> npt.NDArray[np.float64]:
    """Uniforms in [0, 1) with 53 bits from the x of counters 0 and 1 of row keys [n], [n] float64."""
    if len(keys) == 1:
        k0, k1 = int(keys[0]) & _MASK32, int(keys[0]) >> 32
        first, second = (_mix32_int((_mix32_int(t ^ k0) + k1) & _MASK32) for t in (0, 1))
        return np.array([((first >> 5) << 26 | second >> 6) * 2.0**-53])
    x = bits_host(keys, np.arange(2, dtype=np.uint32)).astype(np.uint64)
    mantissa = ((x[:, 0] >> np.uint64(5)) << np.uint64(26)) | (x[:, 1] >> np.uint64(6))
    uniform: npt.NDArray[np.float64] = mantissa.astype(np.float64) * 2.0**-53
    return uniform


def _signed(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value


def _shift_xor(x: Tensor, bits: int, scratch: Tensor) -> None:
    torch.bitwise_right_shift(x, bits, out=scratch)
    scratch.bitwise_and_((1 << (32 - bits)) - 1)  # int32 shifts are arithmetic
    x.bitwise_xor_(scratch)


def _mix32(x: Tensor, scratch: Tensor) -> None:
    _shift_xor(x, 16, scratch)
    x.mul_(_signed(_MUL1))
    _shift_xor(x, 15, scratch)
    x.mul_(_signed(_MUL2))
    _shift_xor(x, 16, scratch)


def bits(keys: KeyArray, counters: Tensor) -> Tensor:
    """x of row keys [n] and counters [m] or [n, m] (int32): [n, m] int32 of the 32 bits, on the counters' device."""
    return bits_of_halves(key_halves(keys, counters.device), counters)


def key_halves(keys: KeyArray, device: torch.device | str | None = None) -> Tensor:
    """The low and the high 32 bits of row keys of any shape, [.., 2] int32: what a device hashes with."""
    words = np.ascontiguousarray(keys)
    halves = torch.from_numpy(words.view(np.int32).reshape(*words.shape, 2).copy())
    return (halves if np.little_endian else halves.flip(-1)).to(device)


def bits_of_halves(halves: Tensor, counters: Tensor) -> Tensor:
    """``bits`` of row keys that are on the device already, [n, 2] int32."""
    k0, k1 = halves[:, 0:1], halves[:, 1:2]
    x = counters ^ k0
    scratch = torch.empty_like(x)
    _mix32(x, scratch)
    x.add_(k1)
    _mix32(x, scratch)
    return x


def gumbel_of_bits(x: Tensor) -> Tensor:
    """g = -log(-log1p(-u)), u = f32((x + 1/2) * 2**-32) <= 1 - 2**-24, float32, for int32 words x of any shape."""
    low = (x & 0xFFFF).to(torch.float32).add_(0.5)
    # Both halves are exact in float32, so their sum is rounded once: it is f32(x + 1/2), with or without fma.
    u = ((x >> 16) & 0xFFFF).to(torch.float32).mul_(65536.0).add_(low).mul_(2.0**-32).clamp_(max=_MAX_U)
    return u.neg_().log1p_().neg_().log_().neg_()


def gumbel(
    seeds: KeyArray,
    positions: IntArray,
    vocab_size: int,
    token_ids: Tensor | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Gumbel noise of n (seed, absolute position) pairs for tokens 0..vocab_size-1, or ``token_ids``, [m] or [n, m].

    A function of (seed, position, token id) alone, whatever else is asked for in the call.

    Returns:
        [n, vocab_size] or [n, m] float32, on ``device`` (or on the device of ``token_ids``).
    """
    keys = row_keys(NOISE, seeds, positions)
    if token_ids is None:
        counters = torch.arange(vocab_size, dtype=torch.int32, device=device)
    else:
        counters = token_ids.to(dtype=torch.int32)
    n, m = len(keys), int(counters.shape[-1])
    if counters.device.type != "cpu" or n * m <= _CHUNK:
        return gumbel_of_bits(bits(keys, counters))
    noise = torch.empty(n, m, dtype=torch.float32)
    step = max(1, _CHUNK // m)
    for start in range(0, n, step):
        own = counters[start : start + step] if counters.dim() == 2 else counters
        noise[start : start + step] = gumbel_of_bits(bits(keys[start : start + step], own))
    return noise
