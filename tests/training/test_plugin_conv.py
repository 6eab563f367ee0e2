"""The package ``dspark-head-conv``, found as any installed plugin: trained by name, exported, loaded again."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark.api import SpeculativeDecoder
from dspark.checkpoints import load_checkpoint, write_speculators
from dspark.errors import PluginError
from dspark.training.config import TrainConfig
from dspark.training.run import Run
from tests.training.tiny import hf_target, settings

PACKAGE = Path(__file__).parents[2] / "plugins" / "dspark-head-conv"


@pytest.fixture
def version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Install the package for one test: its sources on the path, and the metadata that an installer writes."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    name, made = project["name"], str(project["version"])
    info = tmp_path / "site" / f"{name.replace('-', '_')}-{made}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.3\nName: {name}\nVersion: {made}\n", encoding="utf-8")
    points = "".join(f"{k} = {v}\n" for k, v in project["entry-points"]["dspark"].items())
    (info / "entry_points.txt").write_text(f"[dspark]\n{points}", encoding="utf-8")
    monkeypatch.syspath_prepend(PACKAGE)
    monkeypatch.syspath_prepend(info.parent)
    return made


def test_it_is_trained_exported_and_loaded_again(
    version: str, tiny_model: Any, tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = {"head": "dspark-head-conv/conv", "head_config": {"width": 2}}
    config = TrainConfig.of(settings(tmp_path, drafter=drafter))
    run = Run(config, say=lambda _: None, target=hf_target(tiny_model, tiny_tokenizer))
    trained = run.train().parameters
    names = {"embeddings", "conv", "conv_bias", "mix", "output"}
    assert {n.removeprefix("sequential.") for n in trained if n.startswith("sequential.")} == names
    assert bool(trained["sequential.mix"].any()), "the convolution has no weight: nothing was learned through it"

    first = load_checkpoint(run.output / "drafter", target_layers=2)
    again = tmp_path / "again"
    notes = write_speculators(again, first, keep_embeddings=True)
    assert notes == (
        f"the sequential head is the plugin's dspark-head-conv/conv {version}: other readers can't run it",
    )
    for read in (first, load_checkpoint(again, target_layers=2)):
        c = read.config
        assert (c.head, c.head_version, dict(c.head_config)) == ("dspark-head-conv/conv", version, {"width": 2})
        for name in names:
            assert torch.equal(read.tensors[f"markov_head.{name}"], trained[f"sequential.{name}"].detach().bfloat16())

    loaded = {"tokenizer": tiny_tokenizer, "cost": None}
    with SpeculativeDecoder.from_pretrained(run.target, str(again), **loaded) as decoder:
        assert len(decoder.generate([[7, 8, 9]], max_tokens=8)[0].ids) == 8
        assert decoder.stats.drafted > 0
        assert type(decoder.engine.parts.drafter.head).__name__ == "ConvHead"
    monkeypatch.setenv("DSPARK_DISABLE_PLUGINS", "dspark-head-conv")
    with pytest.raises(PluginError, match="dspark-head-conv"):
        SpeculativeDecoder.from_pretrained(run.target, str(again), **loaded)
