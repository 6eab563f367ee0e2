"""Cost profiles, measured once for a machine and target and kept in the cache folder."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark.errors import CostTableError
from dspark.protocols import Target
from dspark.scheduling.cost import CostProfile, measure

logger = logging.getLogger(__name__)


def cost_folder() -> Path:
    """``cost`` under ``DSPARK_CACHE``, or under dspark's part of the platform's cache folder."""
    if root := os.environ.get("DSPARK_CACHE"):
        return Path(root) / "cost"
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
        return Path(base) / "dspark" / "cache" / "cost"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "dspark" / "cost"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dspark" / "cost"


def profile_path(fingerprint: Mapping[str, str], folder: Path | str | None = None) -> Path:
    """Where the profile of a fingerprint is kept."""
    text = json.dumps(dict(fingerprint), sort_keys=True)
    name = hashlib.sha256(text.encode()).hexdigest()[:24]
    return (Path(folder) if folder is not None else cost_folder()) / f"{name}.json"


def cached_profile(
    target: Target, *, drafter: Mapping[str, str] | None = None, folder: Path | str | None = None, **settings: Any
) -> CostProfile:
    """The kept profile of this machine and target, or a new one that is measured (seconds) and kept.

    One with the drafting times of ``drafter`` is taken before one without any. A kept file that can't be read is
    measured anew, and a folder that can't be written costs the next run its seconds; both are logged. ``settings``: see
    ``dspark.scheduling.measure.measure``.
    """
    fingerprint = target.fingerprint()
    if drafter:
        kept = _kept(fingerprint, {**fingerprint, **drafter}, folder)
        if kept is not None:
            return kept.of_drafter(drafter)
    kept = _kept(fingerprint, fingerprint, folder)
    if kept is not None:
        return kept
    profile = measure(target, **settings)
    keep(profile, folder)
    return profile


def keep(profile: CostProfile, folder: Path | str | None = None) -> Path | None:
    """Keep a profile for its target and, where it has drafting times, its drafter; None where that fails."""
    path = profile_path({**profile.fingerprint, **profile.drafter}, folder)
    try:
        profile.save(path)
    except OSError as err:
        logger.warning("the cost table is not kept: %s", err)
        return None
    return path


def _kept(fingerprint: Mapping[str, str], key: Mapping[str, str], folder: Path | str | None) -> CostProfile | None:
    path = profile_path(key, folder)
    if not path.exists():
        return None
    try:
        kept = CostProfile.load(path)
        kept.check(fingerprint)
    except CostTableError as err:
        logger.warning("measuring a new cost table: %s", err)
        return None
    return kept
