"""A sequential head of a plugin, trained elsewhere, stored in a checkpoint and run from it by name."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dspark.capabilities import HeadCapabilities
from dspark.checkpoints import load_checkpoint, make_checkpoint, read_target, write_speculators
from dspark.config import EngineConfig, SamplingParams
from dspark.engine.build import build_engine
from dspark.errors import DSparkWarning, UnknownComponentError
from dspark.heads.common import HeadConfig
from dspark.heads.markov import MarkovConfig, MarkovHead
from dspark.plugins import hookimpl
from tests.drafters.golden import ROOT

CASE = ROOT / "deepspec_dspark_vanilla"
BUILT: list[Any] = []


@dataclass(frozen=True, slots=True)
class ScaledConfig(HeadConfig):
    """Settings of the plugin's head."""

    scale: float = 1.0


def build_scaled(config: ScaledConfig, context: Any) -> MarkovHead:
    """A Markov head whose W2 is stored under another name, and scaled."""
    BUILT.append(config)
    own = {"markov_w1.weight": config.weights["first"], "markov_w2.weight": config.weights["second"] * config.scale}
    sizes = {"vocab_size": 97, "draft_vocab_size": 97, "hidden_size": 32, "rank": config.rank}
    return MarkovHead(MarkovConfig(weights=own, **sizes), {}, context.device, context.dtype)


class Plugin:
    """Registers the head."""

    DSPARK_API = 1

    @hookimpl
    def dspark_register_sequential_heads(self, register: Any) -> None:
        register("scaled", build_scaled, config=ScaledConfig, capabilities=HeadCapabilities())


@pytest.fixture(scope="module")
def target() -> Any:
    from dspark.targets.hf import HFTarget

    return HFTarget.from_pretrained(str(ROOT / "target_qwen3_tiny"), dtype="float32", device="cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The golden drafter with its Markov head as a plugin's, W2 halved and scaled by 2."""
    read = load_checkpoint(CASE)
    tensors = {n: t for n, t in read.tensors.items() if not n.startswith("markov_head.")}
    tensors["markov_head.first"] = read.tensors["markov_head.markov_w1.weight"]
    tensors["markov_head.second"] = read.tensors["markov_head.markov_w2.weight"] / 2
    config = dataclasses.replace(read.config, head="acme/scaled", head_version="1.0", head_config={"scale": 2.0})
    made, parts = make_checkpoint(config, tensors), read_target(ROOT / "target_qwen3_tiny")
    write_speculators(tmp_path / "drafter", made, target=parts, keep_embeddings=True)
    return tmp_path / "drafter"


def decode(target: Any, drafter: Path, **settings: Any) -> tuple[list[int], Any]:
    config = EngineConfig(drafter=str(drafter), scheduler="fixed", max_slots=1, max_len=96)
    engine = build_engine(config, target=target, **settings)
    engine.submit([58, 83, 35, 87, 12, 64, 56, 33, 6], SamplingParams(temperature=0.0, max_tokens=20))
    return [t for chunk in engine.run() for t in chunk.ids], engine.stats.acceptance


def test_it_runs_with_its_tensors_and_settings(target: Any, folder: Path) -> None:
    """The same drafts as the head that it is made of."""
    tokens, acceptance = decode(target, folder, extra_plugins={"acme": Plugin()})
    assert BUILT[-1].scale == 2.0
    assert set(BUILT[-1].weights) == {"first", "second"}
    expected, same = decode(target, CASE)
    assert tokens == expected
    assert (acceptance.offered, acceptance.accepted) == (same.offered, same.accepted)
    assert sum(acceptance.accepted) > 0


def test_without_its_plugin_it_is_named(target: Any, folder: Path) -> None:
    with pytest.raises(UnknownComponentError, match="no sequential head 'acme/scaled'"):
        decode(target, folder)


def test_another_version_of_its_plugin_is_said(target: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.5" if name == "acme" else real(name))
    with pytest.warns(DSparkWarning, match=r"its head acme/scaled was trained with version 1.0, not 2.5"):
        decode(target, folder, extra_plugins={"acme": Plugin()})
