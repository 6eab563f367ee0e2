"""Registers the drafter with dspark. Every dspark command imports this module, so torch is left to ``drafter``."""

from collections.abc import Callable

from dspark.capabilities import DrafterCapabilities
from dspark.plugins import hookimpl

DSPARK_API = 1


@hookimpl
def dspark_register_drafters(register: Callable[..., None]) -> None:
    """Offer ``dspark-drafter-suffix/suffix``."""
    register(
        "suffix",
        "dspark_drafter_suffix.drafter:build",
        config="dspark_drafter_suffix.drafter:SuffixConfig",
        capabilities=DrafterCapabilities(point_mass=False),
    )
