"""Registers the head with dspark. Every dspark command imports this module, so torch is left to ``head``."""

from collections.abc import Callable

from dspark.capabilities import HeadCapabilities
from dspark.plugins import hookimpl

DSPARK_API = 1


@hookimpl
def dspark_register_sequential_heads(register: Callable[..., None]) -> None:
    """Offer ``dspark-head-conv/conv``."""
    register(
        "conv",
        "dspark_head_conv.head:build",
        config="dspark_head_conv.head:ConvConfig",
        capabilities=HeadCapabilities(stateful=True),
    )
