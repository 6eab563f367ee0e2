"""How kernels are launched: all of them by :func:`launch`, with tiles from a tuned table by architecture."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

import torch

from dspark.errors import ConfigError

TABLE = "tuned.json"
SMALL_ROWS = 16
"""Up to here one block holds all rows."""


def power_of_two(n: int) -> int:
    """The least power of two of at least n."""
    return 1 << max(0, n - 1).bit_length()


def interpreted() -> bool:
    """True where kernels run in Triton's interpreter, on the host."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


@dataclass(frozen=True, slots=True)
class Tile:
    """How a kernel is launched.

    Attributes:
        block_r, block_v: rows and columns of a tile.
        most_d: most features of the head that one product takes; a rank up to here is held over all rows.
        num_warps, num_stages: of the program.
    """

    block_r: int = 16
    block_v: int = 64
    most_d: int = 256
    num_warps: int = 4
    num_stages: int = 2

    def __post_init__(self) -> None:
        for name, low in (("block_r", 16), ("block_v", 16), ("most_d", 16), ("num_warps", 1), ("num_stages", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < low or (name != "num_stages" and value != power_of_two(value)):
                raise ConfigError(f"Tile.{name}: expected a power of two of at least {low}, got {value!r}")

    def block_d(self, rank: int) -> int:
        """Features of one product, of a head of this rank."""
        return min(self.most_d, max(16, power_of_two(rank)))

    def for_words(self, itemsize: int, warps: int = 4) -> Tile:
        """For weights of so many bytes: float32 products run on the plain units and unroll, so their tile is small."""
        if itemsize < 4:
            return self
        return Tile(min(self.block_r, 32), 32, 64 if self.block_r <= 16 else 32, warps, 2)

    def narrow(self) -> Tile:
        """For a row's own candidates, whose rows of W2 are gathered: fewer columns at a time, a row a program."""
        return Tile(self.block_r, min(self.block_v, 32), min(self.most_d, 128))


@functools.cache
def tuned() -> Mapping[str, Any]:
    """The table that ships: op -> architecture -> size class -> the fields of a :class:`Tile`."""
    text = resources.files(__package__).joinpath(TABLE).read_text(encoding="utf-8")
    table: Mapping[str, Any] = json.loads(text)["tiles"]
    return table


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a kernel.

    Attributes:
        kernel: the jitted function.
        grid: programs along each dimension.
        arguments: every argument by its name; tensors, numbers, None, and what is compiled in.
        options: ``num_warps``, ``num_stages``.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    options: Mapping[str, int]

    def run(self) -> Any:
        """Do it; the compiled kernel, on a GPU."""
        return self.kernel[self.grid](**self.arguments, **self.options)


_instead: Callable[[Launch], Any] | None = None
_assumed: str | None = None


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **named: Any) -> None:
    """Launch a kernel. Nothing else does, so that what is launched can be listed (:func:`intercepted`)."""
    if _instead is None:
        kernel[grid](*arguments, **named)
        return
    given = dict(zip(kernel.arg_names, arguments, strict=False)) | named
    options = {name: given.pop(name) for name in named if name not in kernel.arg_names}
    _instead(Launch(kernel, grid, given, options))


@contextlib.contextmanager
def intercepted(call: Callable[[Launch], Any], arch: str | None = None) -> Iterator[None]:
    """Within, ``call`` is given every launch and does it or not; tiles are those of ``arch``, where it is named."""
    global _instead, _assumed
    before = _instead, _assumed
    _instead, _assumed = call, arch
    try:
        yield
    finally:
        _instead, _assumed = before


def architecture(device: torch.device) -> str:
    """``sm_90``, ``gfx942``, .. of a CUDA or HIP device; ``host`` for the interpreter."""
    if _assumed is not None:
        return _assumed
    return "host" if device.type != "cuda" else _architecture(device)


@functools.cache
def _architecture(device: torch.device) -> str:
    properties = torch.cuda.get_device_properties(device)
    name = getattr(properties, "gcnArchName", "")
    return name.partition(":")[0] if torch.version.hip else f"sm_{properties.major}{properties.minor}"


SIZE_CLASSES = ("few-256", "many-256", "few-512", "many-512")
"""What a tuned entry is for: few or many rows, a rank up to 256 or more."""


def size_class(rows: int, rank: int) -> str:
    """The size class of a call. Without a head there is no W2 to hold over many rows, and few at a time will do."""
    return f"{'few' if rows <= SMALL_ROWS or not rank else 'many'}-{'256' if rank <= 256 else '512'}"


def choose_tile(op: str, arch: str, size: str) -> Tile:
    """The tile of an operation in a size class: the architecture's, its nearest older relative's, or a small one.

    A tile for an older architecture of the family fits a newer one: shared memory has only grown, but for consumer
    cards of the same generation, which a :class:`Tile` of the table may exceed; tuning makes them an entry.
    """
    by_arch = tuned().get(op, {})
    entry = by_arch.get(arch) or by_arch.get(nearest_older(arch, tuple(by_arch))) or {}
    fields = entry.get(size)
    return Tile(**fields) if fields else Tile(block_v=32, most_d=128)


def nearest_older(arch: str, known: tuple[str, ...]) -> str:
    """``sm_86`` -> ``sm_80``; an empty string where the family is unknown."""
    family, _, number = arch.partition("_")
    older = [k for k in known if family == "sm" and k.startswith("sm_") and int(k[3:]) <= int(number or 0)]
    return max(older, key=lambda k: int(k[3:]), default="")


_WORD_WARPS = {"reject_sample": 8}
"""Programs of float32 that keep a row of the target's beside the product: four warps spill on sm_100."""


@functools.lru_cache(maxsize=256)
def _tile_for(op: str, arch: str, size: str, itemsize: int) -> Tile:
    return choose_tile(op, arch, size).for_words(itemsize, _WORD_WARPS.get(op, 4))


def tile_for(op: str, weights: torch.Tensor, *, rows: int, rank: int) -> Tile:
    """The tuned tile of a call on ``weights`` (W2, or base logits); looked up once for each size class."""
    return _tile_for(op, architecture(weights.device), size_class(rows, rank), weights.element_size())


def device_guard(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Launch on the device of the tensors, not on the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def as_fields(tile: Tile) -> dict[str, int]:
    """For the table."""
    return asdict(tile)
