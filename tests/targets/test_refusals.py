"""What can't be decoded from a slot cache is refused with the reason; what is wrong is caught by the probe."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from dspark.errors import TargetError
from dspark.targets import attention, groups
from dspark.targets.hf import HFTarget
from dspark.targets.probe import probe_target

from .toys import CONFIGS, toy_model

_BASE = CONFIGS["llama"][1]

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "sinks": ("GptOssConfig", {**_BASE, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}, "s_aux"),
    "alibi": ("BloomConfig", {"vocab_size": 61, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "ALiBi"),
    "own attention": (
        "GPTNeoConfig",
        {
            "vocab_size": 61,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
        },
        "0 of 2 layers",
    ),
    "state space": ("MambaConfig", {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2}, "recurrent state"),
    "hybrid": ("MiniMaxConfig", {**_BASE, "head_dim": 8}, "linear_attention"),
    "chunked": (
        "Llama4TextConfig",
        {**_BASE, "head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 8},
        "chunked",
    ),
    "no keywords": ("StableLmConfig", _BASE, "keyword arguments"),
    "own mask": ("DogeConfig", _BASE, "own attention mask"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_architectures_are_refused_with_the_reason(case: str) -> None:
    name, settings, reason = REFUSED[case]
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**settings)).float()
    with pytest.raises(TargetError, match=reason):
        HFTarget(model)


def test_encoder_decoders_and_multimodal_models_are_refused() -> None:
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=61, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    )
    with pytest.raises(TargetError, match="encoder-decoder"):
        HFTarget(t5)
    from dspark.targets.anatomy import refuse_by_config

    with pytest.raises(TargetError, match=r"multimodal model; load its text model .*gemma3_text"):
        refuse_by_config(transformers.Gemma3Config())


def test_shared_keys_are_refused_by_name() -> None:
    from dspark.targets.anatomy import refuse_by_config

    with pytest.raises(TargetError, match="num_kv_shared_layers"):
        refuse_by_config(transformers.Gemma3nTextConfig(num_kv_shared_layers=2))


def test_what_is_no_causal_lm_is_refused() -> None:
    with pytest.raises(TargetError, match="PreTrainedModel"):
        HFTarget(torch.nn.Linear(2, 2))
    model = toy_model("llama", torch.float32)
    with pytest.raises(TargetError, match="language-model head"):
        HFTarget(model.model)
    with torch.device("meta"):
        ghost = transformers.AutoModelForCausalLM.from_config(model.config)
    with pytest.raises(TargetError, match="meta"):
        HFTarget(ghost)


def test_bidirectional_attention_is_refused() -> None:
    model = toy_model("gemma3", torch.float32, use_bidirectional_attention=True)
    with pytest.raises(TargetError, match="causal"):
        HFTarget(model)


def test_the_probe_passes_a_sound_target_and_frees_its_cache() -> None:
    target = HFTarget(toy_model("gemma2", torch.float32))
    assert probe_target(target) < 1e-4
    assert target.cache_bytes == 0


@pytest.mark.parametrize("fault", ["rotation", "softcap", "window", "stale"])
def test_the_probe_catches_a_target_that_is_not_the_model(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = {"rotation": "llama", "softcap": "gemma2", "window": "mistral", "stale": "llama"}[fault]
    target = HFTarget(toy_model(kind, torch.float32), probe=False, fast=False)
    if fault == "rotation":
        forward = target.model.forward
        target.model.forward = lambda ids, **k: forward(ids, **{**k, "position_ids": 2 * k["position_ids"]})
    elif fault == "softcap":
        plain = groups._plain_attention
        monkeypatch.setattr(groups, "_plain_attention", lambda q, k, v, m, s, c: plain(q, k, v, m, s, None))
    elif fault == "window":
        monkeypatch.setattr(attention.SlotContext, "window_of", lambda self, spec: None)
    else:  # what was rolled back is not overwritten
        write = attention.SlotContext.write
        monkeypatch.setattr(
            attention.SlotContext,
            "write",
            lambda self, flat, new: write(self, flat, new) if (self._positions == 0).any() else None,
        )
    target.plain_logits = _by_eager(target)  # type: ignore[method-assign]
    with pytest.raises(TargetError, match="own logits when packed"):
        probe_target(target)


def _by_eager(target: HFTarget) -> Any:
    """The reference from an untouched copy, as faults above may reach the target's own."""
    import copy

    model = copy.deepcopy(target.model)
    model.__dict__.pop("forward", None)
    model.config._attn_implementation_internal = "eager"

    def logits(ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([ids]), use_cache=False).logits[0]  # type: ignore[no-any-return]

    return logits
