"""What the kernels are launched with at a model's sizes: the launchers themselves are run, on tensors without memory,
and every launch is noted instead of done."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from dspark.ops.reject_sample import Law, Settings
from dspark.ops.triton.bias_sample import bias_sample
from dspark.ops.triton.launch import SMALL_ROWS, Launch, intercepted
from dspark.ops.triton.reject_sample import reject_sample

VOCAB, PRUNED, KEPT, GAMMA = 151_936, 32_000, 64, 7
"""Qwen3's vocabulary, a pruned one, candidates of a row, drafts: all but the first are arguments that kernels are not
compiled for."""
RANKS = (0, 256, 512)
"""Ranks of the head, 0 for none: one in each class of the tuned table. Another rank has code of its own."""
ROWS = (SMALL_ROWS, 4 * SMALL_ROWS)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PAIRS = (*((d, d) for d in DTYPES), (torch.float32, torch.bfloat16), (torch.float32, torch.float16))
"""Dtypes of the target's logits and of the drafter. Logits that penalties or a bias have edited are float32."""
WORDS = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int32: "i32",
    torch.int64: "i64",
}

Key = tuple[str, tuple[tuple[str, str], ...]]
"""A kernel's name, and each argument's type, each constant and each option, in words."""


def key_of(launch: Launch) -> Key:
    """What a launch is compiled for, but for alignment: two launches of one key run the same code."""
    words = {}
    for name in launch.kernel.arg_names:
        value, kind = launch.arguments[name], launch.kernel.fn.__annotations__.get(name)
        if value is None or kind is not None:
            words[name] = repr(value)
        else:
            words[name] = f"*{WORDS.get(value.dtype, value.dtype)}" if isinstance(value, torch.Tensor) else "i32"
    options = {name: repr(value) for name, value in launch.options.items()}
    return launch.kernel.fn.__name__, tuple(sorted({**words, **options}.items()))


def label_of(launch: Launch) -> str:
    """A launch's kernel and what tells it from its siblings: dtypes, rank, tile, what is there, warps."""
    given = launch.arguments
    parts = [WORDS[given[n].dtype] for n in ("logits", "base") if isinstance(given.get(n), torch.Tensor)]
    if given.get("RANK"):
        parts.append(f"r{given['RANK']}")
    tile = [str(given[n]) for n in ("BLOCK_R", "BLOCK_V", "BLOCK_D") if n in given]
    parts += ["x".join(tile)] if tile else []
    parts += [n.removeprefix("HAS_").lower() for n, value in given.items() if n.startswith("HAS_") and value]
    parts.append("w" + "s".join(str(n) for n in launch.options.values()))
    return f"{launch.kernel.fn.__name__}/{'-'.join(parts)}"


def launches(
    architecture: str, pairs: Sequence[tuple[torch.dtype, torch.dtype]] = PAIRS, rows: Sequence[int] = ROWS
) -> list[Launch]:
    """Every launch of an engine on an architecture, one of each key.

    Args:
        architecture: whose tuned tiles are taken.
        pairs: dtypes of logits and drafter.
        rows: numbers of requests.
    """
    found: dict[Key, Launch] = {}
    with intercepted(lambda launch: found.setdefault(key_of(launch), launch), architecture):
        for call in calls(pairs, rows):
            call()
    return list(found.values())


def calls(
    pairs: Sequence[tuple[torch.dtype, torch.dtype]], counts: Sequence[int] = ROWS
) -> Iterator[Callable[[], Any]]:
    """Calls of both operations: every head, law, warper, dtype and class of rows."""
    drafters = list(dict.fromkeys(own for _, own in pairs))
    for rows, dtype, rank, pruned, few in itertools.product(counts, drafters, RANKS, (False, True), (False, True)):
        yield partial(bias_sample, **_drafting(rows, dtype, rank, pruned, few))
    for rows, (dtype, own) in itertools.product(counts, pairs):
        laws: list[Law | None] = [None]
        for rank, pruned, few in itertools.product(RANKS, (False, True), (False, True)):
            laws.append(_law(rows, own, rank, pruned, few))
        for law, masked in itertools.product(laws, (None, False, True)):
            yield partial(reject_sample, **_deciding(rows, dtype, law, masked))


def _on(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _drafting(rows: int, dtype: torch.dtype, rank: int, pruned: bool, few: bool) -> dict[str, Any]:
    """Arguments of a call of ``bias_sample``."""
    width = PRUNED if pruned else VOCAB
    return {
        "base": _on(rows, KEPT if few else width, dtype=dtype),
        "temperature": _on(rows, dtype=torch.float32),
        "keys": _on(rows, 2, dtype=torch.int32),
        "latent": _on(rows, rank, dtype=dtype) if rank else None,
        "w2": _on(width, rank, dtype=dtype) if rank else None,
        "token_map": _on(width, dtype=torch.int64) if pruned else None,
        "candidates": _on(rows, KEPT, dtype=torch.int64) if few else None,
    }


def _law(rows: int, dtype: torch.dtype, rank: int, pruned: bool, few: bool) -> Law:
    width = PRUNED if pruned else VOCAB
    ids = _on(GAMMA, rows, KEPT, dtype=torch.int64) if few else None
    return Law(
        _on(GAMMA, rows, KEPT if few else width, dtype=dtype),
        _on(GAMMA, rows, dtype=torch.float64),
        _on(rows, dtype=torch.float32),
        _on(GAMMA, rows, rank, dtype=dtype) if rank else None,
        _on(width, rank, dtype=dtype) if rank else None,
        _on(VOCAB, dtype=torch.int32) if pruned and not few else None,
        ids,
        ids if pruned else None,
    )


def _deciding(rows: int, dtype: torch.dtype, law: Law | None, masked: bool | None) -> dict[str, Any]:
    """Arguments of a call of ``reject_sample``; ``masked`` None: without settings."""
    floats, whole = _on(rows, dtype=torch.float32), _on(rows, dtype=torch.int32)
    return {
        "logits": _on(rows * (1 + GAMMA), VOCAB, dtype=dtype),
        "starts": whole,
        "lens": whole,
        "drafts": _on(rows, GAMMA, dtype=torch.int64),
        "mode": whole,
        "uniforms": _on(rows, GAMMA, dtype=torch.float64),
        "keys": _on(rows, GAMMA + 1, 2, dtype=torch.int32),
        "log_q": None if law is None else _on(rows, GAMMA, dtype=torch.float32),
        "law": law,
        "draft_rows": None if law is None else whole,
        "settings": None if masked is None else Settings(floats, whole, floats, floats, masked),
    }
