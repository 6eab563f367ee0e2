"""Every hook of dspark, in one file. This is the whole contract between dspark and a plugin.

A plugin is a module (or an instance of a class) that declares ``DSPARK_API = 1`` and implements some of these
functions, each marked with ``@hookimpl``. It is found through an entry point of group ``dspark``::

    [project.entry-points.dspark]
    my-plugin = "my_package.plugin"

Hooks only *build*. They run while dspark loads, while an engine is put together, and when it starts and stops; never
within a decoding round, which calls the plain objects that were built. An implementation may leave out arguments that
it does not need. Hook wrappers are refused.

What a hook raises is attributed to the plugin's distribution and version. It fails the build only where the
configuration names the plugin; else there is one warning, a line in ``dspark plugins``, and the plugin is left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dspark.config import EngineConfig
    from dspark.plugins.kinds import Register
    from dspark.protocols import RoundObserver

PROJECT = "dspark"
ENTRY_POINT_GROUP = "dspark"

DSPARK_API = 1
"""Version of this file's contract. A plugin declares the number that it was written for, as a literal."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


# --- registration: called once a load, in the order of this file -----------------------------------------------------
#
# ``register(name, factory, *, config, capabilities, aliases=())`` offers one component:
#   name          lower case letters, digits, ".", "_", "-"; the component is always reachable as ``distribution/name``
#   factory       ``factory(config, context)`` -> component, or "module:function", imported when it is first built
#   config        a dataclass, None for a component without settings, or "module:Class" / a function without arguments
#                 that returns the dataclass, for modules that are slow to import
#   capabilities  the kind's class of ``dspark.capabilities``: what the build may rely on
#   aliases       further names, under the rules of ``name``


@hookspec
def dspark_register_targets(register: Register) -> None:
    """Offer targets: models whose law is decoded.

    Called once, when plugins load. Each factory builds a ``dspark.protocols.Target``; its ``context`` has no target.
    ``EngineConfig.target`` names one; ``target_config`` holds its settings.

    Args:
        register: ``register(name, factory, *, config, capabilities: TargetCapabilities, aliases=())``.

    Returns:
        Nothing.
    """


@hookspec
def dspark_register_drafters(register: Register) -> None:
    """Offer drafters: what proposes gamma tokens a request.

    Called once, when plugins load. Each factory builds a ``dspark.protocols.Drafter``; ``context.target`` is the built
    target, ``context.resolve(kind, name, config)`` builds another component, such as a sequential head.

    Args:
        register: ``register(name, factory, *, config, capabilities: DrafterCapabilities, aliases=())``.

    Returns:
        Nothing.
    """


@hookspec
def dspark_register_sequential_heads(register: Register) -> None:
    """Offer sequential heads: the bias B_k(x_0, x_<k, .) added to a block's base logits, left to right.

    Called once, when plugins load. Each factory builds a ``dspark.protocols.SequentialHead``, when a drafter asks.

    Args:
        register: ``register(name, factory, *, config, capabilities: HeadCapabilities, aliases=())``.

    Returns:
        Nothing.
    """


@hookspec
def dspark_register_confidence_estimators(register: Register) -> None:
    """Offer confidence estimators: c_k, the probability that x_k is accepted once x_1..x_{k-1} are.

    Called once, when plugins load. Each factory builds a ``dspark.protocols.ConfidenceEstimator``;
    ``context.drafter`` is the built drafter. An estimator that reads x_k declares ``anticipates``.

    Args:
        register: ``register(name, factory, *, config, capabilities: EstimatorCapabilities, aliases=())``.

    Returns:
        Nothing.
    """


@hookspec
def dspark_register_calibrators(register: Register) -> None:
    """Offer calibrators: c -> calibrated c, position by position.

    Called once, when plugins load. Each factory builds a ``dspark.protocols.Calibrator``.

    Args:
        register: ``register(name, factory, *, config, capabilities: CalibratorCapabilities, aliases=())``.

    Returns:
        Nothing.
    """


@hookspec
def dspark_register_schedulers(register: Register) -> None:
    """Offer schedulers: how long a prefix of each draft is verified.

    Called once, when plugins load. Each factory builds a ``dspark.protocols.VerifyScheduler``. A scheduler that lets
    x_k decide whether x_k is verified declares ``anticipates``.

    Args:
        register: ``register(name, factory, *, config, capabilities: SchedulerCapabilities, aliases=())``.

    Returns:
        Nothing.
    """


