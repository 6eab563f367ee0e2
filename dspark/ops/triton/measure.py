"""What a call of the kernels must cost at least, what it costs, and which tile costs least.

A call has two floors: the bytes that it has to move over the device's measured copy bandwidth, and its operations over
the measured rate of a matrix product.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from dspark.errors import DSparkError
from dspark.ops import bias_sample, noise, reject_sample
from dspark.ops.triton.launch import SIZE_CLASSES, SMALL_ROWS, Tile, architecture, intercepted
from dspark.types import Purpose

OPS = ("bias_sample", "reject_sample")
ROWS = (1, 8, 64, 256)


@dataclass(frozen=True, slots=True)
class Size:
    """A call: R rows, vocabulary, the head's rank, block size, dtype. By default those of Qwen3-4B's drafter."""

    rows: int
    vocab: int = 151_936
    rank: int = 256
    gamma: int = 7
    dtype: str = "bfloat16"

    @property
    def itemsize(self) -> int:
        return torch.empty(0, dtype=getattr(torch, self.dtype)).element_size()


@dataclass(frozen=True, slots=True)
class Floor:
    """Bytes to move and operations of one call, and the bytes of its goal: W2, or the target's logits, read once."""

    moved: int
    operations: int
    goal_bytes: int


def floor_of(op: str, size: Size) -> Floor:
    """The floors of one call; of ``reject_sample``, with a rejection in some row."""
    weights = size.vocab * size.rank * size.itemsize
    row = size.vocab * size.itemsize
    products = 2 * size.rows * size.vocab * size.rank
    if op == "bias_sample":
        return Floor(weights + size.rows * row, products, weights)
    logits = size.rows * (1 + size.gamma) * row
    return Floor(logits + weights + 2 * size.rows * row, products, logits)


def problem(op: str, size: Size, device: torch.device, seed: int = 0) -> dict[str, Any]:
    """Arguments of a call of this size: drafts of a law close to the target's, every one to be verified."""
    g = torch.Generator(device=device).manual_seed(seed)
    dtype = getattr(torch, size.dtype)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=g, device=device) * scale).to(dtype)

    def keys(offsets: int, purpose: Purpose) -> torch.Tensor:
        requests = np.arange(size.rows, dtype=np.uint64)[:, None]
        words = noise.row_keys(noise.DRAW, requests, 100, np.arange(offsets)[None, :], int(purpose))
        return noise.key_halves(words.reshape(size.rows, offsets), device)

    warm = torch.ones(size.rows, device=device)
    w2 = normal(size.vocab, size.rank, scale=0.02)
    if op == "bias_sample":
        latent = normal(size.rows, size.rank)
        base = normal(size.rows, size.vocab, scale=2.0)
        return {"base": base, "temperature": warm, "keys": keys(1, Purpose.DRAFT)[:, 0], "latent": latent, "w2": w2}
    base = normal(size.gamma, size.rows, size.vocab, scale=2.0)
    latent = normal(size.gamma, size.rows, size.rank)
    drawn = [
        bias_sample.reference(base[k], warm, keys(size.gamma, Purpose.DRAFT)[:, k], latent[k], w2)
        for k in range(size.gamma)
    ]
    width = 1 + size.gamma
    near = torch.cat((base, normal(1, size.rows, size.vocab, scale=2.0))).transpose(0, 1).reshape(-1, size.vocab)
    return {
        "logits": near + normal(*near.shape, scale=0.3),
        "starts": torch.arange(size.rows, dtype=torch.int32, device=device) * width,
        "lens": torch.full((size.rows,), size.gamma, dtype=torch.int32, device=device),
        "drafts": torch.stack([d.token for d in drawn], 1),
        "mode": torch.full((size.rows,), reject_sample.REJECTION, dtype=torch.int32, device=device),
        "uniforms": torch.rand(size.rows, size.gamma, generator=g, device=device, dtype=torch.float64),
        "keys": keys(width, Purpose.RESIDUAL),
        "log_q": torch.stack([d.log_q for d in drawn], 1),
        "law": reject_sample.Law(base, torch.stack([d.lse for d in drawn]), warm, latent, w2),
    }


def milliseconds(call: Callable[[], Any]) -> float:
    """Median time of a call on the current device, caches flushed between calls."""
    from triton.testing import do_bench

    return float(do_bench(call, warmup=25, rep=200, return_mode="median"))


def bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy of 1 GiB moves, reads and writes counted."""
    source = torch.empty(1 << 29, dtype=torch.int16, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / (milliseconds(lambda: target.copy_(source)) / 1000)


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a square matrix product."""
    n = 8192
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return 2 * n**3 / (milliseconds(lambda: a @ b) / 1000)


def kernel_of(op: str) -> Callable[..., Any]:
    """The Triton kernels of an operation."""
    if op == "bias_sample":
        from dspark.ops.triton.bias_sample import bias_sample as kernel

        return kernel
    from dspark.ops.triton.reject_sample import reject_sample as other

    return other


