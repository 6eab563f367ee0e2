"""Toy DSpark and DFlash drafters on the table target: float64, three tokens, random weights that show."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from dspark.checkpoints import Checkpoint, DrafterConfig, LayerConfig, make_checkpoint, random_tensors
from dspark.drafters.dspark import DSparkDraft
from dspark.testing import TableTarget
from dspark.types import TargetOutput, VerifyLayout
from tests.drafters.golden import make_drafter


def toy_checkpoint(
    head: str = "markov",
    *,
    vocab: int = 3,
    gamma: int = 2,
    anchor_first: bool = True,
    window: int | None = None,
    seed: int = 0,
    std: float = 0.6,
) -> Checkpoint:
    """A random drafter of ``vocab`` tokens and a mask id behind them (so its vocabulary is padded by one)."""
    layer = LayerConfig(num_kv_heads=1, head_dim=4, window=window, causal=window is not None)
    config = DrafterConfig(
        source_format="deepspec",
        algorithm="dflash" if head == "none" else "dspark",
        family="qwen3",
        hidden_size=8,
        intermediate_size=12,
        num_heads=2,
        vocab_size=vocab + 1,
        draft_vocab_size=vocab + 1,
        layers=(LayerConfig(num_kv_heads=2, head_dim=4), layer),
        target_layer_ids=(0, 1),
        target_hidden_size=vocab,
        block_size=gamma if anchor_first else gamma + 1,
        sample_from_anchor=anchor_first,
        mask_token_id=vocab,
        head=head,
        markov_rank=0 if head == "none" else 4,
        confidence=head != "none",
        confidence_with_markov=head in ("markov", "rnn"),
        requires_embeddings=True,
    ).validate("toy")
    return make_checkpoint(config, random_tensors(config, seed=seed, std=std), source=f"toy-{head}")


class FeatureTarget(TableTarget):
    """The table target with features that also tell the position's predecessor, so that a misplaced one shows."""

    def _taps(self, layout: VerifyLayout, taps: Any) -> torch.Tensor:
        slots = torch.from_numpy(layout.slots).repeat_interleave(torch.from_numpy(layout.query_lens))
        before = self.cache[slots, (layout.positions - 1).clamp(min=0)]
        own = torch.nn.functional.one_hot(layout.token_ids, self.vocab_size).double()
        last = torch.nn.functional.one_hot(before, self.vocab_size).double()
        return torch.cat([own * (k + 1) + last * (2 - k) for k in taps], dim=1)

    def forward(self, layout: VerifyLayout, taps: Any = ()) -> TargetOutput:
        return super().forward(layout, taps)


def toy_drafter(head: str = "markov", target: Any = None, **settings: Any) -> DSparkDraft:
    """``toy_checkpoint`` as a drafter; ``candidates`` and ``context_window`` go to the drafter."""
    own = {key: settings.pop(key) for key in ("candidates", "context_window") if key in settings}
    return make_drafter(toy_checkpoint(head, **settings), target, dtype=torch.float64, **own)


def drafter_of_vocabulary(head: str, target: Any, rows: int, drafted: int) -> DSparkDraft:
    """One that drafts ``drafted`` ids of a target's three: padded to four, all of them, or the tokens 0 and 2."""
    sizes = {"vocab_size": rows, "draft_vocab_size": drafted, "mask_token_id": rows - 1, "source_format": "speculators"}
    config = dataclasses.replace(toy_checkpoint(head).config, **sizes).validate("toy")
    tensors = random_tensors(config, seed=3, std=0.6)
    if drafted < rows:
        tensors |= {"d2t": torch.tensor([0, 1]), "t2d": torch.tensor([True, False, True])}
    return make_drafter(make_checkpoint(config, tensors, source="toy"), target, dtype=torch.float64)
