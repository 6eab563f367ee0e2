"""Tokenizers built on the spot: byte-level BPE, SentencePiece-like with byte tokens, slow, and the real one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

TEXT = (
    "Der Käse – naïve café, 你好世界, สวัสดี, 😀👩‍👩‍👧 emoji. The quick brown fox jumps over the lazy dog. \n\n"
    "    def f(x):\n        return x + 1\n"
) * 3


def byte_level() -> PreTrainedTokenizerFast:
    """Byte-level BPE as in GPT-2, Llama 3 and Qwen: few merges, so that characters are split over tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|end|>", "<|start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", bos_token="<|start|>")


_PIECES = ["▁", "▁▁", "▁the", "▁fox", "he", "x", "y", ".", "\n", "▁ä", "é", "好", "�"]


def _unigram(decoder: Any) -> PreTrainedTokenizerFast:
    vocab = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    vocab += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    vocab += [(piece, -2.0) for piece in _PIECES]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>", unk_token="<unk>")


def llama_like() -> PreTrainedTokenizerFast:
    """SentencePiece with byte tokens, decoded as Llama 2, Mistral and Gemma do."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return _unigram(decoders.Sequence(steps))


def metaspace() -> PreTrainedTokenizerFast:
    """SentencePiece with byte tokens and the Metaspace decoder."""
    return _unigram(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]))


class StrippingTokenizer(ByT5Tokenizer):
    """A slow tokenizer that strips the ends of its text, as the slow SentencePiece ones do."""

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return str(super().convert_tokens_to_string(tokens)).strip()


BUILDERS: dict[str, Callable[[], Any]] = {
    "byte_level": byte_level,
    "llama_like": llama_like,
    "metaspace": metaspace,
    "slow_bytes": ByT5Tokenizer,
    "slow_stripping": StrippingTokenizer,
}


@pytest.fixture(scope="session", params=list(BUILDERS))
def tokenizer(request: pytest.FixtureRequest) -> Any:
    """Each kind in turn."""
    return BUILDERS[request.param]()


@pytest.fixture(scope="session")
def bpe() -> Any:
    return byte_level()


@pytest.fixture(scope="session")
def llama() -> Any:
    return llama_like()


@pytest.fixture(scope="session")
def real_tokenizer() -> Any:
    """The converted target's tokenizer, from the folder that DSPARK_REAL_TARGET names."""
    folder = Path(os.environ.get("DSPARK_REAL_TARGET", ""))
    if not (folder / "tokenizer.json").is_file():
        pytest.skip("DSPARK_REAL_TARGET does not name a folder with the converted target")
    return PreTrainedTokenizerFast.from_pretrained(folder)
