"""What all suites share: the component under test, and checks of how it is registered and built."""

from __future__ import annotations

import inspect
import time
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from dspark.errors import DSparkError
from dspark.plugins import Catalog, Kind, PluginManager, PluginWarning, Registration
from dspark.protocols import BuildContext
from dspark.testing.contracts import NotApplicable, Seen, checks_of, contract

if TYPE_CHECKING:
    import numpy as np

_CATALOGS: dict[tuple[tuple[str, int], ...], tuple[Catalog, Mapping[str, object]]] = {}


def load_catalog(plugins: Mapping[str, object]) -> Catalog:
    """The catalog of installed plugins and of ``plugins`` (name -> plugin object), which need not be installed.

    Raises:
        PluginError: one of ``plugins`` is broken.
    """
    key = tuple(sorted((name, id(plugin)) for name, plugin in plugins.items()))
    if key not in _CATALOGS:
        manager = PluginManager()
        for name, plugin in plugins.items():
            manager.register(plugin, name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PluginWarning)  # other plugins of the environment are not under test
            _CATALOGS[key] = manager.load(), plugins  # the objects are kept, so that their ids stay theirs
    return _CATALOGS[key][0]


class Suite:
    """Base of all suites.

    Attributes:
        plugins: plugins that are not installed, name -> plugin object.
        seed: of every random input; ``pytest --dspark-seeds N`` runs seeds 0 to N - 1.
        case: what a check is trying, for messages.
    """

    component: str = ""
    plugins: Mapping[str, object] = {}
    seed: int = 0
    case: Mapping[str, Any] = {}

    @property
    def subject(self) -> str:
        """What is under test, for messages."""
        return self.component

    @property
    def catalog(self) -> Catalog:
        """Everything that is registered."""
        return load_catalog(self.plugins)

    def random(self, purpose: str = "") -> np.random.Generator:
        """Random inputs: a function of the seed and ``purpose``."""
        import numpy as np

        return np.random.default_rng([self.seed, zlib.crc32(purpose.encode())])


class ComponentSuite(Suite):
    """Base of the suites of registered components. Set class attributes; override what a component needs otherwise.

    Attributes:
        component: its registered name, ``distribution/name``.
        settings: settings to build it with.
        bad_settings: settings that it has to refuse, each with an error that names the setting at fault.
        build_seconds: what building it for a toy may take.
    """

    kind: ClassVar[Kind]
    settings: Mapping[str, Any] = {}
    bad_settings: Sequence[Mapping[str, Any]] = ()
    build_seconds: float = 2.0

    @property
    def subject(self) -> str:
        """For messages: ``sequential head acme/lstm``."""
        return f"{self.kind.label} {self.component}"

    @property
    def registration(self) -> Registration:
        """The component's."""
        return self.catalog.resolve(self.kind, self.component)

    def context(self) -> BuildContext:
        """What the factory may use."""
        import torch

        return BuildContext(vocab_size=5, gamma=3, max_slots=4, device=torch.device("cpu"), dtype=torch.float64)

    def defaults(self) -> Mapping[str, Any]:
        """Settings that the kind's user gives, before ``settings``."""
        return {}

    def build(self, **settings: Any) -> Any:
        """A new component, with ``settings`` over the suite's."""
        values = {**self.defaults(), **self.settings, **settings}
        return self.catalog.build(self.kind, self.component, values, self.context())

    @contract("it is registered under its name, and its factory builds what its protocol asks for")
    def test_it_builds(self) -> None:
        if not self.component:
            raise Seen("the suite names no component: set `component = 'distribution/name'`")
        self.build()

    @contract("building it takes little time: what is slow belongs to first use, or to the target")
    def test_it_builds_quickly(self) -> None:
        self.build()  # imports, which other components share
        began = time.process_time()
        self.build()
        seconds = time.process_time() - began
        if seconds > self.build_seconds:
            raise Seen(f"building took {seconds:.2f} s of processor time, more than {self.build_seconds} s")

    @contract("every build makes a new object: two engines share no state")
    def test_every_build_is_new(self) -> None:
        first = self.build()
        if first is self.build() and not inspect.isroutine(first):  # a function has no state to share
            raise Seen("the factory returned the same object twice")

    @contract("a setting that does not exist is refused by name")
    def test_unknown_settings_are_refused(self) -> None:
        try:
            self.build(no_such_setting=1)
        except DSparkError as err:
            if "no_such_setting" not in str(err):
                raise Seen(f"the error does not name the setting: {err}") from err
        else:
            raise Seen("no_such_setting = 1 was accepted", settings={"no_such_setting": 1})

    @contract("a setting that can't be is refused with an error of dspark.errors that names it")
    def test_bad_settings_are_refused(self) -> None:
        if not self.bad_settings:
            raise NotApplicable("the suite lists no bad_settings")
        for bad in self.bad_settings:
            try:
                self.build(**bad)
            except DSparkError as err:
                if not any(name in str(err) for name in bad):
                    raise Seen(f"the error names none of {', '.join(bad)}: {err}", settings=dict(bad)) from err
            else:
                raise Seen("they were accepted", settings=dict(bad))


def parametrize_checks(
    suite: type[Suite], component: str | Sequence[str] = "", *, seeds: int | None = None, **attributes: Any
) -> Callable[[Any], Any]:
    """Run a test function once a check: ``@parametrize_checks(SchedulerSuite, "acme/quick")``, ``def test(check):
    check()``.

    Args:
        suite: the suite.
        component: one name, or several.
        seeds: how many seeds; None for the suite's own one.
        attributes: further class attributes of the suite.
    """
    import pytest

    names = [component] if isinstance(component, str) else list(component)
    cases = []
    for name in names:
        for seed in range(seeds) if seeds is not None else (suite.seed,):
            own = {**attributes, "component": name or suite.component, "seed": seed}
            made = type(suite.__name__, (suite,), own)()
            label = f"{name or suite.component}-" + (f"{seed}-" if seeds is not None else "")
            cases += [pytest.param(getattr(made, check), id=label + check) for check, _ in checks_of(type(made))]
    return pytest.mark.parametrize("check", cases)
