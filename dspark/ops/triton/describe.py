"""How each kernel is compiled when nothing calls it: argument types and constants, for an operation's usual calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dspark.ops.triton import bias_sample, masks, reject_sample
from dspark.ops.triton.aot import Build
from dspark.ops.triton.launch import Tile

_FLOATS = (
    "temperature", "top_p", "min_p", "peaks", "noise", "best", "best_score", "peak", "mass", "plain", "log_q",
    "log_prob", "chance", "warmths", "known_q", "law",
)  # fmt: skip
_INTS: tuple[str, ...] = (
    "starts",
    "lens",
    "owners",
    "mode",
    "keys",
    "floors",
    "cuts",
    "best_at",
    "plain_at",
    "needs_q",
    "top_k",
)
_INTS += ("columns_of", "draft_rows", "known", "firsts")
_CANDIDATES = ("known", "known_q", "firsts")
_LONGS = ("names", "token", "accepted", "drafts")


def types_of(kernel: Any, pointer: str) -> dict[str, str]:
    """Types of a kernel's arguments by their names; ``pointer`` is that of logits and weights."""
    types: dict[str, str] = {}
    for name in kernel.arg_names:
        if name in ("base", "latent", "w2", "logits"):
            types[name] = pointer
        elif name in _FLOATS:
            types[name] = "*fp32"
        elif name in _INTS:
            types[name] = "*i32"
        elif name in _LONGS:
            types[name] = "*i64"
        elif name in ("uniforms", "lse", "norms"):
            types[name] = "*fp64"
        else:
            types[name] = "i32"
    if kernel in (bias_sample.candidate_partials, reject_sample.candidate_laws):
        types["columns_of"] = "*i64"  # draft ids of candidates, which a drafter gives
    return types


def build_of(
    kernel: Any, pointer: str, constants: dict[str, Any], absent: Sequence[str], label: str, **options: int
) -> Build:
    """One build; ``absent`` are pointers that are None."""
    types = types_of(kernel, pointer)
    taken = set(kernel.arg_names)
    constants = {**constants, **dict.fromkeys(absent)}
    constants = {name: value for name, value in constants.items() if name in taken}
    types = {name: kind for name, kind in types.items() if name not in constants}
    return Build(kernel, types, constants, options, f"{kernel.fn.__name__}/{label}")


def describe(op: str, tile: Tile, *, rank: int, pointer: str, label: str) -> Iterator[Build]:
    """The kernels of an operation with a tile: those whose code depends on it."""
    sizes = {"RANK": rank, "BLOCK_R": tile.block_r, "BLOCK_V": tile.block_v, "BLOCK_D": tile.block_d(rank)}
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    if op == bias_sample.op.OP:
        flags = {**sizes, "HAS_NAMES": False, "HAS_NOISE": False, "UPCAST": False}
        yield build_of(bias_sample.bias_partials, pointer, flags, ("names", "noise"), label, **options)
        return
    flags = {
        **sizes, "HAS_SETTINGS": True, "HAS_MASKS": True, "HAS_NOISE": False, "HAS_LAW": True, "HAS_CANDIDATES": False,
        "HAS_COLUMNS": False, "HAS_ROWS": False, "UPCAST": False,
    }  # fmt: skip
    absent = ("noise", "columns_of", "draft_rows", *_CANDIDATES)
    yield build_of(reject_sample.final_partials, pointer, flags, absent, label, **options)


def describe_rest(pointer: str, label: str) -> Iterator[Build]:
    """The kernels that no tile changes, once a dtype; and what pruned vocabularies, candidates and no head need."""
    narrow = Tile().narrow()
    sizes = {"RANK": 256, "BLOCK_V": narrow.block_v, "BLOCK_D": narrow.block_d(256), "HAS_NOISE": False}
    few = {"num_warps": 4, "num_stages": 2}
    yield build_of(bias_sample.candidate_partials, pointer, sizes, ("noise",), label, **few)
    small = Tile(block_v=32, most_d=64) if pointer == "*fp32" else Tile()
    base = {"RANK": 256, "BLOCK_R": 16, "BLOCK_V": small.block_v, "BLOCK_D": small.block_d(256), "UPCAST": False}
    named = {**base, "HAS_NAMES": True, "HAS_NOISE": False}
    yield build_of(bias_sample.bias_partials, pointer, named, ("noise",), f"names-{label}", **few)
    headless = {**base, "RANK": 0, "BLOCK_D": 16, "HAS_NAMES": False, "HAS_NOISE": False}
    absent = ("names", "noise", "latent", "w2")
    yield build_of(bias_sample.bias_partials, pointer, headless, absent, f"headless-{label}", **few)
    flags = {"HAS_SETTINGS": True, "HAS_MASKS": True, "HAS_NOISE": False, "HAS_Q": True, "HAS_NAMES": False}
    fold = reject_sample.FOLD_BLOCK
    block = {**flags, "BLOCK": reject_sample.ROW_BLOCK}
    yield build_of(reject_sample.row_partials, pointer, block, ("noise",), label, num_warps=4)
    plain = {**block, "HAS_SETTINGS": False, "HAS_MASKS": False}
    settings = ("temperature", "min_p", "noise")
    yield build_of(reject_sample.row_partials, pointer, plain, settings, f"processed-{label}", num_warps=4)
    yield build_of(reject_sample.decide, pointer, {**flags, "BLOCK_T": fold}, (), label, num_warps=1)
    yield build_of(reject_sample.fold_final, pointer, {**flags, "BLOCK_T": 1024}, (), label, num_warps=4)
    yield build_of(masks.find_masks, pointer, {"BLOCK": reject_sample.MASK_BLOCK}, (), label, num_warps=8)
    laws = {"HAS_LAW": True, "HAS_CANDIDATES": False, "HAS_COLUMNS": True, "HAS_ROWS": True}
    pruned = {**flags, **base, **laws}
    yield build_of(reject_sample.final_partials, pointer, pruned, ("noise", *_CANDIDATES), f"pruned-{label}", **few)
    lone = {**flags, **base, **dict.fromkeys(laws, False), "RANK": 0, "BLOCK_D": 16}
    gone = ("noise", "base", "lse", "latent", "w2", "columns_of")
    yield build_of(
        reject_sample.final_partials, pointer, lone, (*gone, "draft_rows", "warmths", *_CANDIDATES),
        f"point-mass-{label}", **few,
    )  # fmt: skip
    cut = {**lone, "HAS_CANDIDATES": True, "HAS_ROWS": True}
    yield build_of(reject_sample.final_partials, pointer, cut, gone, f"candidates-{label}", **few)
    yield build_of(reject_sample.candidate_laws, pointer, {**sizes, "HAS_ROWS": True}, (), label, **few)
    folded = {**flags, "BLOCK_T": 1024}
    yield build_of(bias_sample.fold_tiles, pointer, folded, ("names",), label, num_warps=4)
    yield build_of(bias_sample.fold_tiles, pointer, folded | {"HAS_NAMES": True}, (), f"names-{label}", num_warps=4)
