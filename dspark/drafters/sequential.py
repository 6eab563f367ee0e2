"""The sequential head of a block drafter: built from what its checkpoint or its settings name."""

from __future__ import annotations

import importlib.metadata
import warnings
from collections.abc import Mapping
from typing import Any

from dspark.checkpoints import Checkpoint
from dspark.drafters.fit import Fitted
from dspark.errors import ConfigError, DSparkWarning
from dspark.protocols import BuildContext, SequentialHead


def make_head(
    checkpoint: Checkpoint, fitted: Fitted, name: str | None, own: Mapping[str, Any], context: BuildContext
) -> SequentialHead:
    """Build the checkpoint's head, or another one in its place.

    Args:
        name: of the other one, a registered sequential head; None for the checkpoint's.
        own: settings that win over the checkpoint's.

    Raises:
        ConfigError: without a catalog to resolve it in.
    """
    c = checkpoint.config
    if context.resolve is None:
        raise ConfigError("dspark: a sequential head is built through BuildContext.resolve, which is not set")
    settings: dict[str, Any] = {
        "hidden_size": c.hidden_size,
        "vocab_size": c.vocab_size,
        "draft_vocab_size": len(fitted.head),
        "rank": c.markov_rank,
    }
    if name is None:
        prefix = "markov_head."
        settings["weights"] = {n.removeprefix(prefix): t for n, t in fitted.tensors.items() if n.startswith(prefix)}
        settings |= dict(c.head_config)
        if c.plugin_head:
            _compare_versions(checkpoint)
    head: SequentialHead = context.resolve("sequential_head", name or c.head, settings | dict(own))
    return head


def _compare_versions(checkpoint: Checkpoint) -> None:
    """Say where a plugin's head was trained with another version of its distribution than is installed."""
    c = checkpoint.config
    dist = c.head.partition("/")[0]
    try:
        installed = importlib.metadata.version(dist)
    except importlib.metadata.PackageNotFoundError:
        return  # a plugin without a distribution, or none at all, which resolving the head will say
    if installed != c.head_version:
        warnings.warn(
            f"{checkpoint.source}: its head {c.head} was trained with version {c.head_version}, not {installed}",
            DSparkWarning,
            stacklevel=4,
        )
