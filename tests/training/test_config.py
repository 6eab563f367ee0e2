"""A run's settings: files, overrides, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from dspark.errors import ConfigError
from dspark.training.config import SECTIONS, TrainConfig
from dspark.training.config_file import override, read_file

YAML = """
target: {model: smollm2}
data:
  files: [a.jsonl, b.jsonl]
loss:
  ce: [[0.0, 1.0], [1.0, 0.1]]
optim:
  lr: 1.0e-3
"""
TOML = """
target = {model = "smollm2"}
[data]
files = ["a.jsonl", "b.jsonl"]
[loss]
ce = [[0.0, 1.0], [1.0, 0.1]]
[optim]
lr = 1.0e-3
"""


def test_yaml_toml_and_json_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(YAML)
    (tmp_path / "a.toml").write_text(TOML)
    config = TrainConfig.of(read_file(tmp_path / "a.yaml"))
    assert config == TrainConfig.of(read_file(tmp_path / "a.toml"))
    assert config.data.files == ("a.jsonl", "b.jsonl")
    (tmp_path / "a.json").write_text(json.dumps(config.plain()))
    assert TrainConfig.of(read_file(tmp_path / "a.json")).plain() == config.plain()


def test_every_field_can_be_overridden() -> None:
    """Each to another valid value, by the command line's spelling."""
    values: dict[str, Any] = {"target": {"model": "a"}, "data": {"cache": "k"}, "optim": {"steps": 9}}
    others = {
        "target.kind": "other", "target.model": "b", "target.dtype": "float32", "target.device": "cpu",
        "target.settings": {"fast": False}, "data.cache": "c", "data.files": ["x"], "data.chat_args": {"a": 1},
        "drafter.algorithm": "eagle3", "drafter.head": "rnn", "drafter.head_config": {"a": 1},
        "drafter.family": "llama",
        "drafter.layout": "mask-only", "drafter.taps": [1, 2], "drafter.start": "s", "drafter.init": "target",
        "drafter.init_head": "bigram", "optim.precision": "fp32",
            "loss.against": "law", "run.output": "o", "loss.ce": [[0, 1], [1, 2]],
    }  # fmt: skip
    base = TrainConfig.of(values)
    for name, cls in SECTIONS.items():
        for field in dataclasses.fields(cls):
            key, old = f"{name}.{field.name}", getattr(getattr(base, name), field.name)
            new = others.get(key)
            if new is None:
                new = not old if isinstance(old, bool) else 0.5 if isinstance(old, float) or key == "loss.decay" else 11
            text = new if isinstance(new, str) else json.dumps(new)
            changed = TrainConfig.of(override(values, [f"{key}={text}"]))
            got = getattr(getattr(changed, name), field.name)
            assert got != old, key
            assert json.loads(json.dumps(got)) == new, key


def test_overrides_reach_into_mappings() -> None:
    config = TrainConfig.of(
        override({"target": {"model": "a"}}, ["target.settings.fast=false", "drafter.head=my-head"])
    )
    assert config.target.settings == {"fast": False}
    assert config.drafter.head == "my-head"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optm": {}}, "unknown section 'optm'; did you mean 'optim'"),
        ({"optim": {"lrr": 1}}, "optim: unknown setting 'lrr'; did you mean 'lr'"),
        ({"drafter": {"heads": 1}}, "did you mean 'head'"),
        ({"optim": 3}, "optim: expected a table"),
        ({"optim": {"lr": -1}}, "lr: expected a number of at least 0"),
        ({"optim": {"steps": 1.5}}, "steps: expected an integer"),
        ({"optim": {"precision": "bf61"}}, "one of bf16, fp32, got 'bf61'; did you mean 'bf16'"),
        ({"drafter": {"layout": "anchor"}}, "did you mean 'anchor-first'"),
        ({"loss": {"tv": "high"}}, r"loss\.tv: expected a number or a list"),
        ({"data": {"follow": True}}, r"data\.follow: needs data\.cache"),
        ({"data": {"follow": True, "cache": "c"}}, r"needs .*optim\.steps"),
        ({"target": {}}, r"target\.model: name"),
    ],
)
def test_what_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig.of({"target": {"model": "a"}, **values})


@pytest.mark.parametrize("setting", ["lr=1", "optim.lr", "optim.=3"])
def test_malformed_overrides(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"expected section\.field=value"):
        override({}, [setting])


@pytest.mark.parametrize(
    ("name", "text"), [("a.yaml", "a: ["), ("a.toml", "a = ["), ("a.json", "{"), ("a.yaml", "- 1")]
)
def test_malformed_files(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=name):
        read_file(tmp_path / name)


def test_other_files(tmp_path: Path) -> None:
    (tmp_path / "a.ini").write_text("")
    with pytest.raises(ConfigError, match=r"\.yaml, \.toml or \.json"):
        read_file(tmp_path / "a.ini")
    with pytest.raises(ConfigError, match="No such file"):
        read_file(tmp_path / "none.toml")


def test_the_documented_settings(tmp_path: Path) -> None:
    """The run of docs/training.md."""
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    (tmp_path / "run.yaml").write_text(page.partition("```yaml\n")[2].partition("```")[0])
    config = TrainConfig.of(read_file(tmp_path / "run.yaml"))
    assert (config.target.model, config.drafter.vocab_size, config.run.output) == ("smollm2", 8192, "drafter-a")
