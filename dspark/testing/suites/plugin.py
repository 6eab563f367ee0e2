"""What a plugin as a whole is held to: that it loads, quickly and alone, and that nothing of it is in the way."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from typing import Any

from dspark.plugins import PluginManager, PluginRecord, PluginWarning
from dspark.plugins.kinds import canonical
from dspark.testing.contracts import NotApplicable, Seen, contract
from dspark.testing.suite import Suite

_PROBE = """
import json, sys, time
from dspark.plugins.discovery import find_candidates
from dspark.plugins import PluginManager, load_plugins
import warnings
warnings.simplefilter("ignore")
(found,) = [c for c in find_candidates() if c.dist == sys.argv[1]][:1]
import numpy
before = set(sys.modules)
began = time.process_time()
found.load()
seconds = time.process_time() - began
print(json.dumps({"seconds": seconds, "heavy": sorted({"torch", "transformers"} & (set(sys.modules) - before))}))
"""


class PluginSuite(Suite):
    """Holds a whole plugin to the rules of loading.

    Attributes:
        component: its distribution.
        load_seconds: processor time that importing its entry point may take, torch left out.
        light: the entry point's module imports neither torch nor transformers, which ``dspark --help`` would wait for.
    """

    load_seconds: float = 0.5
    light: bool = True

    @property
    def subject(self) -> str:
        """For messages."""
        return f"plugin {self.component}"

    def load(self) -> tuple[PluginManager, PluginRecord, list[str]]:
        """A manager, the plugin's record, and the warnings that name it."""
        manager = PluginManager()
        for name, plugin in self.plugins.items():
            manager.register(plugin, name)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            manager.load()
        wanted = canonical(self.component)
        found = [r for r in manager.records if r.distribution == wanted]
        if not found:
            known = ", ".join(r.distribution for r in manager.records)
            raise Seen(f"no plugin of distribution {wanted!r} is installed; there are: {known}")
        said = [str(w.message) for w in caught if issubclass(w.category, PluginWarning) and wanted in str(w.message)]
        return manager, found[0], said

    @contract("it loads: it can be imported, declares DSPARK_API, marks and spells its hooks, and registers")
    def test_it_loads(self) -> None:
        _, record, said = self.load()
        if record.status in ("error", "disabled"):
            raise Seen(record.error, warnings=said)

    @contract("its names are its own: none is reserved or offered by another distribution")
    def test_names(self) -> None:
        _, record, _ = self.load()
        if record.status == "conflict":
            raise Seen(record.error)

    @contract("it offers something: a component or a hook")
    def test_it_offers_something(self) -> None:
        _, record, _ = self.load()
        if not record.hooks:
            raise Seen("it implements no hook")

    @contract("settings classes of its components can be read, and references to factories lead somewhere")
    def test_references(self) -> None:
        _, record, _ = self.load()
        for entry in record.components:
            self.case = {"component": entry.key}
            entry.load_config()
            entry.load_factory()

    @contract("importing it is quick and pulls in neither torch nor transformers: every command waits for it")
    def test_it_is_light(self) -> None:
        if canonical(self.component) in {canonical(n) for n in self.plugins}:
            raise NotApplicable("it was handed over as an object; there is nothing to import")
        seen = self._probe()
        if self.light and seen["heavy"]:
            raise Seen(
                f"importing its entry point imports {' and '.join(seen['heavy'])}: import them where they are used"
            )
        if seen["seconds"] > self.load_seconds:
            raise Seen(f"it took {seen['seconds']:.2f} s of processor time, more than {self.load_seconds} s")

    def _probe(self) -> dict[str, Any]:
        command = [sys.executable, "-c", _PROBE, canonical(self.component)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Seen(f"it can't be imported in a fresh interpreter: {done.stderr.strip().splitlines()[-1:]}")
        seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return seen
