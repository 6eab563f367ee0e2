"""Shared fixtures: a tiny random Llama with a tokenizer, so that the whole path runs in seconds."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

TEXT = "the quick brown fox jumps over the lazy dog and runs away from a small white house by the sea"


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    """Byte-level BPE with a chat template; 300 ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>", "<|start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", bos_token="<|start|>")
    fast.chat_template = (
        "{% for m in messages %}<|start|>{{ m['role'] }}: {{ m['content'] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant: {% endif %}"
    )
    return fast


@pytest.fixture(scope="session")
def tiny_model(tiny_tokenizer: Any) -> Any:
    """A random two-layer Llama in float32."""
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
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=True,
        eos_token_id=0,
        bos_token_id=1,
    )
    return LlamaForCausalLM(config).eval()
