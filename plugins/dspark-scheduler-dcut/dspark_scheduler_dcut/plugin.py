"""Registers the scheduler with dspark. Every dspark command imports this module."""

from collections.abc import Callable

from dspark.capabilities import SchedulerCapabilities
from dspark.plugins import hookimpl

DSPARK_API = 1


@hookimpl
def dspark_register_schedulers(register: Callable[..., None]) -> None:
    """Offer ``dspark-scheduler-dcut/dcut``."""
    register(
        "dcut",
        "dspark_scheduler_dcut.scheduler:build",
        config="dspark_scheduler_dcut.scheduler:DCutConfig",
        capabilities=SchedulerCapabilities(anticipates=False, needs_cost=False),
    )
