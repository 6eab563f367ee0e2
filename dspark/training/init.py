"""First weights of a drafter: random, copied from target layers, or fitted to bigrams; each is an option to try.

Copied layers are no certain gain: what a draft layer attends to differs from what the target's layer does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.checkpoints import DrafterConfig, random_tensors
from dspark.errors import ConfigError
from dspark.training.config import DrafterSettings
from dspark.training.samples import Sample

SMOOTHING = 1.0
"""Weight of the plain frequencies in the conditional ones, in occurrences of the previous token."""
_NOT_TRAINED = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")


def first_tensors(
    config: DrafterConfig,
    settings: DrafterSettings,
    seed: int,
    *,
    target: Any = None,
    samples: Iterable[Sample] = (),
    draft_ids: Tensor | None = None,
) -> dict[str, Tensor]:
    """Tensors by canonical name, float32, without embedding, head and vocabulary maps; a plugin's head brings its own.

    Args:
        config: the drafter.
        settings: ``init``, ``init_head``, ``init_std``.
        target: whose layers are copied.
        samples: whose bigrams are counted.
        draft_ids: target id -> draft id, [V].

    Raises:
        ConfigError: layers or head can't be begun that way, with the reason.
    """
    slim = dataclasses.replace(config, requires_embeddings=False)
    tensors = random_tensors(slim, seed=seed, std=settings.init_std)
    tensors = {n: t for n, t in tensors.items() if n not in _NOT_TRAINED}
    if settings.init == "target":
        tensors |= copied_layers(config, tensors, target)
    if settings.init_head == "bigram":
        if config.head not in ("markov", "gated"):
            raise ConfigError(f"drafter.init_head: bigrams fit the heads markov and gated, not {config.head!r}")
        if draft_ids is None:
            raise ConfigError("drafter.init_head: bigrams need the draft vocabulary")
        w1, w2 = bigram_factors(bigrams(samples, draft_ids), config.markov_rank, seed)
        # The gate begins at one half.
        factor = 2.0 if config.head == "gated" else 1.0
        tensors |= {"markov_head.markov_w1.weight": w1, "markov_head.markov_w2.weight": w2 * factor}
    return tensors


def spread_layers(draft: int, target: int) -> list[int]:
    """Which target layers are copied: evenly spread, the last one included."""
    return [round((i + 1) * target / draft) - 1 for i in range(draft)]


def copied_layers(config: DrafterConfig, tensors: Mapping[str, Tensor], target: Any) -> dict[str, Tensor]:
    """Weights of draft layers and of the final norm that are the target's; what it has not (norms of queries and keys)
    is left out.

    Raises:
        ConfigError: shapes that do not fit, all of them.
    """
    if config.eagle is not None:
        raise ConfigError("drafter.init: EAGLE-3's layer reads twice the width of the target's; use random")
    state = {n: p.detach() for n, p in target.model.named_parameters()}
    out: dict[str, Tensor] = {}
    faults: list[str] = []
    sources = spread_layers(len(config.layers), int(target.num_layers))
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        wanted = f"layers.{sources[int(rest.split('.')[0])]}.{rest.partition('.')[2]}" if part == "layers" else name
        if part != "layers" and name != "norm.weight":
            continue
        found = next((p for n, p in state.items() if n == wanted or n.endswith(f".{wanted}")), None)
        if found is None:
            continue
        if found.shape != tensor.shape:
            faults.append(f"{name}: {list(tensor.shape)}, the target's {wanted}: {list(found.shape)}")
        out[name] = found.float().cpu().clone()
    if faults or not any(n.startswith("layers.") for n in out):
        raise ConfigError(
            "drafter.init: the target's layers can't be copied: " + ("; ".join(faults) or "it shows none of that kind")
        )
    return out


def bigrams(samples: Iterable[Sample], draft_ids: Tensor) -> Tensor:
    """How often a draft token follows a token in what the assistant says, sparse [V, Vd] float64."""
    width = int(draft_ids.max()) + 1
    counts: dict[int, int] = {}
    table = draft_ids.numpy()
    for sample in samples:
        at = np.flatnonzero(sample.loss_mask[1:])
        after = table[sample.ids[at + 1]]
        keys = sample.ids[at][after >= 0] * width + after[after >= 0]
        for key, n in zip(*np.unique(keys, return_counts=True), strict=True):
            counts[int(key)] = counts.get(int(key), 0) + int(n)
    keys = np.array(sorted(counts), dtype=np.int64)
    values = torch.tensor([counts[int(k)] for k in keys], dtype=torch.float64)
    index = torch.from_numpy(np.stack([keys // width, keys % width]))
    return torch.sparse_coo_tensor(index, values, (len(draft_ids), width), check_invariants=True).coalesce()


def bigram_factors(counts: Tensor, rank: int, seed: int) -> tuple[Tensor, Tensor]:
    """W1 [V, r] and W2 [Vd, r] with W1 W2^T ~ log p(v | x) / p(v), over the pairs that occur; 0 stands for the others.

    p(v | x) is smoothed towards p(v), so that rare pairs say little. The factors are those of a truncated singular
    value decomposition, with the singular values shared between them; columns beyond its rank are zero.
    """
    rows, columns = counts.indices()
    n = counts.values()
    if not len(n):
        raise ConfigError("drafter.init_head: the data has no bigram to fit")
    total = n.sum()
    each = torch.zeros(counts.shape[0], dtype=torch.float64).index_add_(0, rows, n)
    plain = torch.zeros(counts.shape[1], dtype=torch.float64).index_add_(0, columns, n) / total
    smoothed = (n + SMOOTHING * plain[columns]) / (each[rows] + SMOOTHING)
    gains = (smoothed / plain[columns]).log().float()
    gain = torch.sparse_coo_tensor(counts.indices(), gains, counts.shape, check_invariants=True)
    possible = min(rank, *counts.shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        u, s, v = torch.svd_lowrank(gain, q=possible, niter=4)
    w1, w2 = torch.zeros(counts.shape[0], rank), torch.zeros(counts.shape[1], rank)
    w1[:, :possible], w2[:, :possible] = u * s.sqrt(), v * s.sqrt()
    return w1, w2
