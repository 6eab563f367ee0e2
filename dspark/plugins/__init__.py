"""The plugin system: hooks, loading, and the catalog of components.

A plugin needs ``hookimpl`` and the capabilities of ``dspark.capabilities``; an embedding program ``load_plugins``.
"""

from dspark.plugins.catalog import Catalog, Conflict
from dspark.plugins.hookspecs import DSPARK_API, hookimpl, hookspec
from dspark.plugins.kinds import Kind, Register
from dspark.plugins.manager import PluginManager, load_plugins
from dspark.plugins.records import PluginRecord, PluginWarning
from dspark.plugins.registration import Registration

__all__ = [
    "DSPARK_API",
    "Catalog",
    "Conflict",
    "Kind",
    "PluginManager",
    "PluginRecord",
    "PluginWarning",
    "Register",
    "Registration",
    "hookimpl",
    "hookspec",
    "load_plugins",
]
