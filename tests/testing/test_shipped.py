"""Everything that ships passes the kit: with one seed here, with twenty where slow tests run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dspark.ops import reference
from dspark.plugins import Kind
from dspark.testing import (
    CalibratorSuite,
    CountingObserver,
    DrafterSuite,
    EstimatorSuite,
    GammaPolicySuite,
    KernelSuite,
    ObserverSuite,
    SchedulerSuite,
    SequentialHeadSuite,
    TargetSuite,
    VerifierSuite,
    run_checks,
)
from dspark.testing.contracts import checks_of
from dspark.testing.pipeline import builtin_catalog
from dspark.testing.toys import random_table
from dspark.types import Mode
from tests.drafters.eagle import toy_eagle_checkpoint
from tests.drafters.stepwise import toy_model
from tests.drafters.toys import FeatureTarget, toy_checkpoint
from tests.gallery.base import plugin

torch.set_num_threads(1)
GOLDEN = Path(__file__).parents[1] / "golden"


class Trained(DrafterSuite):
    """A checkpoint of a toy, made for each vocabulary."""

    def target(self, vocab_size: int) -> Any:
        table = random_table(vocab_size + 1, vocab_size, vocab_size, seed=self.seed + 1, scale=1.0)
        return FeatureTarget(table, mix=0.4)

    def source(self, vocab: int) -> Any:
        """Settings that say what is run, for a target of ``vocab`` tokens."""
        made = toy_checkpoint("markov", vocab=vocab, gamma=self.gamma, seed=self.seed)
        return {"checkpoint": made, "dtype": "float64"}

    def defaults(self) -> Any:
        return self.source(self.vocab_size)

    def drafter(self, target: Any, gamma: int | None = None) -> Any:
        self.settings = self.source(target.vocab_size)
        try:
            return super().drafter(target, gamma)
        finally:
            self.settings = type(self).settings


class Eagle(Trained):
    """EAGLE-3's single layer."""

    def source(self, vocab: int) -> Any:
        made = toy_eagle_checkpoint("deepspec", vocab=vocab, gamma=self.gamma, seed=self.seed)
        return {"checkpoint": made, "dtype": "float64"}


class SmallModel(Trained):
    """A second toy target that drafts."""

    def source(self, vocab: int) -> Any:
        return {"model": toy_model(vocab, seed=5 + self.seed)}


class Linear(EstimatorSuite):
    """The confidence head of a drafter's checkpoint, here of random weights."""

    def build(self, **settings: Any) -> Any:
        from types import SimpleNamespace

        rng = np.random.default_rng(self.seed)
        weights = {"weight": torch.from_numpy(rng.normal(size=(1, self.hidden_size + self.rank))), "bias": None}
        drafter = SimpleNamespace(confidence_weights=weights, checkpoint=SimpleNamespace(source=""))
        from dataclasses import replace

        context = replace(self.context(), drafter=drafter, target=FeatureTarget(random_table(6, 5, 5)))
        return self.catalog.build(self.kind, self.component, settings, context)


