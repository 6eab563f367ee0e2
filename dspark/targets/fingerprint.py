"""What a measured cost depends on, as strings that two runs can compare."""

from __future__ import annotations

import hashlib
import json
import platform
from typing import Any

import torch


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
    """Hash of what in a config shapes the computation; paths and the attention's name do not."""
    fields = {k: v for k, v in config.to_dict().items() if not k.startswith("_") and k != "transformers_version"}
    text = json.dumps(fields, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


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