def measure(op: str, size: Size, device: torch.device, rates: tuple[float, float]) -> dict[str, Any]:
    """Time of one call, ours, in torch eager and compiled, against its floors.

    Args:
        rates: bytes a second and operations a second of the device.
    """
    arguments = problem(op, size, device)
    plain = bias_sample.reference if op == "bias_sample" else reject_sample.reference
    kernel, compiled = kernel_of(op), torch.compile(plain)
    floor = floor_of(op, size)
    times = {
        "ours": milliseconds(lambda: kernel(**arguments)),
        "eager": milliseconds(lambda: plain(**arguments)),
        "compiled": milliseconds(lambda: compiled(**arguments)),
    }
    least = {"bytes": 1000 * floor.moved / rates[0], "operations": 1000 * floor.operations / rates[1]}
    return {
        "op": op,
        **asdict(size),
        "milliseconds": times,
        "floor_milliseconds": least,
        "over_floor": times["ours"] / max(least.values()),
        "over_goal_read": times["ours"] / (1000 * floor.goal_bytes / rates[0]),
        "eager_over_ours": times["eager"] / times["ours"],
        "compiled_over_ours": times["compiled"] / times["ours"],
    }


def tiles(size_class: str) -> Iterator[Tile]:
    """Tiles worth trying in a size class."""
    few = size_class.startswith("few")
    for rows, columns, features, warps, stages in itertools.product(
        (16,) if few else (16, 32, 64, 128), (32, 64, 128, 256), (64, 128, 256, 512), (4, 8), (1, 2, 3)
    ):
        if features <= int(size_class.partition("-")[2]):
            yield Tile(rows, columns, features, warps, stages)


def tune(device: torch.device, progress: Callable[[str], None] = lambda line: None) -> dict[str, dict[str, Any]]:
    """The quickest tile of each operation and size class on a device: op -> size class -> fields of a tile.

    Raises:
        DSparkError: no tile of a size class ran.
    """
    found: dict[str, dict[str, Any]] = {}
    for op, size_class in itertools.product(OPS, SIZE_CLASSES):
        rank = int(size_class.partition("-")[2])
        rows = (1, SMALL_ROWS // 2) if size_class.startswith("few") else (64, 256)
        problems = [problem(op, Size(n, rank=rank), device) for n in rows]
        tile, cost = quickest(
            f"{op} {size_class} on {architecture(device)}",
            tiles(size_class),
            lambda tile, op=op, problems=problems: _cost(op, tile, problems),  # type: ignore[misc]
            progress,
        )
        progress(f"{op} {size_class}: {tile}, {cost:.4f} ms")
        found.setdefault(op, {})[size_class] = asdict(tile)
    return found


class Unfit(Exception):
    """A tile that a device does not take, with the reason."""


def quickest(
    what: str, candidates: Iterable[Tile], cost: Callable[[Tile], float], progress: Callable[[str], None]
) -> tuple[Tile, float]:
    """The tile of the least cost, the first of equals, and its milliseconds.

    Args:
        what: names the search in messages.
        cost: milliseconds of a tile; :class:`Unfit` where it is none to choose, which ``progress`` is told.

    Raises:
        DSparkError: none can be chosen; with the last reason.
    """
    best: tuple[Tile, float] | None = None
    reason = "there was none to try"
    for tile in candidates:
        try:
            taken = cost(tile)
        except Unfit as unfit:
            reason = str(unfit)
            progress(f"{what}: {tile} is left out: {reason}")
            continue
        if best is None or taken < best[1]:
            best = tile, taken
    if best is None:
        raise DSparkError(f"no tile of {what} can be chosen: {reason}")
    return best


def _cost(op: str, tile: Tile, problems: list[dict[str, Any]]) -> float:
    """Milliseconds of all problems with a tile."""
    kernel = kernel_of(op)
    compiled: list[Any] = []
    with intercepted(lambda launch: compiled.append(launch.run())):
        for arguments in problems:
            attempt(lambda arguments=arguments: kernel(**arguments, tile=tile), compiled)  # type: ignore[misc]
    return sum(milliseconds(lambda p=p: kernel(**p, tile=tile)) for p in problems)  # type: ignore[misc]


def attempt(call: Callable[[], Any], compiled: list[Any]) -> None:
    """Compile and run a call once; ``compiled`` is where its kernels are noted.

    Raises:
        Unfit: it does not compile, for whatever reason, does not fit the device, or spills registers.
    """
    try:
        call()
    except Exception as err:
        if isinstance(err, getattr(torch, "AcceleratorError", ())):
            raise  # the device is lost to this process: nothing after it could be timed
        lines = str(err).strip().splitlines() or [""]
        raise Unfit(f"{type(err).__name__}: {lines[-1]}") from err
    for kernel in compiled:
        spilled = getattr(kernel, "n_spills", None)
        if spilled:
            raise Unfit(f"{kernel.name} spills {spilled} registers")
