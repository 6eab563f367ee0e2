"""A sequential head of a plugin, trained by name, stored in the checkpoint and decoded with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dspark.api import SpeculativeDecoder
from dspark.capabilities import HeadCapabilities
from dspark.checkpoints import load_checkpoint
from dspark.errors import ConfigError
from dspark.heads.common import HeadConfig
from dspark.plugins import hookimpl
from dspark.plugins.manager import load_plugins
from dspark.training.config import TrainConfig
from dspark.training.run import Run
from tests.training.tiny import hf_target, settings


@dataclass(frozen=True, slots=True)
class PlainConfig(HeadConfig):
    """Settings of the head."""

    scale: float = 1.0


class PlainHead(nn.Module):
    """One bias for all positions, [Vd]."""

    capabilities = HeadCapabilities()

    def __init__(self, config: PlainConfig, device: Any, dtype: Any) -> None:
        super().__init__()
        made = torch.zeros(config.draft_vocab_size, device=device, dtype=dtype)
        self.bias = nn.Parameter(config.weights.get("bias", made), requires_grad=False)
        self.scale = config.scale

    def start(self, anchors: Tensor, hidden: Tensor) -> None:
        return None

    def step(self, state: None, prev: Tensor, hidden: Tensor) -> tuple[Tensor, None]:
        return (self.bias * self.scale).expand(len(prev), -1), None

    def block(self, prev: Tensor, hidden: Tensor) -> Tensor:
        return (self.bias * self.scale).expand(*prev.shape, -1)

    def canonical(self) -> dict[str, Tensor]:
        return {"bias": self.bias}


class Plugin:
    """Registers the head, and one that can't be trained."""

    DSPARK_API = 1

    @hookimpl
    def dspark_register_sequential_heads(self, register: Any) -> None:
        def build(config: PlainConfig, context: Any) -> PlainHead:
            return PlainHead(config, context.device, context.dtype)

        def fixed(config: PlainConfig, context: Any) -> Any:
            head = PlainHead(config, context.device, context.dtype)
            head.canonical = None  # type: ignore[assignment, method-assign]
            return head

        register("plain", build, config=PlainConfig, capabilities=HeadCapabilities())
        register("fixed", fixed, config=PlainConfig, capabilities=HeadCapabilities())


def make(tmp_path: Path, model: Any, tokenizer: Any, head: str) -> Run:
    config = TrainConfig.of(settings(tmp_path, drafter={"head": head, "head_config": {"scale": 2.0}}))
    catalog = load_plugins(extra_plugins={"acme": Plugin()}).catalog
    return Run(config, say=lambda _: None, catalog=catalog, target=hf_target(model, tokenizer))


def test_it_is_trained_stored_and_decoded_with(tiny_model: Any, tiny_tokenizer: Any, tmp_path: Path) -> None:
    run = make(tmp_path, tiny_model, tiny_tokenizer, "plain")
    trainer = run.train()
    bias = trainer.parameters["sequential.bias"]
    assert bool((bias != 0).all())
    folder = run.output / "drafter"
    read = load_checkpoint(folder, target_layers=2)
    assert (read.config.head, read.config.head_version, dict(read.config.head_config)) == (
        "acme/plain",
        "0",
        {"scale": 2.0},
    )
    assert torch.equal(read.tensors["markov_head.bias"], bias.detach().bfloat16())
    loaded = {"tokenizer": tiny_tokenizer, "cost": None, "extra_plugins": {"acme": Plugin()}}
    with SpeculativeDecoder.from_pretrained(run.target, str(folder), **loaded) as decoder:
        assert len(decoder.generate([[7, 8, 9]], max_tokens=8)[0].ids) == 8
        assert decoder.stats.drafted > 0


def test_one_that_can_not_be_trained_is_refused(tiny_model: Any, tiny_tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"'acme/fixed' can't be trained: it has to be a torch\.nn\.Module with canonical"
    ):
        make(tmp_path, tiny_model, tiny_tokenizer, "fixed").prepare()
