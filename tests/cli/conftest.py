"""A tiny saved target with a chat template, and ``dspark ARGS`` in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dspark.cli import main as cli


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: Any) -> str:
    """A random float32 Llama with room for long prompts, saved with its tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.3,
        eos_token_id=0,
        bos_token_id=1,
    )
    folder = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).eval().save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return str(folder)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def dspark(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Ended]:
    """Run ``dspark ARGS``; cost tables go to a folder of the test."""
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))

    def run(*args: object) -> Ended:
        with pytest.raises(SystemExit) as end:
            cli.main([str(arg) for arg in args])
        captured = capsys.readouterr()
        return Ended(int(end.value.code or 0), captured.out, captured.err)

    return run


class Spoiler:
    """Replaces the token after the drafts wherever drafts were verified: output that depends on drafting."""

    def __init__(self, verify: Callable[..., Any]) -> None:
        self.verify = verify
        self.spoilt = 0

    def __call__(self, verifier: Any, batch: Any) -> Any:
        from dspark.types import VerifyResult

        result = self.verify(verifier, batch)
        wrong = (result.next_ids + 1 + (result.next_ids == 299)) % 300
        drafted = batch.verify_lens > 0
        self.spoilt += int(drafted.sum())
        ids = result.next_ids.copy()
        ids[drafted] = wrong[drafted]
        return VerifyResult(result.num_accepted, ids)


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Spoiler]:
    """Spoil a verifier: ``greedy`` or ``coupled``."""

    def one(name: str) -> Spoiler:
        import importlib

        module = importlib.import_module(f"dspark.verifiers.{name}")
        cls = getattr(module, f"{name.capitalize()}Verifier")
        spoiler = Spoiler(cls.verify)
        monkeypatch.setattr(cls, "verify", lambda self, batch: spoiler(self, batch))
        return spoiler

    return one