SUITES: list[tuple[Any, str, dict[str, Any]]] = [
    *((SequentialHeadSuite, n, {"bad_settings": [{"rank": -1}]}) for n in ("none", "markov", "gated", "rnn")),
    (DrafterSuite, "none", {}),
    (DrafterSuite, "ngram", {"settings": {"min_n": 1}, "bad_settings": [{"min_n": 0}, {"max_n": "x"}]}),
    (Trained, "dspark", {"bad_settings": [{"candidates": 0}, {"dtype": "int8"}]}),
    (Eagle, "eagle3", {"bad_settings": [{"dtype": "int8"}]}),
    (SmallModel, "draft-model", {"bad_settings": [{"gamma": 0}]}),
    (EstimatorSuite, "constant", {"bad_settings": [{"probs": [1.5]}]}),
    (EstimatorSuite, "online", {"bad_settings": [{"memory": 0}, {"explore_every": -1}]}),
    (Linear, "linear", {"bad_settings": [{"drift_tolerance": 2}]}),
    (CalibratorSuite, "identity", {}),
    (CalibratorSuite, "sts", {"settings": {"temperatures": [1.5, 0.7, 2, 1]}, "bad_settings": [{"temperatures": [0]}]}),
    *((SchedulerSuite, n, {}) for n in ("causal", "lookahead", "lagged", "global", "off")),
    (SchedulerSuite, "fixed", {"bad_settings": [{"length": -1}]}),
    (SchedulerSuite, "threshold", {"bad_settings": [{"threshold": 2}]}),
    *((GammaPolicySuite, n, {}) for n in ("static", "adaptive")),
    (VerifierSuite, "greedy", {"mode": Mode.GREEDY}),
    (VerifierSuite, "rejection", {}),
    (VerifierSuite, "coupled", {}),
    (
        TargetSuite,
        "hf",
        {"settings": {"model": str(GOLDEN / "target_qwen3_tiny"), "dtype": "float32", "device": "cpu"}},
    ),
]


def suite(base: Any, name: str, own: dict[str, Any], seed: int) -> Any:
    return type(base.__name__, (base,), {**own, "component": f"dspark/{name}", "seed": seed})()


def checks() -> list[Any]:
    found = []
    for base, name, own in SUITES:
        made = suite(base, name, own, 0)
        found += [pytest.param(getattr(made, c), id=f"{base.kind}-{name}-{c}") for c, _ in checks_of(type(made))]
    return found


@pytest.mark.filterwarnings("ignore:linear. the drafter has no calibration")
@pytest.mark.parametrize("check", checks())
def test_what_ships_passes(check: Callable[[], None]) -> None:
    check()


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(3600)  # half a minute of processor time for a drafter: minutes beside other work
@pytest.mark.filterwarnings("ignore:linear. the drafter has no calibration")
@pytest.mark.parametrize("seed", range(1, 20))
@pytest.mark.parametrize(("base", "name", "own"), [pytest.param(*s, id=f"{s[0].kind}-{s[1]}") for s in SUITES])
def test_what_ships_passes_with_every_seed(base: Any, name: str, own: dict[str, Any], seed: int) -> None:
    assert [str(o.violation) for o in run_checks(suite(base, name, own, seed)) if o.violation] == []


def test_every_component_that_ships_is_here() -> None:
    tested = {(base.kind, name) for base, name, _ in SUITES}
    shipped = {(r.kind, r.name) for r in builtin_catalog().registrations if r.dist == "dspark"}
    assert {(k, n) for k, n in shipped if k not in (Kind.PRESET, Kind.KERNEL)} == tested


# The plain operations as kernels of their own: the kernel suite has no false alarms where nothing is fused.

OPERATIONS = {
    "softmax_rows": reference.softmax_rows,
    "argmax_rows": reference.argmax_rows,
    "normalised": lambda scores: reference.normalised(torch.softmax(scores.double(), -1)),
}


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=[pytest.mark.slow, pytest.mark.soak]) for n in range(1, 20))]
)
@pytest.mark.parametrize("name", OPERATIONS)
def test_plain_operations_pass_as_kernels(name: str, seed: int) -> None:
    from dspark.capabilities import KernelCapabilities

    function = OPERATIONS[name]
    made = plugin(Kind.KERNEL, lambda config, context: lambda *args: function(*args), None, KernelCapabilities())
    own = {"component": "ops/part", "plugins": {"ops": made}, "reference": staticmethod(function), "seed": seed}
    outcomes = run_checks(type("Suite", (KernelSuite,), own))
    assert [str(o.violation) for o in outcomes if o.violation] == []


class TestCountingObserver(ObserverSuite):
    """By subclassing, as a third party would."""

    component = "watch"

    def observers(self) -> Any:
        return [CountingObserver()]

    test_every_build_is_new = None  # type: ignore[assignment]
