"""Settings of a run from a YAML, TOML or JSON file, every field of it overridable as ``section.field=value``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark.errors import ConfigError
from dspark.training.config import SECTIONS


def read_file(path: Path) -> dict[str, Any]:
    """Settings of a .yaml, .yml, .toml or .json file.

    Raises:
        ConfigError: unreadable, malformed, or of another kind.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as err:
        raise ConfigError(f"{path}: {err}") from err
    try:
        if path.suffix in (".yaml", ".yml"):
            value = _yaml(text)
        elif path.suffix == ".toml":
            import tomllib

            value = tomllib.loads(text)
        elif path.suffix == ".json":
            value = json.loads(text)
        else:
            raise ConfigError(f"{path}: expected a .yaml, .toml or .json file")
    except ValueError as err:
        if isinstance(err, ConfigError):
            raise
        raise ConfigError(f"{path}: {err}") from err
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected sections ({', '.join(SECTIONS)}), got {type(value).__name__}")
    return value


def _yaml(text: str) -> Any:
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError as err:
        raise ConfigError("a YAML config needs PyYAML (pip install pyyaml); TOML needs nothing") from err
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as err:
        raise ValueError(str(err)) from err


def override(values: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """``section.field=value`` over a file's settings; values are JSON, or text where they are not.

    Raises:
        ConfigError: malformed, or a section that there is not.
    """
    out = {name: dict(section) if isinstance(section, Mapping) else section for name, section in values.items()}
    for setting in settings:
        key, separator, text = setting.partition("=")
        section, dot, name = key.strip().partition(".")
        if not separator or not dot or not name:
            raise ConfigError(f"--set {setting!r}: expected section.field=value, such as optim.lr=1e-3")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        target = out.setdefault(section, {})
        *path, last = name.split(".")
        for step in path:
            target = target.setdefault(step, {})
        target[last] = value
    return out
