"""What observers are held to."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from dspark.config import EngineConfig, SamplingParams
from dspark.errors import DSparkError
from dspark.plugins import PluginManager
from dspark.plugins.kinds import canonical, protocol_members
from dspark.protocols import RoundObserver
from dspark.testing.contracts import Seen, contract
from dspark.testing.materials import BlockMaker, make_batch, make_record, random_tokens
from dspark.testing.pipeline import decode, make_engine, make_parts
from dspark.testing.suite import Suite
from dspark.testing.watch import generator_states
from dspark.types import RoundRecord


class ObserverSuite(Suite):
    """Holds the observers of a plugin to ``dspark.protocols.RoundObserver``.

    Attributes:
        component: the plugin's distribution (its observers have no names of their own).
        config: of the engine that they are made for.
    """

    config: EngineConfig = EngineConfig()

    @property
    def subject(self) -> str:
        """For messages."""
        return f"an observer of {self.component}"

    def observers(self) -> Sequence[Any]:
        """New observers, as an engine gets them."""
        manager = PluginManager()
        for name, plugin in self.plugins.items():
            manager.register(plugin, name)
        manager.load(self.config)
        wanted = canonical(self.component)
        found = [o for source, o in manager.make_observers(self.config) if source.split(" ")[0] == wanted]
        if not found:
            raise Seen(f"dspark_make_observers of {wanted!r} made no observer")
        return found

    @contract("dspark_make_observers returns a list of objects with on_round and on_finish")
    def test_it_builds(self) -> None:
        for observer in self.observers():
            missing = [n for n in protocol_members(RoundObserver) if not callable(getattr(observer, n, None))]
            if missing:
                raise Seen(f"{type(observer).__name__} lacks {', '.join(missing)}")

    def records(self) -> list[RoundRecord]:
        """A drafted round, a plain step, one in which nothing was accepted, and one with a failed request."""
        rng = self.random("records")
        batch = make_batch(rng, 2, 3, 5)
        block = BlockMaker(5, seed=self.seed).block(batch, random_tokens(rng, 2, 3, 5))
        return [
            make_record(batch, block, (1, 3)),
            make_record(None, None, (), index=1),
            make_record(batch, block, (0, 0), index=2),
            make_record(batch, block, (2, 2), index=3, failed=1),
        ]

    @contract("it takes every record and every reason to finish")
    def test_every_record(self) -> None:
        for observer in self.observers():
            for record in self.records():
                self.case = {"record": f"step {record.index}", "drafted": record.draft is not None}
                observer.on_round(record)
            request = make_batch(self.random("finish"), 1, 1, 5).requests[0]
            for reason in ("stop", "length", "abort", "error"):
                self.case = {"reason": reason}
                observer.on_finish(request, reason)

    @contract("it changes nothing of what it sees")
    def test_records_stay(self) -> None:
        for observer in self.observers():
            for record in self.records():
                kept = copy.deepcopy(record)
                observer.on_round(record)
                if record.draft is None or kept.draft is None:
                    continue
                same = np.array_equal(record.draft.token_ids.numpy(), kept.draft.token_ids.numpy())
                if not same or not np.array_equal(record.draft.lens, kept.draft.lens):
                    raise Seen("it wrote to the draft", step=record.index)
                if dict(record.seconds) != dict(kept.seconds):
                    raise Seen(f"it wrote to seconds: {dict(record.seconds)}", step=record.index)

    @contract("an engine emits the same tokens with it as without it, and it is not dropped")
    def test_engine_goes_on(self) -> None:
        from dspark.sampling.draws import CounterDraws

        requests = [
            ((0, 1, 2, 0), SamplingParams(temperature=1.0, max_tokens=6, request_key=1)),
            ((2, 1), SamplingParams(max_tokens=6)),
        ]
        before = generator_states()
        outputs = []
        for observers in ((), self.observers()):
            engine = make_engine(make_parts(CounterDraws()), slots=2, observers=observers)
            outputs.append(decode(engine, requests))
        if outputs[0] != outputs[1]:
            raise Seen(f"{outputs[1]} with it, {outputs[0]} without", prompts=[p for p, _ in requests])
        if generator_states() != before:
            raise Seen("a global generator (random, numpy.random or torch) has advanced")

    @contract("several engines have several observers: making them again makes new ones")
    def test_every_build_is_new(self) -> None:
        manager = PluginManager()
        for name, plugin in self.plugins.items():
            manager.register(plugin, name)
        try:
            manager.load(self.config)
        except DSparkError as err:
            raise Seen(str(err)) from err
        first, second = ([id(o) for _, o in made] for made in _twice(manager, self.config))
        if set(first) & set(second):
            raise Seen("the second engine got an observer of the first")


def _twice(manager: PluginManager, config: EngineConfig) -> tuple[Any, Any]:
    return manager.make_observers(config), manager.make_observers(config)
