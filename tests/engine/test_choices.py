"""``auto``, presets, and drafters given by a checkpoint's folder."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dspark import DSPARK_API, ConfigError, EngineConfig, UnknownComponentError, hookimpl
from dspark.capabilities import PresetCapabilities
from dspark.engine.build import build_engine
from dspark.targets.hf import HFTarget

GOLDEN = Path(__file__).parents[1] / "golden"


def plugin_of(hook: Any) -> ModuleType:
    plugin = ModuleType("acme")
    plugin.DSPARK_API = DSPARK_API
    setattr(plugin, hook.__name__, hook)
    return plugin


def preset(models: tuple[str, ...] = (), hashes: tuple[str, ...] = (), **settings: Any) -> Any:
    @hookimpl
    def dspark_register_presets(register: Any) -> None:
        fits = PresetCapabilities("a test target", models, hashes)
        register("mine", lambda config, context: settings, config=None, capabilities=fits)

    return plugin_of(dspark_register_presets)


@pytest.fixture
def target(tiny_model: Any) -> Any:
    return HFTarget(tiny_model, name="Some-Org/Tiny-Chat", probe=False)


def build(target: Any, plugin: Any = None, **settings: Any) -> Any:
    config = EngineConfig(**{"drafter": "auto", "max_len": 64, "max_slots": 2, **settings})
    return build_engine(config, target=target, extra_plugins={"acme": plugin} if plugin else None)


def test_auto_without_a_preset_is_ngram_with_what_is_learnt_online(target: Any) -> None:
    engine = build(target)
    assert engine.parts.names["drafter"] == "dspark/ngram"
    assert engine.parts.names["estimator"] == "dspark/online"


def test_a_preset_is_found_by_id_and_by_config_and_yields_to_the_user(target: Any) -> None:
    by_id = preset(models=("some-org/tiny-*",), drafter="ngram", gamma=3, scheduler="fixed")
    engine = build(target, by_id)
    assert (engine.parts.gamma, engine.parts.names["scheduler"]) == (3, "dspark/fixed")
    by_config = preset(hashes=(target.fingerprint()["config"],), drafter="ngram", gamma=3)
    assert build(target, by_config).parts.gamma == 3
    assert build(target, by_config, gamma=5).parts.gamma == 5
    elsewhere = preset(models=("other/*",), drafter="ngram", gamma=3)
    assert build(target, elsewhere).parts.gamma != 3


@pytest.mark.parametrize("named", ["drafter", "drafter_config"])
def test_a_preset_pins_a_revision_which_the_user_may_replace(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A preset may name its checkpoint as a user does, or as a setting of the drafter ``dspark``."""
    from transformers import AutoModelForCausalLM

    asked: list[tuple[str, str | None]] = []

    def snapshot(repo: str, revision: str | None = None, **_: Any) -> str:
        asked.append((repo, revision))
        return str(GOLDEN / "deepspec_dspark_vanilla")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    settings = {"drafter": "some-org/drafter", "drafter_config": {"revision": "8f1c2d3"}}
    if named == "drafter_config":
        settings = {"drafter": "dspark", "drafter_config": {"checkpoint": "some-org/drafter", "revision": "8f1c2d3"}}
    plugin = preset(models=("*",), **settings)
    model = AutoModelForCausalLM.from_pretrained(GOLDEN / "target_qwen3_tiny")
    engine = build(HFTarget(model), plugin, max_len=128, drafter_config={"candidates": 8}, estimator="online")
    assert engine.parts.names["drafter"] == "dspark/dspark"
    assert engine.parts.drafter.candidates == 8
    assert set(asked) == {("some-org/drafter", "8f1c2d3")}
    asked.clear()
    build(HFTarget(model), plugin, max_len=128, drafter_config={"revision": "main"}, estimator="online")
    assert set(asked) == {("some-org/drafter", "main")}


def test_a_preset_without_a_drafter_leaves_the_one_that_needs_no_weights(target: Any) -> None:
    engine = build(target, preset(models=("*",), gamma=3))
    assert (engine.parts.names["drafter"], engine.parts.gamma) == ("dspark/ngram", 3)


def test_a_preset_with_an_unknown_setting_is_refused_by_name(target: Any) -> None:
    with pytest.raises(ConfigError, match=r"acme/mine.*'gama'.*gamma"):
        build(target, preset(models=("*",), gama=3))


def test_a_folder_is_a_checkpoint_and_brings_its_confidence_head() -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(GOLDEN / "target_qwen3_tiny")
    folder = GOLDEN / "deepspec_dspark_vanilla"
    engine = build(HFTarget(model), drafter=str(folder), max_len=128)
    assert engine.parts.names["drafter"] == "dspark/dspark"
    assert engine.parts.names["estimator"] == "dspark/linear"
    assert engine.parts.gamma == engine.parts.drafter.max_gamma


def test_a_name_that_is_nothing_is_refused_with_the_nearest(target: Any) -> None:
    with pytest.raises(UnknownComponentError, match=r"ngran.*ngram"):
        build(target, drafter="ngran")


@pytest.mark.parametrize(
    ("field", "name", "nearest"),
    [
        ("scheduler", "causl", "causal"),
        ("drafter", "ngrm", "ngram"),
        ("estimator", "onlin", "online"),
        ("calibrator", "st", "sts"),
        ("verifier", "couple", "coupled"),
    ],
)
def test_names_are_checked_before_the_target_is_loaded(field: str, name: str, nearest: str) -> None:
    config = EngineConfig(**{field: name}, target_config={"model": "/no/such/folder"})
    with pytest.raises(UnknownComponentError, match=rf"{name}.*{nearest}"):
        build_engine(config)


def test_a_plugin_may_read_checkpoints_of_its_own(target: Any, tmp_path: Path) -> None:
    asked: list[str] = []

    @hookimpl
    def dspark_load_checkpoint(source: str, config: Any) -> Any:
        asked.append(source)
        return None

    with pytest.raises(Exception, match=r"config\.json"):
        build(target, plugin_of(dspark_load_checkpoint), drafter=str(tmp_path))
    assert asked == [str(tmp_path)]
