"""Names that the configuration leaves open: ``auto``, and drafters given by a checkpoint's folder or hub id."""

from __future__ import annotations

import dataclasses
import fnmatch
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark.capabilities import PresetCapabilities
from dspark.config import EngineConfig
from dspark.errors import ConfigError, UnknownComponentError, nearest
from dspark.plugins.catalog import Catalog
from dspark.plugins.kinds import Kind
from dspark.plugins.manager import PluginManager
from dspark.protocols import BuildContext, Target

logger = logging.getLogger(__name__)

CHECKPOINT_DRAFTER = "dspark"
"""Runs checkpoints, whoever loads them; ``eagle3`` those of that kind."""
FALLBACK_DRAFTER = "ngram"
"""For targets without a preset: it needs no weights."""


def settle(config: EngineConfig, manager: PluginManager, target: Target) -> EngineConfig:
    """The configuration with its drafter settled.

    ``auto`` takes the preset of the target, else ``ngram``. What no component is called, but is a folder or looks like
    a hub id, is a checkpoint, also where a preset names it: the plugins' ``dspark_load_checkpoint`` is asked, then the
    readers that ship.

    Raises:
        ConfigError: a preset holds an unknown setting.
        UnknownComponentError: no such drafter, and no such folder.
    """
    if config.drafter == "auto":
        config = _preset(config, manager.catalog, target)
    try:
        manager.catalog.resolve(Kind.DRAFTER, config.drafter)
    except UnknownComponentError:
        source = config.drafter
        if not may_be_checkpoint(source):
            raise
        loaded = manager.load_checkpoint(source, config)
        settings = {"checkpoint": loaded if loaded is not None else source, **config.drafter_config}
        drafter = drafter_for(settings["checkpoint"], settings.get("revision"))
        return dataclasses.replace(config, drafter=drafter, drafter_config=settings)
    return config


def may_be_checkpoint(name: str) -> bool:
    """Whether a drafter's name can be that of a checkpoint: a folder that exists, or what looks like a hub id."""
    return "/" in name or Path(name).expanduser().exists()


def drafter_for(checkpoint: Any, revision: str | None = None) -> str:
    """The drafter that runs a checkpoint, which is named or loaded.

    Raises:
        CheckpointError: it is named, and there is none, or its config can't be read.
    """
    from dspark.checkpoints import is_eagle3, read_json, resolve_source

    if isinstance(checkpoint, (str, Path)):
        eagle = is_eagle3(read_json(resolve_source(checkpoint, revision, weights=False) / "config.json"))
    else:
        eagle = getattr(getattr(checkpoint, "config", None), "eagle", None) is not None
    return "eagle3" if eagle else CHECKPOINT_DRAFTER


def estimator_for(config: EngineConfig, drafter: Any) -> str:
    """``auto``: the drafter's own confidence head where it has one, else what is learnt from outcomes."""
    if config.estimator != "auto":
        return config.estimator
    return "linear" if getattr(drafter, "confidence_weights", None) else "online"


def find_preset(catalog: Catalog, target: Target) -> tuple[str, Mapping[str, Any]] | None:
    """(name, settings) of the preset that fits a target, by its id or by the hash of its configuration."""
    name = target.name.lower()
    model_hash = target.fingerprint().get("config")
    for registration in catalog.of(Kind.PRESET):
        fits = registration.capabilities
        if not isinstance(fits, PresetCapabilities):
            continue
        named = any(fnmatch.fnmatchcase(name, pattern.lower()) for pattern in fits.models)
        if named or (model_hash is not None and model_hash in fits.config_hashes):
            return registration.key, catalog.build(Kind.PRESET, registration.key, None, BuildContext(target=target))
    return None


def _preset(config: EngineConfig, catalog: Catalog, target: Target) -> EngineConfig:
    found = find_preset(catalog, target)
    if found is None:
        logger.info("no preset for target %s: drafter %s", target.name, FALLBACK_DRAFTER)
        return dataclasses.replace(config, drafter=FALLBACK_DRAFTER)
    key, settings = found
    fields = {f.name: f for f in dataclasses.fields(EngineConfig)}
    for setting in settings:
        if setting not in fields:
            raise ConfigError(f"preset {key!r}: unknown setting {setting!r}{nearest(setting, fields)}")
    plain = EngineConfig()
    # what the user set stays, setting by setting of a component; a preset fills in the rest
    mine = {"drafter": settings.get("drafter", FALLBACK_DRAFTER)}
    for setting, value in settings.items():
        theirs = getattr(config, setting)
        if setting.endswith("_config") and isinstance(value, Mapping):
            mine[setting] = {**value, **theirs}
        elif setting != "drafter" and theirs == getattr(plain, setting):
            mine[setting] = value
    logger.info("target %s: preset %s, drafter %s", target.name, key, mine["drafter"])
    return dataclasses.replace(config, **mine)