@hookspec
def dspark_register_gamma_policies(register: Register) -> None:
    """Offer gamma policies: how many tokens each request drafts in the coming round, 0 included.

    Called once, when plugins load. Each factory builds a ``dspark.protocols.GammaPolicy``. It is asked before anything
    of the round is drawn, so that whatever it decides is exact.

    Args:
        register: ``register(name, factory, *, config, capabilities: GammaCapabilities, aliases=())``.

    Returns:
        Nothing.
    """


@hookspec
def dspark_register_verifiers(register: Register) -> None:
    """Offer verifiers: which drafts are accepted, and which token follows them.

    Called once, when plugins load. Each factory builds a ``dspark.protocols.Verifier``, which takes every random
    decision from ``VerifyInput.draws``.

    Args:
        register: ``register(name, factory, *, config, capabilities: VerifierCapabilities, aliases=())``.

    Returns:
        Nothing.
    """


@hookspec
def dspark_register_kernels(register: Register) -> None:
    """Offer kernels: callables for an operation, on the devices and dtypes that they declare.

    Called once, when plugins load. Each factory builds a callable; it is resolved once, before the first round. One for
    ``bias_sample`` or ``reject_sample`` is named ``operation.variant`` and runs where ``EngineConfig.kernels`` says so.

    Args:
        register: ``register(name, factory, *, config, capabilities: KernelCapabilities, aliases=())``.

    Returns:
        Nothing.
    """


@hookspec
def dspark_register_presets(register: Register) -> None:
    """Offer presets: engine settings that fit a target.

    Called once, when plugins load. Each factory builds a mapping of ``EngineConfig`` settings. One that names a hub id
    can pin it: ``{"drafter": "acme/drafter", "drafter_config": {"revision": "8f1c2d3"}}``.

    Args:
        register: ``register(name, factory, *, config, capabilities: PresetCapabilities, aliases=())``.

    Returns:
        Nothing.
    """


# --- front ends ------------------------------------------------------------------------------------------------------


@hookspec
def dspark_register_commands(cli: Any) -> None:
    """Add commands to the ``dspark`` command line.

    Called once, when the command line starts. A name that is taken is refused, and none of the plugin's commands stay.

    Args:
        cli: the ``typer.Typer`` application; ``@cli.command()`` and ``cli.add_typer(...)`` add to it.

    Returns:
        Nothing.
    """


@hookspec
def dspark_register_routes(app: Any) -> None:
    """Add routes to the HTTP server.

    Called once, when the server is made, before it accepts a connection.

    Args:
        app: the server's application object.

    Returns:
        Nothing.
    """


# --- engine ----------------------------------------------------------------------------------------------------------


@hookspec(firstresult=True)
def dspark_load_checkpoint(source: str, config: EngineConfig | None) -> Any:
    """Load a drafter checkpoint of a format that the plugin knows.

    Called when a drafter is given by a folder or hub id. Plugins are asked one after the other, the one loaded
    last first; the first answer that is not None is taken and nobody else is asked. A source of a known format that is
    incomplete or misshapen is a ``CheckpointError``, which ends the search.

    Args:
        source: local folder or hub id, as the user gave it.
        config: configuration of the engine being built, or None outside one.

    Returns:
        What the drafter is built from, or None where the source is not of the plugin's format.
    """


@hookspec
def dspark_make_observers(config: EngineConfig) -> Sequence[RoundObserver]:
    """Make observers, which see every finished round.

    Called once for each engine, while it is built. An observer that raises later is reported once and dropped.

    Args:
        config: configuration of the engine being built.

    Returns:
        A list of ``dspark.protocols.RoundObserver``; empty for none.
    """
    return ()


@hookspec
def dspark_engine_started(engine: Any) -> None:
    """An engine is complete and about to take its first request.

    Called once for each engine. What the hook raises reaches the caller only where the config names the plugin.

    Args:
        engine: the engine. Read it; do not step it.

    Returns:
        Nothing.
    """


@hookspec
def dspark_engine_stopped(engine: Any) -> None:
    """An engine was shut down; its requests are finished or aborted.

    Called once for each engine that was started. What the hook raises is a warning, never an error.

    Args:
        engine: the engine, no longer stepping.

    Returns:
        Nothing.
    """
