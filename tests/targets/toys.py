"""Tiny random models of every kind that the targets' tests decode."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dspark.types import VerifyLayout

VOCAB = 61
_SIZE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GQA = {**_SIZE, "num_key_value_heads": 2}
_GEMMA = {**_GQA, "head_dim": 16, "query_pre_attn_scalar": 9}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _GQA),
    "qwen2": ("Qwen2Config", _GQA),
    "qwen2-window": (
        "Qwen2Config",
        {**_GQA, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {**_GQA, "head_dim": 16}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {**_GQA, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "mistral": ("MistralConfig", {**_GQA, "sliding_window": 4}),
    "gemma2": (
        "Gemma2Config",
        {
            **_GEMMA,
            "sliding_window": 4,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 2.0,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {**_GEMMA, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "phi": ("PhiConfig", _SIZE),
    "phi3": ("Phi3Config", {**_GQA, "sliding_window": 4}),
    "gpt-neox": ("GPTNeoXConfig", _SIZE),
    "gpt2": ("GPT2Config", {**_SIZE, "n_positions": 128}),
    "granite": ("GraniteConfig", {**_GQA, "attention_multiplier": 0.3, "logits_scaling": 3.0}),
    "cohere2": ("Cohere2Config", {**_GQA, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}),
    "deepseek-v2": (
        "DeepseekV2Config",
        {
            **_SIZE,
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "first_k_dense_replace": 2,
            "n_routed_experts": 2,
        },
    ),
}


def toy_model(kind: str, dtype: torch.dtype = torch.float64, seed: int = 0, device: str = "cpu", **changes: Any) -> Any:
    """A random model whose logits depend visibly on every token that it sees."""
    import transformers

    name, settings = CONFIGS[kind]
    config = getattr(transformers, name)(**{**settings, **changes}, attn_implementation="eager")
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).to(device=device, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.25)
    return model


def plain(model: Any, ids: list[int]) -> torch.Tensor:
    """Logits [n, V] of one sequence, without a cache, by transformers alone."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([ids], device=model.device), use_cache=False).logits[0]
    return logits


def toy_layout(
    texts: dict[int, list[int]], sequences: list[tuple[int, int, int]], device: str = "cpu", logits: str = "all"
) -> VerifyLayout:
    """A packed layout of (slot, start, length) sequences that read ``texts[slot]``.

    Args:
        logits: rows whose logits are wanted: ``all``, ``last`` (of each sequence) or ``none``.
    """
    ids = [t for slot, start, n in sequences for t in texts[slot][start : start + n]]
    positions = [start + i for _, start, n in sequences for i in range(n)]
    cu = np.concatenate([[0], np.cumsum([n for _, _, n in sequences])]).astype(np.int64)
    rows = {"all": np.arange(len(ids)), "last": cu[1:] - 1, "none": np.zeros(0, dtype=np.int64)}[logits]
    return VerifyLayout(
        token_ids=torch.tensor(ids, device=device),
        positions=torch.tensor(positions, device=device),
        slots=np.array([s for s, _, _ in sequences], dtype=np.int64),
        starts=np.array([s for _, s, _ in sequences], dtype=np.int64),
        cu_query_lens=cu,
        logit_rows=rows,
    )
