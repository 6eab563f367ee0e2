"""From a configuration to an engine: every part is resolved in the catalog."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dspark.config import EngineConfig
from dspark.engine.choices import estimator_for, may_be_checkpoint, settle
from dspark.engine.draft_cost import drafter_fingerprint, with_draft
from dspark.engine.engine import Engine
from dspark.engine.live_cost import LiveCost
from dspark.engine.parts import Parts
from dspark.errors import ConfigError, DSparkWarning
from dspark.plugins.catalog import Catalog
from dspark.plugins.kernels import choose_kernels
from dspark.plugins.kinds import Kind
from dspark.plugins.manager import PluginManager, load_plugins
from dspark.protocols import BuildContext, RoundObserver, Target
from dspark.sampling.draws import CounterDraws
from dspark.scheduling.cache import cached_profile
from dspark.scheduling.cost import CostProfile, measure
from dspark.types import DrawSource, Mode

PROBE_TEXT = "Once upon a time, in a small house by the sea, there lived an old woman who"


def build_engine(
    config: EngineConfig,
    *,
    target: Target | None = None,
    tokenizer: Any = None,
    cost: Any = None,
    observers: Sequence[RoundObserver] = (),
    plugins: PluginManager | None = None,
    extra_plugins: Mapping[str, object] | None = None,
    draws: DrawSource | None = None,
) -> Engine:
    """Resolve the components that ``config`` names and put an engine together.

    Args:
        target: a finished target; without one, ``config.target`` is built from ``config.target_config``.
        tokenizer: for text; None for the target's own, if it has one.
        cost: what a forward costs: ``auto`` (measured once for this machine and target, then cached), ``measure``, a
            ``CostProfile``, a path to one, a ``CostTable``, or None.
        observers: see every round, beside those that plugins make.
        plugins: a loaded manager; None loads plugins now.
        extra_plugins: name -> plugin object without an entry point.
        draws: where random decisions are taken; None for production's.

    Raises:
        ConfigError, PluginError, TargetError, CapacityError, CostTableError: naming what does not fit.
    """
    manager = plugins if plugins is not None else load_plugins(config, extra_plugins=extra_plugins)
    catalog = manager.catalog
    check_names(config, catalog)
    if target is None:
        target = catalog.build(Kind.TARGET, config.target, config.target_config)
    config = settle(config, manager, target)
    parts = build_parts(config, catalog, target, draws)
    engine = Engine(
        parts,
        config,
        tokenizer=tokenizer if tokenizer is not None else getattr(target, "tokenizer", None),
        observers=[*((type(o).__qualname__, o) for o in observers), *manager.make_observers(config)],
        on_stop=manager.engine_stopped,
    )
    engine.plugins = manager
    try:
        probe_drafter(parts, engine.tokenizer)
        price(engine, config, catalog, cost)
        manager.engine_started(engine)
    except BaseException:
        engine.close()
        raise
    return engine


def check_names(config: EngineConfig, catalog: Catalog) -> None:
    """Refuse an unknown component before the target is loaded, which can take minutes.

    Raises:
        UnknownComponentError: with the nearest name.
    """
    for kind, name in (
        (Kind.TARGET, config.target),
        (Kind.ESTIMATOR, config.estimator),
        (Kind.CALIBRATOR, config.calibrator),
        (Kind.SCHEDULER, config.scheduler),
        (Kind.GAMMA, config.gamma_policy),
        (Kind.VERIFIER, config.verifier),
    ):
        if name != "auto":
            catalog.resolve(kind, name)
    if config.drafter != "auto" and not may_be_checkpoint(config.drafter):
        catalog.resolve(Kind.DRAFTER, config.drafter)


def build_parts(config: EngineConfig, catalog: Catalog, target: Target, draws: DrawSource | None = None) -> Parts:
    """The components of an engine around a target."""
    context = BuildContext(
        target=target,
        vocab_size=target.vocab_size,
        gamma=config.gamma or 0,
        max_slots=config.max_slots,
        device=target.device,
        dtype=target.dtype,
    )
    kernels = choose_kernels(catalog, config.kernels, torch.device(target.device), target.dtype)
    drafter = catalog.build(Kind.DRAFTER, config.drafter, config.drafter_config, context)
    gamma = config.gamma
    if gamma is None:
        gamma = drafter.default_gamma if drafter.max_gamma is None else min(drafter.default_gamma, drafter.max_gamma)
    verifier_names = {mode: mode.value if _has_own_verifier(config, mode) else config.verifier for mode in Mode}
    deciding = {mode.value: catalog.resolve(Kind.VERIFIER, name) for mode, name in verifier_names.items()}
    keys = {mode: registration.key for mode, registration in deciding.items()}
    context = dataclasses.replace(context, gamma=gamma, drafter=drafter, extras={"verifiers": keys, "kernels": kernels})
    estimator = estimator_for(config, drafter)
    chosen = {
        "target": catalog.resolve(Kind.TARGET, config.target),
        "drafter": catalog.resolve(Kind.DRAFTER, config.drafter),
        "estimator": catalog.resolve(Kind.ESTIMATOR, estimator),
        "calibrator": catalog.resolve(Kind.CALIBRATOR, config.calibrator),
        "scheduler": catalog.resolve(Kind.SCHEDULER, config.scheduler),
        **deciding,
    }
    verifiers = {}
    for mode, name in verifier_names.items():
        settings = None if _has_own_verifier(config, mode) else config.verifier_config
        verifiers[mode] = catalog.build(Kind.VERIFIER, name, settings, context)
    return Parts(
        target=target,
        drafter=drafter,
        estimator=catalog.build(Kind.ESTIMATOR, estimator, config.estimator_config, context),
        calibrator=catalog.build(Kind.CALIBRATOR, config.calibrator, config.calibrator_config, context),
        scheduler=catalog.build(Kind.SCHEDULER, config.scheduler, config.scheduler_config, context),
        verifiers=verifiers,
        draws=draws if draws is not None else CounterDraws(target.device),
        gamma=gamma,
        fixed_gamma=config.fixed_gamma,
        count_margins=config.count_margins,
        names={kind: registration.key for kind, registration in chosen.items()},
        versions={kind: registration.version for kind, registration in chosen.items()},
        nested=tuple(context.nested),
        kernels=kernels,
    )


def _has_own_verifier(config: EngineConfig, mode: Mode) -> bool:
    """True where a mode is decided by the verifier of its name, not by the one that the config names for all."""
    return config.verifier == "auto" or mode is Mode.GREEDY


def probe_drafter(parts: Parts, tokenizer: Any) -> None:
    """Warn where a drafter that can probe itself on the target finds a likely fault (layout, tap layers, training)."""
    probe = getattr(parts.drafter, "probe", None)
    if probe is None or parts.gamma == 0:
        return
    ids = None if tokenizer is None else tokenizer(PROBE_TEXT)["input_ids"]
    for warning in probe(parts.target, ids).warnings:
        warnings.warn(f"drafter {parts.name('drafter')}: {warning}", DSparkWarning, stacklevel=3)


def price(engine: Engine, config: EngineConfig, catalog: Catalog, cost: Any) -> None:
    """Give an engine its cost table and, by that, its gamma policy.

    Raises:
        CostTableError, ConfigError: see :func:`find_cost`.
    """
    parts = engine.parts
    asked = config.gamma_policy
    chosen = None if asked == "auto" else catalog.resolve(Kind.GAMMA, asked)
    choosable = chosen is None and config.gamma is None
    adaptive = choosable or (chosen is not None and getattr(chosen.capabilities, "needs_cost", False))
    drafter = drafter_fingerprint(parts, config)
    found = find_cost(cost, parts, needed=chosen is not None and adaptive, drafter=drafter)
    if isinstance(found, CostProfile):
        found = found.of_drafter(drafter)
        if adaptive and parts.gamma and not found.draft:
            found = with_draft(
                found, parts, drafter, slots=config.max_slots, kept=isinstance(cost, str) and cost == "auto"
            )
        parts.cost = found.table()
        engine.live_cost = LiveCost(found) if config.refine_cost else None
    else:
        parts.cost = found
    plans = parts.scheduler.capabilities.needs_cost
    name = asked if asked != "auto" else "adaptive" if choosable and plans and parts.gamma and parts.cost else "static"
    context = BuildContext(
        target=parts.target,
        vocab_size=parts.target.vocab_size,
        gamma=parts.gamma,
        max_slots=config.max_slots,
        device=parts.target.device,
        dtype=parts.target.dtype,
        drafter=parts.drafter,
        extras={"prunes": plans},
    )
    parts.gamma_policy = catalog.build(Kind.GAMMA, name, config.gamma_policy_config or None, context)
    registration = catalog.resolve(Kind.GAMMA, name)
    parts.names["gamma_policy"], parts.versions["gamma_policy"] = registration.key, registration.version


def read_cost(cost: Any, parts: Parts) -> Any:
    """The cost table to plan with, see :func:`find_cost`."""
    found = find_cost(cost, parts)
    return found.table() if isinstance(found, CostProfile) else found


def find_cost(cost: Any, parts: Parts, *, needed: bool = False, drafter: Mapping[str, str] | None = None) -> Any:
    """What a forward costs, as a profile where it is one of measured times, else as a table.

    ``auto`` measures only for a scheduler that plans against a table, or where ``needed`` says that the gamma policy
    does; a kept profile with the times of ``drafter`` is taken before one without.

    Raises:
        CostTableError: measured on something else; the message names what differs.
        ConfigError: for what is no cost.
    """
    target = parts.target
    if isinstance(cost, str) and cost == "auto":
        wanted = parts.gamma and (needed or parts.scheduler.capabilities.needs_cost)
        cost = cached_profile(target, drafter=drafter) if wanted else None
    if cost is None:
        return None
    if isinstance(cost, str) and cost == "measure":
        cost = measure(target)
    elif isinstance(cost, (str, Path)):
        cost = CostProfile.load(Path(cost))
    if isinstance(cost, CostProfile):
        cost.check(target.fingerprint())
        return cost
    if not hasattr(cost, "flat"):
        raise ConfigError(f"cost: expected 'measure', a path, a CostProfile or a CostTable, got {type(cost).__name__}")
    return cost
