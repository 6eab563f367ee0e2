"""The head is held to dspark's contracts, starts as a Markov bias, reads what it says it reads, and learns by it."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from dspark_head_conv.head import ConvConfig, ConvHead

from dspark import CheckpointError
from dspark.protocols import BuildContext
from dspark.testing import PluginSuite, SequentialHeadSuite

VOCAB = 7


class TestPlugin(PluginSuite):
    component = "dspark-head-conv"


class TestConv(SequentialHeadSuite):
    component = "dspark-head-conv/conv"
    bad_settings = ({"width": 0}, {"width": 2.5}, {"rank": 0})


class TestWide(SequentialHeadSuite):
    component = "dspark-head-conv/conv"
    settings: ClassVar[dict[str, Any]] = {"width": 5}


class TestNarrow(SequentialHeadSuite):
    component = "dspark-head-conv/conv"
    settings: ClassVar[dict[str, Any]] = {"width": 1}


def make(**settings: Any) -> ConvHead:
    sizes = {"hidden_size": 4, "vocab_size": VOCAB, "draft_vocab_size": VOCAB, "rank": 8}
    return ConvHead(ConvConfig(**(sizes | settings)), BuildContext(device=torch.device("cpu"), dtype=torch.float64))


def blocks(rows: int, gamma: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    prev = torch.randint(0, VOCAB, (rows, gamma), generator=generator)
    return prev, torch.zeros(rows, gamma, 4, dtype=torch.float64)


def test_a_new_head_is_a_markov_bias() -> None:
    head = make()
    prev, hidden = blocks(5, 6)
    markov = head.embeddings[prev] @ head.output.T
    assert torch.equal(head.block(prev, hidden), markov)
    assert bool(markov.any())


@pytest.mark.parametrize("width", [1, 3, 4])
def test_it_reads_as_many_tokens_as_it_is_wide(width: int) -> None:
    head = make(width=width)
    torch.nn.init.normal_(head.mix)
    prev, hidden = blocks(1, 7)
    base = head.block(prev, hidden)
    other = prev.clone()
    other[0, 1] = (other[0, 1] + 1) % VOCAB
    moved = (head.block(other, hidden) - base).abs().amax(-1)[0]
    assert [bool(m > 0) for m in moved] == [1 <= k < 1 + width for k in range(7)]


def test_missing_and_misshapen_tensors_are_all_named() -> None:
    weights = make().canonical()
    del weights["mix"]
    weights["conv"] = weights["conv"][:, 1:]
    with pytest.raises(CheckpointError, match=r"conv: expected \[8, 24\], got \[8, 23\]; mix: .* got nothing"):
        make(weights=weights)


def test_it_learns_what_a_markov_head_can_not() -> None:
    """x_k = x_{k-2} + x_{k-3} mod 7, with x_{k-1} independent of it: a head of width 1 stays at chance."""

    def loss_after_training(width: int) -> float:
        head = make(width=width, rank=32)
        parameters = [p.requires_grad_(True) for p in head.parameters()]
        optimizer = torch.optim.Adam(parameters, lr=0.02)
        for seed in range(200):
            prev, hidden = blocks(64, 3, seed)
            labels = (prev[:, 0] + prev[:, 1]) % VOCAB
            loss = torch.nn.functional.cross_entropy(head.block(prev, hidden)[:, -1], labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.item()

    assert loss_after_training(3) < 0.3
    assert loss_after_training(1) > 1.8
