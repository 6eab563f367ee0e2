"""A toy target with a rule, and drafters trained on it in seconds: good enough that a wrong layout or layer shows."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dspark.capabilities import TargetCapabilities
from dspark.checkpoints import Checkpoint, make_checkpoint, random_tensors, read_config
from dspark.drafters.dspark import DSparkDraft
from dspark.types import TargetOutput, VerifyLayout
from tests.drafters.golden import ROOT, make_drafter, stub_target

VOCAB, WIDTH, LAYERS = 17, 32, 6
MASK = 16


class RuleTarget:
    """The next token is ``rule`` of the one before the last: what it is stands in the context alone.

    The feature of layer k at a position is an own random vector for each (k, token), as a model's would be.
    """

    name = "rule"
    vocab_size = VOCAB
    num_layers = LAYERS
    device = torch.device("cpu")
    dtype = torch.float32
    capabilities = TargetCapabilities()

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(4)
        self.rule = torch.randperm(MASK, generator=generator)
        self.codes = torch.randn(LAYERS + 1, VOCAB, WIDTH, generator=generator)
        self.ids: list[int] = []

    def features(self, ids: Tensor, layers: Sequence[int]) -> Tensor:
        return torch.cat([self.codes[k + 1][ids] for k in layers], dim=-1)

    def text(self, first: int, second: int, length: int) -> list[int]:
        ids = [first, second]
        while len(ids) < length:
            ids.append(int(self.rule[ids[-2]]))
        return ids

    def forward(self, layout: VerifyLayout, taps: Sequence[int] = ()) -> TargetOutput:
        start = int(layout.starts[0])
        self.ids = [*self.ids[:start], *layout.token_ids.tolist()]
        logits = torch.zeros(len(layout.logit_rows), VOCAB)
        for i, row in enumerate(layout.logit_rows.tolist()):
            before = self.ids[max(start + row - 1, 0)]
            logits[i, self.rule[before % MASK]] = 5.0
        return TargetOutput(logits, self.features(layout.token_ids, taps))


def fresh(case: str, seed: int = 0) -> Checkpoint:
    """A random checkpoint of a golden case's kind for the rule."""
    config = read_config(json.loads((ROOT / case / "config.json").read_text()))
    sizes = {"vocab_size": VOCAB, "draft_vocab_size": VOCAB, "mask_token_id": MASK, "requires_embeddings": True}
    config = dataclasses.replace(config, **sizes, embed_scale=1.0)
    return make_checkpoint(config, random_tensors(config, seed=seed, std=0.15), source=case)


def train(case: str, target: RuleTarget, steps: int = 220) -> DSparkDraft:
    """Teacher-forced cross-entropy on the rule's own texts, through the backbone that also drafts."""
    loaded = fresh(case)
    drafter = make_drafter(loaded, stub_target(VOCAB, name="rule"))
    parameters = [*drafter.backbone.parameters(), *drafter.head.parameters()]
    for parameter in parameters:
        parameter.requires_grad_(True)
    optimiser = torch.optim.Adam(parameters, lr=6e-3)
    generator, gamma, rows = torch.Generator().manual_seed(1), drafter.max_gamma or 0, 48
    for _ in range(steps):
        pairs = torch.randint(0, MASK, (rows, 2), generator=generator).tolist()
        texts = torch.tensor([target.text(a, b, 24) for a, b in pairs])
        anchors = np.sort(torch.randint(2, 24 - gamma - 1, (rows,), generator=generator).numpy())
        backbone = drafter.backbone.scratch()
        owners = np.concatenate([np.full(a, r) for r, a in enumerate(anchors)])
        places = np.concatenate([np.arange(a) for a in anchors])
        taps = target.features(texts[torch.from_numpy(owners), torch.from_numpy(places)], drafter.tap_layers)
        backbone.remember(taps, owners, places)
        at = torch.from_numpy(anchors)[:, None] + torch.arange(gamma + 1)
        block = texts.gather(1, at)
        hidden = backbone(drafter.layout.inputs(block[:, 0], gamma), np.arange(rows), anchors)[:, drafter.layout.skip :]
        logits = backbone.logits(hidden) + drafter.head.block(block[:, :-1], hidden)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), block[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    for parameter in parameters:
        parameter.requires_grad_(False)
    return drafter
