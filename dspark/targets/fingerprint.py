"""What a measured cost depends on, as strings that two runs can compare."""

from __future__ import annotations

import hashlib
import json
import platform
from typing import Any

import torch

_APART = frozenset(
    {
        "architectures",
        "attention_dropout",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "is_llama_config",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unk_token_id",
        "use_cache",
    }
)
"""Fields of a config that leave the computation as it is."""


def describe(name: str, model: Any, device: torch.device, dtype: torch.dtype, attention: str) -> dict[str, str]:
    """Model, device, dtype, threads, attention and versions."""
    import transformers

    return {
        "model": name,
        "config": config_hash(model.config),
        "device": device_name(device),
        "dtype": str(dtype).removeprefix("torch."),
        "threads": str(torch.get_num_threads()) if device.type == "cpu" else "-",
        "attention": attention,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def config_hash(config: Any) -> str:
    """Hash of what in a config shapes the computation: the same for a GGUF file and the weights that it was made from.

    Left out are paths, the dtype, training settings and labels. What is false, empty or None counts as absent, and
    numbers to six digits, since files differ in whether and how they write them.
    """
    text = json.dumps(_shaping(config.to_dict()), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _shaping(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {k: _shaping(v) for k, v in value.items() if not str(k).startswith("_") and k not in _APART}
        return {k: v for k, v in kept.items() if v not in (None, False, {}, [])}
    if isinstance(value, (list, tuple)):
        return [_shaping(v) for v in value]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return f"{value:.6g}" if abs(value) < 1e6 else str(value)
    return value


def device_name(device: torch.device) -> str:
    """The CPU's or the accelerator's model."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "mps":
        return f"mps {platform.machine()}"
    return f"cpu {_cpu_model()}"


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.lower().startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
