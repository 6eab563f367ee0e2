"""Registers the estimator with dspark. Every dspark command imports this module, so torch is left to the others."""

from collections.abc import Callable

from dspark.capabilities import EstimatorCapabilities
from dspark.plugins import hookimpl

DSPARK_API = 1


@hookimpl
def dspark_register_confidence_estimators(register: Callable[..., None]) -> None:
    """Offer ``dspark-estimator-online/logistic``."""
    register(
        "logistic",
        "dspark_estimator_online.estimator:build",
        config="dspark_estimator_online.estimator:LogisticConfig",
        capabilities=EstimatorCapabilities(shared_state=True),
    )
