"""What a calibrator is held to."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from dspark.plugins import Kind
from dspark.testing.contracts import NotApplicable, Seen, contract
from dspark.testing.materials import make_batch, subset
from dspark.testing.suite import ComponentSuite
from dspark.types import BatchView, FloatArray, Mode

SIZES = ((1, 1), (1, 2), (2, 2), (3, 4))
"""(rows, gamma), small ones first."""


class CalibratorSuite(ComponentSuite):
    """Holds a calibrator to ``dspark.protocols.Calibrator``.

    Attributes:
        gamma: the largest block size tried.
    """

    kind: ClassVar[Kind] = Kind.CALIBRATOR
    gamma: int = 4

    def example(self, rows: int, gamma: int, mode: Mode = Mode.REJECTION) -> tuple[FloatArray, BatchView]:
        """Confidences, 0 and 1 among them, and a batch."""
        rng = self.random(f"{rows}.{gamma}")
        probs = rng.random((rows, gamma))
        probs = np.where(rng.random(probs.shape) < 0.3, rng.choice([0.0, 1.0], size=probs.shape), probs)
        return probs, make_batch(rng, rows, gamma, 5, mode=mode)

    def calibrate(self, made: Any, probs: FloatArray, batch: BatchView) -> FloatArray:
        """c'."""
        return np.array(made.calibrate(probs.copy(), batch), dtype=np.float64)

    @contract("c' is [R, gamma], every entry a number from 0 to 1, in every mode")
    def test_values(self) -> None:
        made = self.build()
        for mode in Mode:
            for rows, gamma in SIZES:
                if gamma > self.gamma:
                    continue
                probs, batch = self.example(rows, gamma, mode)
                got = np.asarray(made.calibrate(probs.copy(), batch))
                if got.shape != probs.shape or not ((got >= 0) & (got <= 1)).all():
                    raise Seen(f"it gave {got.tolist()}", c=probs, mode=mode.value)

    @contract("c'_k depends on c_1..c_k alone, never on later ones")
    def test_prefix_causality(self) -> None:
        made = self.build()
        for rows, gamma in SIZES:
            if gamma > self.gamma:
                continue
            probs, batch = self.example(rows, gamma)
            wanted = self.calibrate(made, probs, batch)
            for k in range(1, gamma):
                for fill in (0.0, 0.5, 1.0):
                    other = probs.copy()
                    other[:, k:] = fill
                    got = self.calibrate(made, other, batch)[:, :k]
                    if not np.array_equal(got, wanted[:, :k]):
                        raise Seen(
                            f"c_{k + 1} moved c' before it from {wanted[:, :k].tolist()} to {got.tolist()}",
                            c=probs,
                            changed=other,
                        )

    @contract("a row's c' does not depend on other rows")
    def test_rows_are_apart(self) -> None:
        made = self.build()
        probs, batch = self.example(3, min(2, self.gamma))
        whole = self.calibrate(made, probs, batch)
        for rows in ([0], [2], [2, 0]):
            got = self.calibrate(made, probs[rows], subset(batch, rows))
            if not np.array_equal(got, whole[rows]):
                raise Seen(f"rows {rows} got {got.tolist()}, in the batch {whole[rows].tolist()}", c=probs)

    @contract("with `monotone`, each factor keeps the order of its values")
    def test_monotone_is_true(self) -> None:
        declared: Any = getattr(self.build(), "capabilities", self.registration.capabilities)
        if not declared.monotone:
            raise NotApplicable("it declares monotone=False")
        made = self.build()
        levels = np.linspace(0.0, 1.0, 21)
        _, batch = self.example(1, 1)
        for k in range(self.gamma):
            before = self.random(f"level {k}").random(k)
            values = [self.calibrate(made, np.array([[*before, level]]), batch)[0, k] for level in levels]
            falls = np.flatnonzero(np.diff(values) < 0)
            if len(falls):
                i = int(falls[0])
                low, high = levels[i : i + 2]
                raise Seen(f"c_{k + 1} = {low:.2f} becomes {values[i]:.4g}, and {high:.2f} becomes {values[i + 1]:.4g}")

    @contract("it is a function of its inputs: asked twice it answers the same")
    def test_determinism(self) -> None:
        made = self.build()
        probs, batch = self.example(2, min(2, self.gamma))
        first, again = (self.calibrate(made, probs, batch) for _ in range(2))
        if not np.array_equal(first, again):
            raise Seen(f"first {first.tolist()}, then {again.tolist()}", c=probs)

    @contract("it changes none of its inputs")
    def test_inputs_stay(self) -> None:
        probs, batch = self.example(2, min(2, self.gamma))
        given = probs.copy()
        self.build().calibrate(given, batch)
        if not np.array_equal(given, probs):
            raise Seen(f"c became {given.tolist()}", c=probs)
