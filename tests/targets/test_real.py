"""The real target: converted once, and its packed logits are its own."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from dspark.targets.hf import HFTarget
from dspark.targets.load import resolve_source
from dspark.targets.probe import probe_target

from .toys import toy_layout

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def target() -> Iterator[HFTarget]:
    made = HFTarget.from_pretrained("smollm2", dtype="float32", device="cpu", probe=False)
    yield made
    made.close()


def test_the_conversion_is_cached(target: HFTarget) -> None:
    began = time.perf_counter()
    assert resolve_source("smollm2") == resolve_source("smollm2")
    assert time.perf_counter() - began < 30
    assert target.has_chat_template
    assert target.tokenizer.decode([target.eos_token_ids[0]]) == "<|im_end|>"


def test_packed_prompts_match_plain_ones(target: HFTarget) -> None:
    prompts = ["The capital of France is", "def fib(n):\n    return", "Once upon a time, in a land far away,"]
    texts = {slot: target.tokenizer(text)["input_ids"] for slot, text in enumerate(prompts)}
    target.allocate(4, 64)
    sequences = [(slot, 0, len(ids)) for slot, ids in texts.items()]
    rows = target.forward(toy_layout(texts, sequences)).logits
    wanted = torch.cat([target.plain_logits(ids) for ids in texts.values()])
    assert (rows - wanted).abs().max() < 1e-3


def test_the_probe_is_quick(target: HFTarget) -> None:
    began = time.process_time()
    assert probe_target(target) < 1e-4
    assert time.process_time() - began < 5
