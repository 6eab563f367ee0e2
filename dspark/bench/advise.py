"""Is drafting worth it here, with which gamma and scheduler, at which concurrency: predicted, and measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dspark.bench.load import Closed
from dspark.bench.simulation import Point, Policy, World, replay

THRESHOLD = 0.04
"""Gain over plain decoding from which drafting counts as worth it: the guard's own threshold."""
SCHEDULERS = ("fixed", "causal", "lookahead")
CLOSE = 0.01
"""Gains closer than this are the same: the simpler policy is taken, which comes first."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What is best for one concurrency.

    Attributes:
        concurrency: requests at once.
        plain: predicted for plain decoding.
        best: predicted for the best policy that drafts.
        adaptive: predicted for gamma chosen at run time, which needs no advice.
        bound: predicted where only what will be accepted is verified, at the gamma of ``best``.
        measured: tokens a second by ``plain``, ``advised`` and ``auto``, where they were run.
    """

    concurrency: int
    plain: Point
    best: Point
    adaptive: Point
    bound: Point
    measured: dict[str, float] = field(default_factory=dict)

    @property
    def gain(self) -> float:
        """Predicted throughput over plain decoding, minus 1."""
        return self.best.throughput / self.plain.throughput - 1.0

    @property
    def measured_gain(self) -> float | None:
        """Measured throughput of what is advised over plain decoding, minus 1; None where nothing was run."""
        if "plain" not in self.measured or "advised" not in self.measured:
            return None
        return self.measured["advised"] / self.measured["plain"] - 1.0

    def worth(self, threshold: float = THRESHOLD) -> bool:
        """Whether drafting gains the threshold at least."""
        return self.gain >= threshold

    def engine_settings(self, threshold: float = THRESHOLD) -> dict[str, Any]:
        """Fields of ``EngineConfig`` that do what is advised."""
        if not self.worth(threshold):
            return {"drafter": "none"}
        policy = self.best.policy
        return {"scheduler": policy.scheduler, "gamma": policy.gamma, "gamma_policy": "static"}

    def sentence(self, threshold: float = THRESHOLD) -> str:
        """The advice in words, with its numbers."""
        plain, best, policy = self.plain.throughput, self.best.throughput, self.best.policy
        users = f"{self.concurrency} request{'s' if self.concurrency > 1 else ''} at once"
        what = f"gamma {policy.gamma}, scheduler {policy.scheduler}"
        if self.worth(threshold):
            text = f"{users}: draft, {what}: {best:.1f} tokens/s against {plain:.1f}, {100 * self.gain:+.1f} %"
        else:
            text = (
                f"{users}: do not draft: the best that it gives is {best:.1f} tokens/s ({what}) against {plain:.1f} of "
                f"plain decoding, {100 * self.gain:+.1f} %, under the {100 * threshold:.0f} % that it should gain"
            )
        if self.measured_gain is not None:
            text += f"; measured {self.measured['advised']:.1f} against {self.measured['plain']:.1f}"
            text += f", {100 * self.measured_gain:+.1f} %"
        return text

    def as_dict(self, threshold: float = THRESHOLD) -> dict[str, Any]:
        """For JSON."""
        points = {name: getattr(self, name).as_dict() for name in ("plain", "best", "adaptive", "bound")}
        return {
            "concurrency": self.concurrency,
            "worth": self.worth(threshold),
            "gain": self.gain,
            "measured": self.measured,
            "measured_gain": self.measured_gain,
            "settings": self.engine_settings(threshold),
            "sentence": self.sentence(threshold),
            **points,
        }


def advise(
    world: World,
    concurrencies: Sequence[int],
    *,
    gammas: Sequence[int] = (),
    schedulers: Sequence[str] = SCHEDULERS,
    threshold: float = THRESHOLD,
) -> list[Advice]:
    """Replay every gamma and scheduler at each concurrency.

    Args:
        world: the sample of acceptance, and what forwards and drafts cost here.
        concurrencies: requests at once.
        gammas: to try; all up to the trace's where empty.
        schedulers: to try; of equal ones the first is taken.
        threshold: of the guard of the adaptive policy.

    Raises:
        ConfigError: settings that do not fit the trace.
    """
    most = world.trace.gamma
    tried = list(gammas) or list(range(1, most + 1))
    found = []
    for concurrency in concurrencies:
        load = Closed(concurrency)
        points = [replay(world, Policy(name, gamma), load) for gamma in tried for name in schedulers]
        top = max(point.throughput for point in points)
        best = next(point for point in points if point.throughput >= (1 - CLOSE) * top)
        found.append(
            Advice(
                concurrency,
                plain=replay(world, Policy("off", 0), load),
                best=best,
                adaptive=replay(world, Policy("causal", adaptive=threshold), load),
                bound=replay(world, Policy("clairvoyant", best.policy.gamma), load),
            )
        )
    return found
