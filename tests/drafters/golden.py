"""Golden cases as drafters: loaded by the readers, run through the Drafter protocol on recorded features."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from dspark.capabilities import TargetCapabilities
from dspark.checkpoints import Checkpoint, load_checkpoint
from dspark.config import SamplingParams, build_config
from dspark.drafters.dspark import DSparkConfig, DSparkDraft, build
from dspark.heads import gated, markov, none, rnn
from dspark.protocols import BuildContext
from dspark.sampling.draft import RoundSampler
from dspark.sampling.draws import CounterDraws
from dspark.tokens import TokenView
from dspark.types import BatchView, Committed, DraftBlock, Mode, RequestView

ROOT = Path(__file__).parents[1] / "golden"
HEADS = {
    "markov": (markov.MarkovConfig, markov.build),
    "gated": (gated.GatedConfig, gated.build),
    "rnn": (rnn.RNNConfig, rnn.build),
    "none": (none.NoHeadConfig, none.build),
}
DEEPSPEC = ("vanilla", "gated", "rnn")
TOLERANCE = 1e-5


def io(case: str) -> dict[str, Tensor]:
    return load_file(ROOT / case / "io.safetensors")


def target_config() -> dict[str, Any]:
    return json.loads((ROOT / "target_qwen3_tiny" / "config.json").read_text())


def stub_target(vocab_size: int = 97, **changes: Any) -> Any:
    """What a drafter reads of the golden target: its sizes, embedding and head."""
    weights = load_file(ROOT / "target_qwen3_tiny" / "model.safetensors")
    values: dict[str, Any] = {
        "name": "target_qwen3_tiny",
        "num_layers": 6,
        "vocab_size": vocab_size,
        "capabilities": TargetCapabilities(),
        "input_embeddings": SimpleNamespace(weight=weights["model.embed_tokens.weight"]),
        "lm_head": SimpleNamespace(weight=weights["lm_head.weight"]),
    }
    return SimpleNamespace(**(values | changes))


def make_context(target: Any = None, **values: Any) -> BuildContext:
    """A build context whose ``resolve`` knows the heads that ship."""

    def resolve(kind: str, name: str, config: Any = None) -> Any:
        cls, factory = HEADS[name]
        return factory(build_config(cls, config), context)

    context = BuildContext(target=target, resolve=resolve, **values)
    return context


def make_drafter(
    checkpoint: str | Path | Checkpoint,
    target: Any = None,
    *,
    gamma: int = 0,
    dtype: Any = torch.float32,
    **config: Any,
) -> DSparkDraft:
    """Build a drafter as the engine does; a bare name is a golden case."""
    if isinstance(checkpoint, str) and (ROOT / checkpoint).is_dir():
        checkpoint = ROOT / checkpoint
    settings = build_config(DSparkConfig, {"checkpoint": checkpoint, **config})
    return build(settings, make_context(target if target is not None else stub_target(), gamma=gamma, dtype=dtype))


@dataclass
class Recorder:
    """A sampler that keeps the logits it was given."""

    inner: RoundSampler
    logits: list[Tensor]
    token_map: Tensor | None = None

    def sample(self, logits: Tensor, offset: int, token_map: Tensor | None = None, *, reuse: bool = False) -> Tensor:
        self.logits.append(logits.clone())
        self.token_map = token_map
        return self.inner.sample(logits, offset, token_map, reuse=reuse)

    def finish(self, lens: Any = None, **block: Any) -> DraftBlock:
        return self.inner.finish(lens, **block)

    def point_mass(self, token_ids: Tensor, lens: Any, **block: Any) -> DraftBlock:
        return self.inner.point_mass(token_ids, lens, **block)


def request(
    ids: Sequence[int],
    *,
    slot: int = 0,
    generation: int = 1,
    num_cached: int | None = None,
    mode: Mode = Mode.GREEDY,
    key: int = 0,
    **params: Any,
) -> RequestView:
    """A request whose anchor is the last of ``ids``; all before it is cached unless said otherwise."""
    cached = len(ids) - 1 if num_cached is None else num_cached
    sampling = SamplingParams(temperature=0.0 if mode is Mode.GREEDY else 1.0, **params)
    return RequestView(
        request_id=f"r{slot}",
        slot=slot,
        generation=generation,
        ids=TokenView(list(ids)),
        prompt_len=1,
        num_cached=cached,
        max_draft=64,
        params=sampling,
        mode=mode,
        key=key or 1000 + slot,
    )


def commit(
    drafter: DSparkDraft, taps: Tensor | None, *, start: int, end: int, slot: int = 0, generation: int = 1
) -> None:
    """Tell the drafter that the target cached positions start..end-1, with their features [end - start, m * d_t]."""
    view = request([0] * (start + 1), slot=slot, generation=generation, num_cached=start)
    drafter.commit([Committed(view, -1, (), 0, 0, end, taps)])


def propose(
    drafter: DSparkDraft, requests: Sequence[RequestView], gamma: int | None = None, vocab_size: int = 97
) -> tuple[DraftBlock, Tensor]:
    """One draft: the block, and the corrected logits [R, gamma, Vd] that were sampled from."""
    batch = BatchView(tuple(requests), drafter.max_gamma if gamma is None else gamma)
    sampler = Recorder(RoundSampler(batch, CounterDraws(), vocab_size), [])
    block = drafter.propose(batch, sampler)
    logits = torch.stack(sampler.logits, dim=1) if sampler.logits else torch.empty(len(requests), 0, vocab_size)
    return block, logits


def assert_close(name: str, got: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    """Equal within ``tolerance`` of the largest magnitude."""
    assert got.shape == expected.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    worst = float((got.double() - expected.double()).abs().max())
    allowed = tolerance * float(expected.abs().max())
    assert worst <= allowed, f"{name}: off by {worst:.3g}, allowed {allowed:.3g}"


def near(got: Tensor, expected: Tensor, atol: float = 1e-9) -> None:
    """Equal within ``atol``. (torch.testing takes seconds to import on its first use.)"""
    assert got.shape == expected.shape, f"shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    worst = float((got.double() - expected.double()).abs().max()) if got.numel() else 0.0
    assert worst <= atol, f"off by {worst:.3g}, allowed {atol:.3g}"


def checkpoint(case: str) -> Checkpoint:
    return load_checkpoint(ROOT / case)


def context_keys(drafter: DSparkDraft, layer: int, slot: int, length: int) -> tuple[Tensor, Tensor]:
    """Keys and values [1, kv_heads, length, D] that the draft cache holds of a slot."""
    return drafter.backbone.cache.read(layer, np.array([slot]), 0, length)
